"""Which devices the ranks of a job run on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.errors import DevicesTaken, JobFailed, UsageError
from nimble_jobs.plural import count as counted
from nimble_jobs.store import Store, Wanted, WorkerInfo
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
    most = devices.most_ranks(device)
    if not devices.separate_memory(device):
        if count > most:
            raise UsageError(f"run.gpus: found {count}, but this process has {counted(most, 'core')} of the CPU")
        yield [str(device)] * count
        return
    if count > most:
        raise UsageError(f"run.gpus: found {count}, but this machine has {counted(most, 'CUDA device')}")
    others = [str(other) for other in devices.present() if other.type == device.type and other != device]
    search = _Search(store=store, own=str(device), others=others, count=count, loan=loan)
    asked: tuple[list[str], int] | None = None
    busy: set[str] = set()
    while True:
        with ExitStack() as locks:
            found = search.look(busy, locks)
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


class _Holder(Enum):
    """Who has a device, as the store says."""

    NOBODY = auto()
    JOB = auto()  # it was lent to the job
    SIBLING = auto()  # the job's own worker, which may lend it
    PAUSED = auto()  # that worker, which was told not to use it
    LEAVING = auto()  # that worker, which gives it up
    OTHER = auto()


_WHY = {_Holder.PAUSED: ", which is paused", _Holder.LEAVING: ", which is asked to leave"}


@dataclass(frozen=True, kw_only=True)
class _Search:
    """`count` devices are looked for: the leader's `own`, and some of the `others`."""

    store: Store
    own: str
    others: Sequence[str]
    count: int
    loan: Loan | None

    def look(self, busy: Collection[str], locks: ExitStack) -> _Found:
        """What can be had now. Until `locks` end, no other job takes what was chosen.

        Those that were `busy` at the last look are looked at first, and no others are taken unless all together may be
        enough: another job that looks meanwhile would take them for busy. Raises DevicesTaken.
        """

        @cache
        def taken(name: str) -> bool:
            """Whether another job has it. If not, no other job takes it from now on."""
            path = self.store.home / "workers" / f"rank-{name.replace(':', '-')}.lock"
            return not locks.enter_context(closing(Lock(path))).take(EXCLUSIVE)

        if taken(self.own):
            raise DevicesTaken(
                f"run.gpus: {self.own}, on which this job runs, is taken by another job's rank, which was there "
                "before; expected a worker on another device, or a later attempt"
            )
        found = _Found()
        for name, (holder, worker) in self._holders().items():
            if holder not in (_Holder.NOBODY, _Holder.JOB):
                found.refused[name] = f"{name} is worker {worker}'s{_WHY.get(holder, '')}"
            if holder in (_Holder.OTHER, _Holder.PAUSED, _Holder.LEAVING):
                found.leaving += holder is _Holder.LEAVING
            elif name in busy and (holder is _Holder.JOB or taken(name)):  # one that was lent in vain goes back first
                found.busy.add(name)
            elif holder is _Holder.SIBLING:
                found.siblings.append(name)
            else:
                found.free.append(name)
                found.lent += [name] if holder is _Holder.JOB else []
        found.choose(self.own, self.count, taken)
        return found

    def _holders(self) -> dict[str, tuple[_Holder, str]]:
        """Who has each of the others, with the worker's id if it is a worker."""
        live = [worker for worker in self.store.workers.live() if self.store.workers.here(worker)]
        loan = self.loan
        process = next((worker.pid for worker in live if loan is not None and worker.id == loan.worker), None)

        def holder(worker: WorkerInfo | None) -> _Holder:
            if worker is None:
                return _Holder.NOBODY
            if loan is None or worker.pid != process:
                return _Holder.OTHER
            if worker.info.get("lent") == loan.job:
                return _Holder.JOB
            ordered: dict[object, _Holder] = {Wanted.PAUSE: _Holder.PAUSED, Wanted.DRAIN: _Holder.LEAVING}
            return ordered.get(worker.info.get("wanted"), _Holder.SIBLING)

        by_device = {worker.device: worker for worker in live}
        found = {name: by_device.get(name) for name in self.others}
        return {name: (holder(worker), worker.id if worker else "") for name, worker in found.items()}
