"""Which devices the ranks of a job run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

import torch

from nimble_jobs.engine.device import able, present
from nimble_jobs.errors import DevicesTaken, JobFailed, UsageError
from nimble_jobs.plural import count as counted
from nimble_jobs.store import Store
from nimble_jobs.store.locks import EXCLUSIVE, Lock


@dataclass(frozen=True, kw_only=True)
class Loan:
    """How a job gets other devices of its own worker."""

    job: str
    worker: str  # under whose id the job's own device works
    ask: Callable[[int], None]  # for so many in all
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
    while True:
        with ExitStack() as locks:
            found = _look(store, [str(device), *(name for name in there if name != str(device))], count, loan, locks)
            if len(found.chosen) == count:
                yield found.chosen
                return
        if loan is None or len(found.chosen) + len(found.siblings) < count:
            passes = len(found.chosen) + len(found.siblings) + found.busy >= count
            raise (DevicesTaken if passes else JobFailed)(
                f"run.gpus: found {count}, but only {counted(len(found.chosen), 'CUDA device')} of this machine can be "
                f"had: {'; '.join(found.refused)}; expected fewer, or workers for fewer devices"
            )
        loan.ask(count - len(found.chosen) + found.lent)
        loan.wait(", ".join(found.siblings))


@dataclass
class _Found:
    chosen: list[str]
    lent: int = 0  # how many of those the worker has lent
    siblings: list[str] = field(default_factory=list)  # devices of the job's own worker that it may still lend
    busy: int = 0  # other jobs' ranks are there
    refused: list[str] = field(default_factory=list)  # why others cannot be had


def _look(store: Store, names: Sequence[str], count: int, loan: Loan | None, locks: ExitStack) -> _Found:
    """What can be had of these devices, the leader's own first. Until `locks` end, no other job takes what was chosen.

    Raises DevicesTaken.
    """
    live = [worker for worker in store.workers.live() if store.workers.here(worker)]
    held = {worker.device: worker for worker in live}
    process = next((worker.pid for worker in live if loan is not None and worker.id == loan.worker), None)

    def taken(name: str) -> bool:
        """Whether another job has it. If not, no other job takes it from now on."""
        lock = locks.enter_context(closing(Lock(store.home / "workers" / f"rank-{name.replace(':', '-')}.lock")))
        return not lock.take(EXCLUSIVE)

    own, *others = names
    if taken(own):
        raise DevicesTaken(
            f"run.gpus: {own}, on which this job runs, is taken by another job's rank, which was there before; "
            "expected a worker on another device, or a later attempt"
        )
    found = _Found([own])
    for name in others:
        if len(found.chosen) == count:
            break
        holder = held.get(name)
        sibling = holder is not None and holder.pid == process
        lent = sibling and loan is not None and holder is not None and holder.info.get("lent") == loan.job
        if holder is not None and not lent:
            found.refused.append(f"{name} is worker {holder.id}'s")
            found.siblings += [name] if sibling else []
        elif taken(name):
            found.refused.append(f"{name} is taken by another job's rank")
            found.busy += 1
        else:
            found.chosen.append(name)
            found.lent += lent
    return found
