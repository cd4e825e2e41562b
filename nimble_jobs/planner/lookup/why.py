"""Says whether a request's schedule is stored; if not, how its key differs from the nearest stored one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nimble_jobs.planner.keys.files import file_of, main_files, unnamed, with_main_files
from nimble_jobs.planner.keys.request import Request, key_parts, schedule_key
from nimble_jobs.planner.lookup.stored import Taken, read_stored
from nimble_jobs.schedule import Schedule
from nimble_jobs.store import ScheduleEntry, ScheduleState, Store
from nimble_jobs.store.prune import aged


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A part of a key that two keys do not share. None if a key has no such part."""

    part: str
    wanted: str | None
    stored: str | None


@dataclass(frozen=True, kw_only=True)
class Why:
    """The answer."""

    key: str
    parts: dict[str, str]
    hit: bool
    reason: str | None  # of a miss
    nearest: ScheduleEntry | None  # of a miss; None if nothing is stored
    differences: tuple[Difference, ...]  # from the nearest
    schedule: Schedule | None = None  # of a hit

    @property
    def changed_files(self) -> list[str]:
        """Files of the model, or of its loss, that are not what they were when the nearest schedule was made."""
        if self.nearest is None or _model(self.nearest.parts) != _model(self.parts):
            return []
        return list(dict.fromkeys(name for d in self.differences if (name := file_of(d.part)) is not None))


def why(request: Request, *, device: torch.device, store: Store) -> Why:
    """`why_of` a request's key. The model is not built. Raises ModelError, StoreError."""
    return why_of(key_parts(request, device), store=store)


def why_of(parts: dict[str, str], *, store: Store) -> Why:
    """Compare a key with the stored ones; artifacts are read as a job would read them, and what is missing or damaged
    is quarantined. Raises StoreError.
    """
    key = schedule_key(parts)
    found = read_stored(key, store)
    if isinstance(found, Taken):
        schedule = found.value.schedule
        return Why(key=key, parts=parts, hit=True, reason=None, nearest=None, differences=(), schedule=schedule)
    near = nearest(parts, aged(store.schedules.list()))
    return Why(
        key=key,
        parts=parts,
        hit=False,
        reason=found.reason,
        nearest=near,
        differences=differences(parts, near.parts) if near else (),
    )


def nearest(parts: Mapping[str, str], entries: Sequence[ScheduleEntry]) -> ScheduleEntry | None:
    """The entry whose key differs in the fewest parts, those of the same model before all others.

    Among equals a ready one comes first, then the one that was used last.
    """
    model = _model(parts)
    return min(
        entries,
        key=lambda entry: (
            _model(entry.parts) != model,
            len(differences(parts, entry.parts)),
            entry.state != ScheduleState.READY,
            -entry.last_used_at,
        ),
        default=None,
    )


def _model(parts: Mapping[str, str]) -> str | None:
    return unnamed(parts).get("model.source")


def differences(wanted: Mapping[str, str], stored: Mapping[str, str]) -> tuple[Difference, ...]:
    """The parts that differ, by name; what the model's own file, or the loss's, is called is no difference."""
    stored = with_main_files(stored, main_files(wanted))
    return tuple(
        Difference(part=name, wanted=wanted.get(name), stored=stored.get(name))
        for name in sorted({*wanted, *stored})
        if wanted.get(name) != stored.get(name)
    )
