"""Which devices the ranks of a job run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from nimble_jobs.engine.device import able, present
from nimble_jobs.errors import DevicesTaken, JobFailed, UsageError
from nimble_jobs.plural import count as counted
from nimble_jobs.store import Store, Wanted
from nimble_jobs.store.locks import EXCLUSIVE, Lock


@dataclass(frozen=True, kw_only=True)
class Loan:
    """How a job gets other devices of its own worker."""

    job: str
    worker: str  # under whose id the job's own device works
    ask: Callable[[Sequence[str], int], None]  # for so many of these in all; others are not lent any more
    wait: Callable[[str], None]  # a moment, for a reason; raises what ends the wait


@contextmanager
def places(store: Store, device: torch.device, count: int, loan: Loan | None = None) -> Iterator[list[str]]:
    """`count` devices, the leader's own first. GPUs of other workers, and of other jobs' ranks, are left alone.

    Those that the leader's own worker has are lent to the job once they are idle, if there is a `loan`. On a CPU all
    ranks share its cores. Raises UsageError if this machine has too few devices; if too few of them can be had,
    DevicesTaken where it takes only other jobs to end, and JobFailed otherwise. The leader computes on its own device
    and on no other, so it is DevicesTaken, too, if a rank was on that before.
    """
    if not able(device).separate_memory:
        cores = len(os.sched_getaffinity(0))
        if count > cores:
            raise UsageError(f"run.gpus: found {count}, but this process has {counted(cores, 'core')} of the CPU")
        yield [str(device)] * count
        return
    there = [str(other) for other in present() if other.type == device.type]
    if count > len(there):
        raise UsageError(f"run.gpus: found {count}, but this machine has {counted(len(there), 'CUDA device')}")
    others = [name for name in there if name != str(device)]
    asked: tuple[list[str], int] | None = None
    busy: set[str] = set()
    while True:
        with ExitStack() as locks:
            found = _look(store, str(device), others, count, loan, busy, locks)
            if len(found.chosen) == count:
                if loan is not None and asked is not None:
                    used = [name for name in found.chosen if name in found.lent]
                    loan.ask(used, len(used))  # the others are lent in vain
                yield found.chosen
                return
        missing, busy = count - 1 - len(found.free), found.busy
        if loan is None or missing > len(found.siblings):
            passes = missing <= len(found.siblings) + len(busy) + found.leaving
            raise (DevicesTaken if passes else JobFailed)(
                f"run.gpus: found {count}, but only {counted(count - missing, 'CUDA device')} of this machine can be "
                f"had: {'; '.join(found.refused[name] for name in others if name in found.refused)}; "
                "expected fewer, or workers for fewer devices"
            )
        if asked != (wish := ([*found.lent, *found.siblings], missing + len(found.lent))):
            loan.ask(*wish)
            asked = wish
        loan.wait(", ".join(found.siblings))


@dataclass
class _Found:
    free: list[str] = field(default_factory=list)  # no worker has it, or it was lent to the job
    lent: list[str] = field(default_factory=list)  # those of them that were lent
    chosen: list[str] = field(default_factory=list)  # the leader's own first
    siblings: list[str] = field(default_factory=list)  # devices of the job's own worker that it may still lend
    busy: set[str] = field(default_factory=set)  # other jobs' ranks are there
    leaving: int = 0  # of the job's own worker, which gives them up
    refused: dict[str, str] = field(default_factory=dict)  # why others cannot be had

    def choose(self, own: str, count: int, taken: Callable[[str], bool]) -> None:
        """Take so many, if there seem to be enough. What is `taken` is busy, and so not free."""
        if 1 + len(self.free) >= count:
            self.chosen = [own]
            for name in self.free:
                if len(self.chosen) == count:
                    break
                if taken(name):
                    self.busy.add(name)
                else:
                    self.chosen.append(name)
        self.refused |= {name: f"{name} is taken by another job's rank" for name in self.busy}
        self.free = [name for name in self.free if name not in self.busy]
        self.lent = [name for name in self.lent if name not in self.busy]


_ORDERED: dict[str | None, str] = {Wanted.PAUSE: ", which is paused", Wanted.DRAIN: ", which is asked to leave"}


def _look(
    store: Store,
    own: str,
    others: Sequence[str],
    count: int,
    loan: Loan | None,
    busy: Collection[str],
    locks: ExitStack,
) -> _Found:
    """What can be had of these devices. Until `locks` end, no other job takes what was chosen.

    Those that were `busy` at the last look are looked at first, and no others are taken unless all together may be
    enough: another job that looks meanwhile would take them for busy. Raises DevicesTaken.
    """
    live = [worker for worker in store.workers.live() if store.workers.here(worker)]
    held = {worker.device: worker for worker in live}
    process = next((worker.pid for worker in live if loan is not None and worker.id == loan.worker), None)

    @cache
    def taken(name: str) -> bool:
        """Whether another job has it. If not, no other job takes it from now on."""
        lock = locks.enter_context(closing(Lock(store.home / "workers" / f"rank-{name.replace(':', '-')}.lock")))
        return not lock.take(EXCLUSIVE)

    if taken(own):
        raise DevicesTaken(
            f"run.gpus: {own}, on which this job runs, is taken by another job's rank, which was there before; "
            "expected a worker on another device, or a later attempt"
        )
    found = _Found()
    for name in others:
        holder = held.get(name)
        sibling = holder is not None and holder.pid == process
        lent = sibling and loan is not None and holder is not None and holder.info.get("lent") == loan.job
        if holder is not None and not lent:
            order = holder.info.get("wanted") if sibling else None
            found.refused[name] = f"{name} is worker {holder.id}'s{_ORDERED.get(order, '')}"
            found.leaving += order == Wanted.DRAIN
            if not sibling or order in _ORDERED:
                continue
        if name in busy and (lent or taken(name)):  # one that was lent in vain goes back first
            found.busy.add(name)
        elif sibling and not lent:
            found.siblings.append(name)
        else:
            found.free.append(name)
            found.lent += [name] if lent else []
    found.choose(own, count, taken)
    return found
