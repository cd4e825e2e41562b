"""Disk usage of a state folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nimble_jobs.store.home import DATABASE

if TYPE_CHECKING:
    from nimble_jobs.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes on disk."""

    database_bytes: int  # jobs, events, and the schedules' JSON; 0 if the database is elsewhere
    schedules_bytes: int  # part of the database: the schedules' JSON
    artifacts_bytes: int
    unneeded_bytes: int  # part of the artifacts: those that no schedule needs
    logs_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.database_bytes + self.artifacts_bytes + self.logs_bytes


def sizes(store: Store) -> Sizes:
    """Looks at every file."""
    needed = store.schedules.artifacts()
    names = {ref.name for refs in needed.values() for ref in refs}
    on_disk = {name: store.artifacts.size(name) for name in store.artifacts.names()}
    entries = store.schedules.list()
    return Sizes(
        database_bytes=_bytes(store.home, f"{DATABASE}*"),
        schedules_bytes=sum(entry.bytes for entry in entries)
        - sum(ref.bytes for refs in needed.values() for ref in refs),
        artifacts_bytes=sum(on_disk.values()),
        unneeded_bytes=sum(nbytes for name, nbytes in on_disk.items() if name not in names),
        logs_bytes=_bytes(store.home / "logs", "*"),
    )


def _bytes(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())
