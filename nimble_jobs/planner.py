"""Finds the schedule that a job asks for: resident, stored, or recorded and built now."""

from __future__ import annotations

from typing import Protocol


class Resident(Protocol):
    """Something that occupies device memory until it is closed."""

    @property
    def bytes(self) -> int: ...

    def close(self) -> None: ...


class Residents(Protocol):
    """What a worker keeps on its device between jobs."""

    def get(self, key: str) -> Resident | None:
        """The value kept under `key`, now the most recently used."""

    def put(self, key: str, value: Resident) -> None:
        """Keep `value`; may evict others."""

    def make_room(self, nbytes: int) -> None:
        """Evict, least recently used first, until `nbytes` more fit the budget."""
