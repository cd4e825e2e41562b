"""Reads what the store has under a key, with every artifact that loading it needs, and stores new schedules.

The answer to a lookup is one of four types: the store had it; it is missing; nothing is to be built; or that is decided
later.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from nimble_jobs.errors import Damaged, NotFound
from nimble_jobs.job import Hit
from nimble_jobs.schedule import COMPILERS, Schedule
from nimble_jobs.store import Store
from nimble_jobs.store.schedules import Saving

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


@dataclass(frozen=True, kw_only=True)
class Material:
    """A stored schedule and its artifacts, all of their bytes hashed. No artifacts if kernels are compiled again."""

    schedule: Schedule
    constants: Mapping[str, torch.Tensor]  # uint8, by the SHA-256 that the program names
    binaries: bytes  # machine code
    digest: str  # of the row


@dataclass(frozen=True, kw_only=True)
class Storable:
    """A new schedule, the parts of its key, and the bytes that must be stored beside it."""

    schedule: Schedule
    parts: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    binaries: bytes  # machine code; empty if kernels are compiled again, or are operators
    refused: str | None = None  # why it must not be used, nor built again


def keep(storables: Collection[Storable], store: Store) -> None:
    """Store new schedules, all or none of them, in place of what was there. Raises StoreError."""
    now = time.time()
    with store.artifacts.in_use():
        for each in storables:
            for tensor in each.constants.values():
                store.artifacts.put(tensor.cpu().numpy().tobytes())
            if each.binaries:
                store.artifacts.put(each.binaries)
        savings = [Saving(schedule=s.schedule, parts=s.parts, refused=s.refused) for s in storables]
        store.schedules.save_all(savings, now)
    store.keep_to_size(now, in_use=[each.schedule.key for each in storables])


def read_stored(key: str, store: Store) -> Taken[Material] | Miss | Refused:
    """The schedule of a key with its artifacts.

    If something is missing or damaged, the answer is a miss, and the schedule is quarantined; not if a file is only
    missing here while other state folders share the schedule. A schedule that failed its check before is refused. No
    artifact is deleted meanwhile. Raises StateFolderRefused, StoreError.
    """
    store.guard()
    with store.artifacts.in_use():
        found = store.schedules.lookup(key, flush=False)  # a job may look up many, one after the other
        if found.refused is not None:
            return Refused(reason=found.reason or found.refused, fallback=found.refused)
        if found.stored is None:
            return Miss(reason=found.reason or "")
        try:
            return Taken(value=read_material(found.stored.load(), store, digest=found.stored.sha256))
        except NotFound as e:
            reason = f"the stored schedule was not used: {e}"
            if store.is_shared:  # the state folder that built it has its files
                return Miss(reason=reason)
        except Damaged as e:
            reason = f"the stored schedule was not used: {e}"
    store.schedules.quarantine(key, reason, time.time(), digest=found.stored.sha256)
    return Miss(reason=reason)


def read_material(schedule: Schedule, store: Store, *, digest: str) -> Material:
    """The artifacts that loading a schedule needs, for use inside `in_use`. Raises Damaged, NotFound."""
    if compiles_again(schedule):
        return Material(schedule=schedule, constants={}, binaries=b"", digest=digest)
    names = {p.name for p in schedule.program.constants}
    constants = {n: torch.frombuffer(bytearray(store.artifacts.fetch(n)), dtype=torch.uint8) for n in sorted(names)}
    binaries = store.artifacts.fetch(schedule.binaries) if schedule.binaries is not None else b""
    return Material(schedule=schedule, constants=constants, binaries=binaries, digest=digest)


def compiles_again(schedule: Schedule) -> bool:
    """Whether its kernels must be compiled again, which also makes its constants again."""
    return schedule.kernels in COMPILERS and not schedule.compiled
