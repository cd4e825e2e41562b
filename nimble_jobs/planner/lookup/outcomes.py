"""What comes of asking for a schedule, as types: it was taken from the store, it is missing, nothing can or
shall be built, or that is decided later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from nimble_jobs.job import Hit

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Taken(Generic[T_co]):
    """The store had it."""

    value: T_co


@dataclass(frozen=True, kw_only=True)
class Miss:
    """The store has nothing that can be used; a build may give something that can."""

    reason: str
    spares: bool = False  # what is stored serves others, so a build must not replace it
    counts: bool = True  # False: this miss was counted before


@dataclass(frozen=True, kw_only=True)
class Refused:
    """There is no schedule, and nothing is built: a build would fail again, or the spec wants none."""

    reason: str  # of the miss
    fallback: str  # why the model runs in eager


@dataclass(frozen=True, kw_only=True)
class Later:
    """The model begins without a schedule; whether one is built is decided while it runs."""

    reason: str  # of the miss


@dataclass(frozen=True, kw_only=True)
class Obtained(Generic[T_co]):
    """The end of the search for a schedule: something that runs, or the reason why there is none."""

    hit: Hit
    value: T_co | None = None
    miss_reason: str | None = None  # None for a hit
    fallback: str | None = None  # why the model runs in eager for good
