"""The worker: claims jobs and hands them to one child process that has the device. It never touches the device itself.

The child may die at any moment, and so may this process: what was claimed is found by `recover` and queued again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection, wait

from nimble_jobs.errors import HomeReplaced, NimbleError, NotFound, StoreError, UsageError
from nimble_jobs.job import Job
from nimble_jobs.settings import LimitSettings
from nimble_jobs.store import Store, WorkerLease
from nimble_jobs.worker import endings
from nimble_jobs.worker.duties import Duties, Duty
from nimble_jobs.worker.leftovers import tidy
from nimble_jobs.worker.messages import Done, Ready, Refused, Waits
from nimble_jobs.worker.owed import Owed
from nimble_jobs.worker.process import Child
from nimble_jobs.worker.running import Running, Verdict
from nimble_jobs.worker.seat import Seat
from nimble_jobs.worker.signals import StopSignals
from nimble_jobs.worker.trouble import Trouble
from nimble_jobs.worker.upkeep import Reclaim

log = logging.getLogger(__name__)

POLL_S = 0.1  # how often an idle worker looks for jobs
WATCH_S = 0.25  # how often the job that runs is looked at
BEAT_S = 5.0  # how often the worker gives a sign
DUTIES_S = 1.0  # how often, at least, duties are asked whether they are due
LAST_S = 5.0  # how long a worker that leaves tries to write what it still owes the store


_ENDINGS = {Verdict.OVERTIME: endings.timed_out, Verdict.CANCELLED: endings.cancelled}


class Supervisor:
    """One worker's event loop and what it knows."""

    def __init__(
        self,
        store: Store,
        lease: WorkerLease,
        signals: StopSignals,
        spawn: Callable[[], Child],
        *,
        duties: Iterable[Duty] = (),
        max_idle_s: float | None,
        grace_s: float | None,
    ) -> None:
        self._store = store
        self._lease = lease
        self._signals = signals
        self._seat = Seat(spawn)
        self._max_idle_s = max_idle_s
        self._grace_s = grace_s
        self._owed = Owed()
        self._duties = Duties([*duties, Reclaim(store, lease.id, self._job)], record=self._record)
        self._running: Running | None = None
        self._idle_since = time.monotonic()
        self._beat_at = 0.0
        self._watch_at = 0.0
        self._claim_at = 0.0
        self._trouble = Trouble(store.settings.usable().limits.patience)
        self._trusted_at = 0.0  # after trouble: when the store is asked again, so that a good step means something

    def loop(self) -> bool:
        """Work until told to stop, or idle for too long. False where a worker must begin anew, since its lock is not
        in the state folder any more.
        """
        while not self._signals.count:
            try:
                asked = time.monotonic() >= self._trusted_at
                if self._step():
                    return True
                if asked and not self._lease.in_place:
                    self._move_out()
                    return False
                if asked and self._trouble.over():
                    self._beat(trouble=None)
            except HomeReplaced:
                raise
            except StoreError as error:
                self._endure(error)
            self._wait(self._next_at())
        self._drain()
        return True

    def close(self) -> None:
        """Leave no child behind."""
        self._seat.clear()

    @property
    def _limits(self) -> LimitSettings:
        return self._store.settings.usable().limits

    @property
    def _child(self) -> Child | None:
        return self._seat.child

    def _step(self) -> bool:
        """Whatever is due now. True when the worker has been idle for long enough."""
        now = time.monotonic()
        self._hear()
        self._owed.pay()
        self._seat.fill(now)
        self._duties.run(time.time())
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self._beat()
        if self._running:
            if now >= self._watch_at:
                self._watch_at = now + WATCH_S
                self._watch(self._running)
            return False
        self._seat.check(now, self._limits.start)
        if self._child and self._child.takes_jobs and now >= self._claim_at and not self._claim(self._child):
            self._claim_at = now + POLL_S
            return self._idle_for_too_long(now)
        return False

    def _next_at(self) -> float:
        """When the next step is due, if nothing happens before."""
        at = min(self._beat_at, time.monotonic() + DUTIES_S)
        if self._child is None:
            return min(at, self._seat.start_at)
        if self._running:
            return min(at, self._watch_at)
        return min(at, self._claim_at) if self._child.takes_jobs else at

    def _wait(self, until: float) -> None:
        awaited: list[Connection | int] = [self._signals.fileno()]
        if self._child:
            awaited += [self._child.link, self._child.sentinel]
        wait(awaited, timeout=max(0.0, until - time.monotonic()))
        self._signals.clear()

    def _claim(self, child: Child) -> bool:
        assert child.device is not None
        job = self._store.jobs.claim(self._lease.id, device=child.device, now=time.time())
        if job is None:
            return False
        log.info("%s: attempt %d of %s starts", job.id, job.attempt, job.name)
        now = time.monotonic()
        self._running = Running.begin(job, now, stall_s=self._limits.stall)
        child.moved()  # what an earlier job left in the pipe
        self._watch_at = now + WATCH_S
        child.run(job)
        self._beat()
        return True

    def _hear(self) -> None:
        """Take the child's messages, then its death if it died: the last message may say that the job was done."""
        if self._child is None:
            return
        dead = not self._child.alive
        for message in self._child.messages():
            match message:
                case Ready(device=device):
                    self._child.device = device
                    self._seat.ready()
                    self._idle_since = time.monotonic()
                    self._beat(device=device, status="ready")
                    log.info("ready on %s", device)
                case Refused(message=text, exit_code=code):
                    raise UsageError(text) if code == UsageError.exit_code else NimbleError(text)
                case Waits(reason=reason):
                    if self._running:
                        self._running.waits(reason, time.monotonic())
                    self._beat(waits_for=reason)
                case Done(job_id=job_id, attempt=attempt, last=last):
                    self._child.leaving_since = time.monotonic() if last else None
                    if self._running and (self._running.job.id, self._running.job.attempt) == (job_id, attempt):
                        self._running = None
                        self._idle_since = time.monotonic()
                        self._claim_at = 0.0
                        self._beat(waits_for=None)
        if dead:
            self._mourn()

    def _mourn(self) -> None:
        running, self._running = self._running, None
        how = self._seat.bury(time.monotonic())
        self._idle_since = time.monotonic()
        if running:
            self._owed.add(partial(self._lost, running.job, f"the process that ran it died ({how})"))
        self._owed.add(partial(self._store.schedules.set_residents, self._lease.id, []))
        self._beat(status="starting", waits_for=None)
        self._owed.pay()

    def _lost(self, job: Job, reason: str) -> None:
        state = self._store.jobs.fail(job.id, job.attempt, error=reason, retry=True, lost=True, now=time.time())
        if state:
            log.warning("%s: attempt %d lost, %s; the job is %s", job.id, job.attempt, reason, state)
        tidy(self._store, job.id)

    def _watch(self, running: Running) -> None:
        """Kill the child when its job has no right to go on and does not stop by itself."""
        assert self._child is not None
        now = time.monotonic()
        running.glance(self._child.moved(), now)
        verdict = running.verdict(now)  # one that needs no store to say so comes first
        if verdict is None:
            try:
                running.look(self._store.jobs.get(running.job.id), now)
            except NotFound:
                log.warning("%s: is no longer in the database; what it does is dropped", running.job.id)
                self._child.kill()
                return
            verdict = running.verdict(now)
        if verdict is not None:
            log.warning("%s: %s; the process that runs it is killed", running.job.id, verdict)
            self._running = None
            if verdict is Verdict.STALLED:
                reason = running.stalled(stopped=not self._child.end())
                self._owed.add(partial(endings.stalled, self._store.jobs, running.job, reason))
            else:
                self._child.kill()
                self._owed.add(partial(_ENDINGS[verdict], self._store.jobs, running.job))
            self._owed.add(partial(tidy, self._store, running.job.id))

    def _idle_for_too_long(self, now: float) -> bool:
        if self._max_idle_s is None or now - self._idle_since < self._max_idle_s:
            return False
        if self._store.jobs.retries_due(time.time()):  # that is work
            return False
        log.info("idle for %.0f s", now - self._idle_since)
        return True

    def _patient_s(self) -> float:
        return self._limits.grace if self._grace_s is None else self._grace_s

    def _drain(self) -> None:
        """Let the job that runs reach a safe point, but no longer than the grace period or until a second signal."""
        self._beat(status="draining")
        log.info("told to stop%s", f"; {self._running.job.id} finishes its shard" if self._running else "")
        deadline = time.monotonic() + (self._patient_s() if self._running else 0.0)
        if self._child and self._running:
            self._child.drain()
        while self._running and self._child:
            now = time.monotonic()
            if now > deadline or self._signals.count > 1:
                job, self._running = self._running.job, None
                self._child.kill()
                reason = "the worker was stopped before the shard was finished"
                self._owed.add(partial(endings.requeued, self._store.jobs, job, reason))
                break
            try:
                self._hear()
                if self._running and now >= self._watch_at:
                    self._watch_at = now + WATCH_S
                    self._watch(self._running)
            except HomeReplaced:
                raise
            except StoreError as error:  # the child has until the deadline
                self._endure(error)
            if self._running:
                self._wait(min(deadline, self._watch_at))
        self._owed.settle(LAST_S)

    def _move_out(self) -> None:
        """The lock is not where others look for it: give the job back, and let `run` take another one."""
        log.warning("the lock %s was replaced with its folder; this worker begins anew", self._lease.id)
        if self._running and self._child:
            self._child.kill()
            endings.requeued(self._store.jobs, self._running.job, "the state folder was replaced under its worker")
            self._running = None

    def _job(self) -> Job | None:
        return self._running.job if self._running else None

    def _record(self, duty: str, reason: str) -> None:
        self._store.jobs.event("duty", f"worker {self._lease.id}: {duty} failed: {reason}", now=time.time())

    def _beat(self, **info: object) -> None:
        """Tell others how it goes. `seen_at` and the like are of the monotonic clock, which no clock change moves."""
        running = self._running
        try:
            self._lease.update(
                seen_at=time.monotonic(),
                database=self._store.database_file,
                job=running and running.job.id,
                failing=self._duties.failing,
                moved_at=running and running.moved_at,
                **info,
            )
        except StoreError as error:  # the next beat says it
            log.debug("%s", error)

    def _endure(self, error: StoreError) -> None:
        """Jobs that run go on; what is due is tried again in a second. Raises the error after too long."""
        self._trouble.met(error)
        self._beat(trouble=str(error))
        now = time.monotonic()
        self._claim_at = self._watch_at = self._trusted_at = now + 1.0
