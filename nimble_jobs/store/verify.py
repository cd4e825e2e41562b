"""Verifies every byte of the stored schedules, and quarantines damaged ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nimble_jobs.errors import Damaged, NotFound
from nimble_jobs.store.records import ScheduleEntry, ScheduleState

if TYPE_CHECKING:
    from nimble_jobs.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result for one schedule."""

    entry: ScheduleEntry
    sound: bool
    found_now: bool = False  # it was ready until this check
    said: str = ""
    hashed_bytes: int = 0


def verify(store: Store, entries: Sequence[ScheduleEntry], now: float) -> Iterator[Verdict]:
    """Hash each schedule's row, text and artifacts again, and quarantine the damaged ones.

    A schedule that is quarantined already is not sound; `said` is the earlier reason. Raises StoreError, and
    quarantines nothing, if the bytes cannot be read.
    """
    for entry in entries:
        if entry.state == ScheduleState.QUARANTINED:
            yield Verdict(entry=entry, sound=False, said=entry.reason or "no reason was recorded")
            continue
        try:
            with store.artifacts.in_use():
                stored = store.schedules.verified(entry.key)
                if entry.state == ScheduleState.READY:  # the JSON of another format cannot be checked here
                    stored.load()
                artifacts = [len(store.artifacts.fetch(ref.name)) for ref in stored.artifacts]
        except (Damaged, NotFound) as e:
            if entry.key not in {left.key for left in store.schedules.list()}:
                continue  # removed meanwhile
            why = str(e).removeprefix(f"schedule {entry.key}: ")
            store.schedules.quarantine(entry.key, why, now, digest=entry.sha256)
            yield Verdict(entry=entry, sound=False, found_now=True, said=why)
        else:
            yield Verdict(entry=entry, sound=True, hashed_bytes=len(stored.text.encode()) + sum(artifacts))


def damaged_leftovers(store: Store) -> list[str]:
    """One line for each damaged artifact that no schedule needs. Nothing ever reads these.

    Raises StoreError if the bytes cannot be read.
    """
    needed = {ref.name for refs in store.schedules.artifacts().values() for ref in refs}
    damaged = []
    for name in store.artifacts.names():
        if name not in needed:
            try:
                store.artifacts.get(name)
            except (Damaged, NotFound) as e:
                damaged.append(str(e))
    return damaged
