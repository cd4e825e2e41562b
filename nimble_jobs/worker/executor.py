"""Runs attempts of jobs in this process and tells the store how they ended."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nimble_jobs import moves
from nimble_jobs import spec as specs
from nimble_jobs.errors import DataError, FencedOut, NimbleError, OutOfMemory, foreseen
from nimble_jobs.job import Job, JobState
from nimble_jobs.machine import Software, before_cuda, host_software
from nimble_jobs.patience import Patience
from nimble_jobs.spec.units import format_duration
from nimble_jobs.store import Membership, Store
from nimble_jobs.worker import endings, parting
from nimble_jobs.worker.faults import explain
from nimble_jobs.worker.leftovers import tidy
from nimble_jobs.worker.logs import job_log
from nimble_jobs.worker.pulse import Pulse
from nimble_jobs.worker.residency import Residents, default_budget_bytes
from nimble_jobs.workloads.context import JobContext, Outcome, Stop, Stopped

if TYPE_CHECKING:
    from nimble_jobs.decoding.pool import Decoders
    from nimble_jobs.planner import Builders

log = logging.getLogger(__name__)

Run = Callable[[JobContext], Outcome]
OnReport = Callable[[dict[str, Any]], None]
OnWait = Callable[[str | None], None]

DRAIN_S = 20.0  # how long a wait goes on after the worker was asked to stop


@dataclass(frozen=True, kw_only=True)
class Station:
    """The place where attempts run: a device, the models resident on it, and the code that does the work."""

    store: Store
    device: str  # cpu | cuda:N
    residents: Residents
    run: Run
    builders: Builders | None = None  # for progressive jobs; without it they build first
    described: str = ""  # the device's name, as in schedules
    decoders: Decoders | None = None  # processes that decode pictures; without them threads do
    software: Software = field(default_factory=dict)  # what decides over the numbers that it computes
    most_ranks: int = 1  # so many ranks of a training fit on the machine's devices of this type
    memory_bytes: int | None = None  # the user's limit, if set: no schedule that needs more is built
    # Asks the worker for so many of these devices, which other posts of it have; None: it has none.
    borrow: Callable[[Sequence[str], int], None] | None = None

    def close(self) -> None:
        """Free resident models, and end builds and decoders that still run."""
        self.residents.clear()
        if self.builders is not None:
            self.builders.close()
        if self.decoders is not None:
            self.decoders.close()


def execute(
    job: Job,
    station: Station,
    *,
    wish: Callable[[], Stop] = lambda: Stop.GO,
    retry: bool = True,
    on_report: OnReport | None = None,
    on_wait: OnWait = lambda _reason: None,
    on_move: Callable[[], None] = lambda: None,
    watched: Callable[[Pulse], AbstractContextManager[object]] = nullcontext,
) -> bool:
    """Run `job`'s current attempt to its end and record it. False if this process must not run another job.

    With `retry=False` every failure is final. It waits for a disk or store that cannot be written, as long as
    `patience` allows, and reports waits to `on_wait`. `on_move` is called when this thread makes progress. The workload
    runs inside `watched`. Raises StoreError if the end of the attempt cannot be recorded.
    """
    store = station.store
    jobs = store.jobs
    membership = store.membership(job) if parting.shared(job) else None
    with (
        job_log(store.home, job.id),
        Pulse(membership or jobs, job, wish=wish, on_report=on_report, on_move=on_move) as pulse,
    ):
        patience = patience_of(pulse, on_wait, store.settings.usable().limits.patience)
        log.info("%s: attempt %d of job %s on %s", job.name, job.attempt, job.id, station.device)
        failure: NimbleError | None = None
        try:
            with watched(pulse):
                outcome = _run(job, station, pulse, patience, membership)
        except FencedOut as fenced:
            if not _owned(store, pulse, patience):
                log.warning("attempt %d no longer owns the job; its results are dropped", job.attempt)
                with store.patient(patience.unconditional()):
                    tidy(store, job.id)  # if the job was cancelled, nobody else will
                return True
            failure = _bare(DataError(str(fenced)))  # it still owns the job, so somebody else removed its files
            log.error("%s", failure)
        except KeyboardInterrupt:  # the second signal of a `run` command
            raise
        except BaseException as error:  # the model is user code and may raise anything
            failure = explain(error, station.device)
            log.error("%s", failure, exc_info=None if foreseen(error) else error)
            failure = _bare(failure)
        with store.patient(patience.unconditional()):  # the attempt has ended and only needs to be recorded
            pulse.flush_soon()  # the last counts, with the end of the attempt
            ended: Job | None = None
            if failure is None:
                ended = _record(job, store, replace(outcome, timings=pulse.timings(outcome.timings)))
            else:
                parting.failed(store, job, failure, retry=retry)
            tidy(store, job.id, ended)
    if failure is None:
        return True
    if isinstance(failure, OutOfMemory):
        _free(station)
    return not failure.ends_process


def real_station(store: Store, worker: str, device: str, gpu_memory_bytes: int | None) -> Station:
    """The station that runs real jobs on `device` (auto, cpu, cuda, cuda:N). Raises UsageError if there is no such
    device.
    """
    before_cuda()
    from nimble_jobs import workloads
    from nimble_jobs.decoding.pool import Decoders
    from nimble_jobs.engine.device import describe, memory_bytes, most_ranks, numerics, resolve
    from nimble_jobs.planner import Builders

    found = resolve(device)
    resolved = str(found)
    residents = Residents(
        gpu_memory_bytes or default_budget_bytes(memory_bytes(found)),
        on_change=lambda held: store.schedules.set_residents(worker, held),
    )
    return Station(
        store=store,
        device=resolved,
        residents=residents,
        run=workloads.run,
        builders=Builders(store.home),
        described=describe(found),
        decoders=Decoders(),
        software=host_software() | numerics(found),
        most_ranks=most_ranks(found),
        memory_bytes=gpu_memory_bytes,
    )


def patience_of(pulse: Pulse, on_wait: OnWait, limit_s: float) -> Patience:
    """How long an attempt waits for a disk or the store: at most `limit_s`, and not after it is asked to end."""
    drained_at: float | None = None

    def check(_waited_s: float) -> None:
        nonlocal drained_at
        stop = pulse.stop()
        if stop is Stop.DRAIN:  # the worker stops, but not at once, so that a checkpoint may still be written
            drained_at = drained_at or time.monotonic()
            if time.monotonic() - drained_at < DRAIN_S:
                return
        if stop is not Stop.GO:
            raise Stopped

    def tell(reason: str | None) -> None:
        pulse.waits(reason)
        on_wait(reason)
        if reason is None:
            log.warning("the wait is over; the job continues")
        else:
            log.warning("waiting until this works again, for at most %s: %s", format_duration(limit_s), reason)

    return Patience(limit_s=limit_s, check=check, tell=tell)


def _run(job: Job, station: Station, pulse: Pulse, patience: Patience, membership: Membership | None) -> Outcome:
    def event(kind: str, message: str, data: dict[str, Any]) -> None:
        log.info("%s: %s", kind, message)
        station.store.jobs.event_soon(kind, message, job.id, job.attempt, data, now=time.time())

    context = JobContext(
        job=job,
        spec=specs.restore(job.spec),
        device=station.device,
        store=station.store,
        residents=station.residents,
        stop=pulse.stop,
        report=pulse.report,
        event=event,
        allowed_python=tuple(Path(folder) for folder in job.allow_python),
        builders=station.builders,
        decoders=station.decoders,
        memory_bytes=station.memory_bytes,
        patience=patience,
        membership=membership,
        software=station.software,
        borrow=station.borrow,
    )
    try:
        # a model's prints must not mix with what commands print
        with redirect_stdout(sys.stderr), station.store.patient(patience), moves.told_to(pulse.moved):
            station.residents.begin()
            outcome = station.run(context)
    except Stopped:
        outcome = Outcome(stop=pulse.stop())
    return outcome


def _owned(store: Store, pulse: Pulse, patience: Patience) -> bool:
    """Whether the attempt still owns its job, as far as the store knows."""
    try:
        with store.patient(patience.unconditional()):
            pulse.flush(always=True)
    except FencedOut:
        return False
    return True


def _record(job: Job, store: Store, outcome: Outcome) -> Job | None:
    """Record the end of the attempt. Returns the job in its final state if it succeeded."""
    if outcome.left:
        log.info("%s: attempt %d: nothing is left to do here; another worker publishes", job.id, job.attempt)
        return None
    match outcome.stop:
        case Stop.GO:
            if endings.succeeded(store.jobs, job, outcome):
                return replace(job, state=JobState.SUCCEEDED)
        case Stop.DRAIN:
            parting.requeued(store, job, "the worker was stopped")
        case Stop.CANCEL:
            endings.cancelled(store.jobs, job)
        case Stop.TIMEOUT:
            endings.timed_out(store.jobs, job)
    return None


def _bare(error: NimbleError) -> NimbleError:
    """The error without its traceback, whose frames would keep tensors alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _free(station: Station) -> None:
    """After an out-of-memory error, free everything for the next attempt."""
    station.residents.clear()
    gc.collect()
    if station.device != "cpu":
        from nimble_jobs.engine.device import release_free_memory

        release_free_memory(sys.modules["torch"].device(station.device))
