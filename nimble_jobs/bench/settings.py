"""How to measure, whatever is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the process that measures was told."""

    sample_s: float = 1.0
    cold_caches: bool = True
    in_flight: tuple[int, ...] = ()
    idle: bool = False
    fuse: str = "max"
    search_s: float = 900.0  # no further candidate of ours is begun after this time
