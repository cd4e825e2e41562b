"""Which devices the ranks of a job run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import torch

from nimble_jobs.engine.device import able, present
from nimble_jobs.errors import DevicesTaken, JobFailed, UsageError
from nimble_jobs.plural import count as counted
from nimble_jobs.store import Store
from nimble_jobs.store.locks import EXCLUSIVE, Lock


@contextmanager
def places(store: Store, device: torch.device, count: int) -> Iterator[list[str]]:
    """`count` devices, the leader's own first. GPUs of other workers, and of other jobs' ranks, are left alone.

    On a CPU all ranks share its cores. Raises UsageError if this machine has too few devices; if too few of them are
    free, DevicesTaken where it takes only other jobs to end, and JobFailed otherwise. The leader computes on its own
    device and on no other, so it is DevicesTaken, too, if a rank was on that before.
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
    held = {worker.device: worker.id for worker in store.workers.live() if store.workers.here(worker)}

    def taken(name: str) -> bool:
        """Whether another job has it. If not, no other job takes it from now on."""
        lock = locks.enter_context(closing(Lock(store.home / "workers" / f"rank-{name.replace(':', '-')}.lock")))
        return not lock.take(EXCLUSIVE)

    with ExitStack() as locks:
        own = str(device)
        if taken(own):
            raise DevicesTaken(
                f"run.gpus: {own}, on which this job runs, is taken by another job's rank, which was there before; "
                "expected a worker on another device, or a later attempt"
            )
        chosen, refused, busy = [own], list[str](), 0
        for other in (name for name in there if name != own):
            if len(chosen) == count:
                break
            if other in held:
                refused.append(f"{other} is worker {held[other]}'s")
            elif taken(other):
                refused.append(f"{other} is taken by another job's rank")
                busy += 1
            else:
                chosen.append(other)
        if len(chosen) < count:
            passes = len(chosen) + busy >= count
            raise (DevicesTaken if passes else JobFailed)(
                f"run.gpus: found {count}, but only {counted(len(chosen), 'CUDA device')} of this machine can be had: "
                f"{'; '.join(refused)}; expected fewer, or workers for fewer devices"
            )
        yield chosen
