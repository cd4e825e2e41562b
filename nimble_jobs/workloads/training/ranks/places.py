"""Which devices the ranks of a job run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import torch

from nimble_jobs.engine.device import able, present
from nimble_jobs.errors import JobFailed, UsageError
from nimble_jobs.plural import count as counted
from nimble_jobs.store import Store
from nimble_jobs.store.locks import EXCLUSIVE, Lock


@contextmanager
def places(store: Store, device: torch.device, count: int) -> Iterator[list[str]]:
    """`count` devices, the leader's own first. GPUs of other workers, and of other jobs' ranks, are left alone.

    On a CPU all ranks share its cores. Raises UsageError if this machine has too few devices, and JobFailed if too few
    of them are free.
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
    with ExitStack() as locks:
        chosen, taken = [str(device)], list[str]()
        for other in (str(device), *(name for name in there if name != str(device))):
            if len(chosen) == count:
                break
            lock = locks.enter_context(closing(Lock(store.home / "workers" / f"rank-{other.replace(':', '-')}.lock")))
            if other == str(device):
                lock.take(EXCLUSIVE)  # so that no other job takes it; this one has it anyway
            elif other in held:
                taken.append(f"{other} is worker {held[other]}'s")
            elif not lock.take(EXCLUSIVE):
                taken.append(f"{other} is taken by another job's rank")
            else:
                chosen.append(other)
        if len(chosen) < count:
            raise JobFailed(
                f"run.gpus: found {count}, but only {counted(len(chosen), 'CUDA device')} of this machine can be had: "
                f"{'; '.join(taken)}; expected fewer, or workers for fewer devices"
            )
        yield chosen
