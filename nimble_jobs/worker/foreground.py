"""Runs the job of a `run` command once, in the command's own process, and ends it there even if it hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from nimble_jobs.errors import FencedOut, NimbleError, StoreError, UsageError
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store
from nimble_jobs.worker import endings
from nimble_jobs.worker.executor import OnReport, Station, execute, real_station
from nimble_jobs.worker.leftovers import tidy
from nimble_jobs.worker.pulse import Pulse
from nimble_jobs.worker.running import Running, Verdict, stall_of
from nimble_jobs.worker.settings import CANCEL_GRACE_S, CANCELLED_S, OVERTIME_S
from nimble_jobs.worker.signals import Interrupts, interrupts
from nimble_jobs.worker.tracing import Trace
from nimble_jobs.workloads.context import Stop

log = logging.getLogger(__name__)

Leave = Callable[[Job], None]

_LOOK_S = 0.1
_TRACES_S = 2.0  # how long the command may take, after the job has ended, to send its trace


def run_inline(
    store: Store,
    job_id: str,
    *,
    gpu_memory_bytes: int | None = None,
    station: Station | None = None,
    on_report: OnReport | None = None,
    leave: Leave | None = None,
) -> Job:
    """Run a foreground job to its end and return its final record. Nothing is retried.

    The first SIGINT or SIGTERM cancels the job at its next batch, the second one at once. `leave` must end the process.
    A thread calls it with the final record if a cancelled or timed-out job does not stop, for instance because it
    blocks in a read. Without `leave` such a job is waited for. Raises UsageError, and cancels the job, if the job does
    not wait for its `run` command or waits for other jobs.
    """
    with store.workers.hold({"role": "run"}) as lease:
        job = store.jobs.claim_foreground(job_id, lease.id, now=time.time())
        if job is None:
            return _not_claimed(store, job_id)
        moves = _Moves()
        with interrupts() as interrupted:
            running = Running(job=job, deadline=None, stall_s=stall_of(job, None), looked_at=time.monotonic())
            try:
                station = station or real_station(store, lease.id, job.device, gpu_memory_bytes)
                _tell_beside(store, job, station.device)
                _tell_alone(store, job, station.device)
                execute(
                    job,
                    station,
                    wish=lambda: Stop.CANCEL if interrupted.count else Stop.GO,
                    retry=False,
                    on_report=on_report,
                    on_wait=lambda reason: running.waits(reason, time.monotonic()),
                    on_move=moves,
                    watched=nullcontext
                    if leave is None
                    else partial(_watched, store, running, moves, interrupted, leave),
                )
            except KeyboardInterrupt:
                endings.cancelled(store.jobs, job)
                tidy(store, job.id)
            except NimbleError as error:
                endings.failed(store.jobs, job, error, retry=False)
                tidy(store, job.id)
            finally:
                if station is not None and station.builders is not None:
                    station.builders.close()
                if station is not None and station.decoders is not None:
                    station.decoders.close()
        _trace(store, job, station)
        return store.jobs.get(job.id)


def _tell_beside(store: Store, job: Job, device: str) -> None:
    """An event for each worker of this machine that has the same GPU. Nothing keeps a command from a worker's device:
    whoever gives it is there and may want just that.
    """
    for worker in store.workers.live("worker") if device != "cpu" else ():
        if worker.device == device and store.workers.here(worker):
            text = (
                f"worker {worker.id} has {device} too: both share its memory and its time, so a schedule that is built "
                "now is chosen by disturbed measurements; `nimble-jobs submit` waits for the worker instead"
            )
            log.warning("%s", text)
            store.jobs.event("beside", text, job.id, job.attempt, now=time.time())


def _tell_alone(store: Store, job: Job, device: str) -> None:
    """An event if the job asks for several devices: of a `run` command it gets one. Trainings start their own ranks."""
    asked = (job.spec.get("run") or {}).get("gpus", 1)
    if job.kind == "score" and asked != 1:
        text = (
            f"run.gpus: found {asked}, but `nimble-jobs run` scores on one device, {device}; to use several, submit "
            "the job to workers: nimble-jobs submit, and nimble-jobs worker start --devices all"
        )
        log.warning("%s", text)
        store.jobs.event("alone", text, job.id, job.attempt, now=time.time())


def _trace(store: Store, job: Job, station: Station | None) -> None:
    """Send the attempt as a trace, if traces are on, for a short time at most."""
    trace = Trace(store)
    trace.over(job, station.device if station is not None else None)
    trace.finish(_TRACES_S)


def _not_claimed(store: Store, job_id: str) -> Job:
    """The final record of a foreground job that could not be claimed. Raises UsageError if it has not ended."""
    job = store.jobs.get(job_id)
    if job.state.final and job.attempt == 0:  # a job in run.after ended badly
        return job
    if job.foreground and job.state is JobState.QUEUED:
        parents = store.jobs.awaited([job_id]).get(job_id, [])
        full = store.jobs.group_limits([job.group]) if job.group else {}
        store.jobs.cancel(job_id, time.time())  # nothing else would ever run it
        if not parents:
            running, most = full.get(job.group or "", (0, 0))
            raise UsageError(
                f"run.group: {running} of {most} jobs of the group {job.group} are running; wait, or use "
                "submit, which waits for room"
            )
        waits = ", ".join(f"{p.name} {p.id} is {p.state}" for p in parents)
        raise UsageError(f"run.after: {waits}; wait, or use submit, which waits for other jobs")
    raise UsageError(f"job {job_id} is not waiting to run in the foreground")


class _Moves:
    """Counts the progress of the thread that computes."""

    def __init__(self) -> None:
        self._count = self._taken = 0

    def __call__(self) -> None:
        self._count += 1

    def any(self) -> bool:
        """Whether there was progress since the last call."""
        taken, self._taken = self._taken, self._count
        return taken != self._taken


@contextmanager
def _watched(
    store: Store, running: Running, moves: _Moves, interrupted: Interrupts, leave: Leave, pulse: Pulse
) -> Iterator[None]:
    """Inside the block a thread ends the job, and with `leave` the process, if the job does not stop when it should.

    While C code holds the interpreter's lock, no thread can check.
    """
    over = threading.Event()
    job = running.job

    def watch() -> None:
        since: float | None = None
        while not over.wait(_LOOK_S):
            now = time.monotonic()
            running.glance(moves.any(), now)
            stop, grace_s = _wanted(pulse, interrupted)
            stalled = running.verdict(now) is Verdict.STALLED
            if stop is Stop.GO and not stalled:
                since = None
                continue
            since = since or now
            if now - since <= grace_s and not stalled:
                continue
            try:
                ended = _give_up(store, running, stop)
            # The error may pass; if not, the next command notices that this process is gone.
            except StoreError as error:
                log.warning("recording its end failed: %s", error)
                continue
            if not over.is_set():  # it may have stopped at the last moment
                _trace(store, job, None)
                leave(ended)
            return

    thread = threading.Thread(target=watch, name=f"watch-{job.id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _wanted(pulse: Pulse, interrupted: Interrupts) -> tuple[Stop, float]:
    """Why the job must stop, and how many seconds it may take."""
    try:
        stop = pulse.stop()
    except FencedOut:  # ended by `cancel --now`
        return Stop.CANCEL, CANCELLED_S
    if stop is Stop.TIMEOUT:
        return stop, OVERTIME_S
    return stop, CANCELLED_S if interrupted.count > 1 else CANCEL_GRACE_S


def _give_up(store: Store, running: Running, stop: Stop) -> Job:
    job = running.job
    log.warning("%s: the job does not stop; it ends with this process", job.id)
    if stop is Stop.GO:
        running.look(store.jobs.get(job.id), time.monotonic())
        endings.stalled(store.jobs, job, running.stalled(), retry=False)
    else:
        (endings.timed_out if stop is Stop.TIMEOUT else endings.cancelled)(store.jobs, job)
    tidy(store, job.id)
    return store.jobs.get(job.id)
