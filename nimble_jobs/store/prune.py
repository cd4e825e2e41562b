"""Finds schedules and artifacts that are no longer needed, and removes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nimble_jobs.spec.units import format_bytes, format_duration
from nimble_jobs.store.records import ArtifactRef, ScheduleEntry, ScheduleState
from nimble_jobs.store.toolchain import Toolchain, toolchain

if TYPE_CHECKING:
    from nimble_jobs.store.contents import Contents


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What to remove. A schedule goes for the first reason that applies."""

    quarantined: bool = False
    stale: bool = False
    unused_for_s: float | None = None
    max_bytes: int | None = None  # of all schedules together; the least recently used go first


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A schedule to remove."""

    entry: ScheduleEntry
    why: str  # empty if the user named it


@dataclass(frozen=True, kw_only=True)
class Removals:
    """A plan of what to remove. Making it changes nothing."""

    schedules: tuple[Removal, ...]
    artifacts: tuple[str, ...]  # artifacts that no schedule will need then
    bytes: int  # of both
    task_times: tuple[str, ...] = ()  # keys of measurements of single tasks
    kept: tuple[Removal, ...]  # schedules that a live worker holds; `why` says why they would have gone


def aged(entries: Sequence[ScheduleEntry], here: Toolchain | None = None) -> list[ScheduleEntry]:
    """The entries, with the state `stale` if this machine's software differs from the one that made them."""
    here = here or toolchain()
    return [_aged(entry, here) for entry in entries]


def look(
    store: Contents,
    wish: Wish,
    now: float,
    *,
    keys: Collection[str] = (),
    in_use: Collection[str] = (),
    force: bool = False,
) -> Removals:
    """Plan the removal of what `wish` names, or of `keys`.

    Schedules that are `in_use`, or resident in a live worker, stay unless `force` is set, because that worker's next
    job would have to build them again.
    """
    entries = aged(store.schedules.list())
    artifacts = store.schedules.artifacts()
    resident = {*in_use, *store.schedules.residents([worker.id for worker in store.workers.live()])}
    chosen = [Removal(entry=entry, why="") for entry in entries if entry.key in keys]
    chosen += [r for r in _chosen(entries, artifacts, wish, now, resident) if r.entry.key not in keys]
    going = tuple(r for r in chosen if force or r.entry.key not in resident)
    gone = {r.entry.key for r in going}
    needed = {ref.name for key, refs in artifacts.items() if key not in gone for ref in refs}
    unneeded = tuple(name for name in store.artifacts.names() if name not in needed)
    texts = sum(_text_bytes(r.entry, artifacts) for r in going)
    return Removals(
        schedules=going,
        artifacts=unneeded,
        bytes=texts + sum(store.artifacts.size(name) for name in unneeded),
        task_times=tuple(_task_times(store, wish, now)),
        kept=tuple(r for r in chosen if r.entry.key in resident and r.entry.key not in gone),
    )


def remove(store: Contents, removals: Removals) -> int:
    """Carry out the plan; returns how many schedules went. Waits until nobody loads or saves. Raises StoreError.

    Schedules that were saved again since `look` stay, with their artifacts.
    """
    with store.artifacts.alone():
        digests = {r.entry.key: r.entry.sha256 for r in removals.schedules}
        count = store.schedules.remove(digests, digests=digests)
        needed = {ref.name for refs in store.schedules.artifacts().values() for ref in refs}
        store.task_times.remove(removals.task_times)
        for name in removals.artifacts:
            if name not in needed:
                store.artifacts.remove(name)
    return count


def _task_times(store: Contents, wish: Wish, now: float) -> Iterator[str]:
    """Keys of the measurements to remove. Damaged ones go with what is quarantined."""
    damaged = set(store.task_times.damaged()) if wish.quarantined else set()
    for row in store.task_times.rows() if damaged or wish.stale or wish.unused_for_s is not None else ():
        unused = wish.unused_for_s is not None and now - row.last_used_at >= wish.unused_for_s
        if row.key in damaged or unused or (wish.stale and toolchain().outdated(row.parts) is not None):
            yield row.key


def stored_bytes(entries: Sequence[ScheduleEntry], artifacts: Mapping[str, Collection[ArtifactRef]]) -> int:
    """Bytes of schedules and their artifacts; a shared artifact counts once."""
    shared = {ref.name: ref.bytes for entry in entries for ref in artifacts.get(entry.key, ())}
    return sum(_text_bytes(entry, artifacts) for entry in entries) + sum(shared.values())


def _aged(entry: ScheduleEntry, here: Toolchain) -> ScheduleEntry:
    if entry.state != ScheduleState.READY:
        return entry
    why = here.outdated(entry.parts)
    return entry if why is None else replace(entry, state=ScheduleState.STALE, reason=why)


def _chosen(
    entries: Sequence[ScheduleEntry],
    artifacts: Mapping[str, Collection[ArtifactRef]],
    wish: Wish,
    now: float,
    resident: Collection[str],
) -> list[Removal]:
    chosen = []
    for entry in entries:
        unused_s = max(0.0, now - entry.last_used_at)
        if wish.quarantined and entry.state == ScheduleState.QUARANTINED:
            chosen.append(Removal(entry=entry, why=f"quarantined: {_reason(entry)}"))
        elif wish.stale and entry.state == ScheduleState.STALE:
            chosen.append(Removal(entry=entry, why=f"stale: {_reason(entry)}"))
        elif wish.unused_for_s is not None and unused_s >= wish.unused_for_s:
            chosen.append(Removal(entry=entry, why=f"unused for {_coarse(unused_s)}"))
    if wish.max_bytes is not None:
        gone = {r.entry.key for r in chosen if r.entry.key not in resident}
        left = [entry for entry in entries if entry.key not in gone]
        chosen += _over(left, artifacts, wish.max_bytes, {r.entry.key for r in chosen} | set(resident))
    return chosen


def _over(
    entries: Sequence[ScheduleEntry],
    artifacts: Mapping[str, Collection[ArtifactRef]],
    max_bytes: int,
    spared: Collection[str],
) -> list[Removal]:
    """The least recently used that must go so that the others fit."""
    total = stored_bytes(entries, artifacts)
    users = Counter(ref.name for entry in entries for ref in artifacts.get(entry.key, ()))
    surplus = []
    for entry in sorted(entries, key=lambda entry: (entry.last_used_at, entry.key)):
        if total <= max_bytes:
            break
        if entry.key in spared:
            continue
        total -= _text_bytes(entry, artifacts)
        for ref in artifacts.get(entry.key, ()):
            users[ref.name] -= 1
            total -= ref.bytes if not users[ref.name] else 0
        surplus.append(
            Removal(entry=entry, why=f"least recently used, and the total is over {format_bytes(max_bytes)}")
        )
    return surplus


def _text_bytes(entry: ScheduleEntry, artifacts: Mapping[str, Collection[ArtifactRef]]) -> int:
    return entry.bytes - sum(ref.bytes for ref in artifacts.get(entry.key, ()))


def _coarse(seconds: float) -> str:
    """Whole days, or below one day whole minutes."""
    return format_duration(seconds - seconds % (86400 if seconds >= 86400 else 60))


def _reason(entry: ScheduleEntry) -> str:
    return (entry.reason or "no reason was recorded").removeprefix(f"schedule {entry.key}: ")
