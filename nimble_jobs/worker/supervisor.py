"""The worker: claims jobs and hands them to one child process that has the device. It never touches the device itself.

The child may die at any moment, and so may this process. `recover` then finds the claimed jobs and queues them again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection, wait

from nimble_jobs.errors import HomeReplaced, NimbleError, StoreError, UsageError
from nimble_jobs.job import Job
from nimble_jobs.settings import LimitSettings
from nimble_jobs.store import Store, Wanted, WorkerLease
from nimble_jobs.worker.charge import Charge
from nimble_jobs.worker.duties import Duties, Duty
from nimble_jobs.worker.heed import Heed
from nimble_jobs.worker.messages import Done, Ready, Refused, Waits
from nimble_jobs.worker.process import Child
from nimble_jobs.worker.running import Running
from nimble_jobs.worker.seat import Seat
from nimble_jobs.worker.signals import StopSignals
from nimble_jobs.worker.trouble import Trouble
from nimble_jobs.worker.upkeep import Reclaim

log = logging.getLogger(__name__)

POLL_S = 0.1  # how often an idle worker looks for jobs
JUST_DUE_S = 1.0  # a retry may have become due since the last look for a job
WATCH_S = 0.25  # how often the running job is checked
BEAT_S = 5.0  # how often the worker gives a sign of life
DUTIES_S = 0.5  # how often, at least, duties are checked
LAST_S = 5.0  # how long a worker that stops tries to write what it owes the store


class Supervisor:
    """One worker's event loop and its state."""

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
        on_over: Callable[[Job, str | None], None] = lambda _job, _device: None,
    ) -> None:
        """`on_over` gets each job whose attempt has ended, and the device that it ran on."""
        self._store = store
        self._lease = lease
        self._signals = signals
        self._seat = Seat(spawn)
        self._max_idle_s = max_idle_s
        self._grace_s = grace_s
        self._charge = Charge(store, lease.id, lambda job: on_over(job, self._child.device if self._child else None))
        self._owed = self._charge.owed
        self._heed = Heed(store, lease.id, on_change=self._beat)
        mine = (self._heed, *duties, Reclaim(store, lease.id, lambda: self._charge.job))
        self._duties = Duties(mine, record=self._record, leaves=lambda: self._signals.count > 0)
        self._idle_since = time.monotonic()
        self._beat_at = 0.0
        self._news: dict[str, object] = {}  # what else the next beat reports
        self._watch_at = 0.0
        self._claim_at = 0.0
        self._trouble = Trouble(self._limits.patience)
        self._trusted_at = 0.0  # after store errors: when the next step can prove that the store works

    def loop(self) -> bool:
        """Work until asked to stop, or idle for too long. False if the worker must begin anew, because its lock is no
        longer in the state folder.
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

    @property
    def _running(self) -> Running | None:
        return self._charge.running

    def _step(self) -> bool:
        """Do everything that is due now. True if the worker has been idle for too long or is drained."""
        now = time.monotonic()
        self._hear()
        self._owed.pay()
        self._seat.fill(now)
        self._duties.run(time.time())
        if self._heed.restart():
            self._restart(now)
        over = False
        if self._running and self._child:
            if now >= self._watch_at:
                self._watch_at = now + WATCH_S
                self._charge.watch(self._child, now)
        else:
            self._seat.check(now, self._limits.start)
            over = self._seek(now)
        if now >= self._beat_at:
            self._beat()
        return over

    def _seek(self, now: float) -> bool:
        """Look for a job, if the worker takes jobs. True if the worker should stop."""
        match self._heed.wanted:
            case Wanted.DRAIN:
                log.info("drained")
                return True
            case Wanted.PAUSE:
                self._idle_since, self._claim_at = now, now + POLL_S
                return False
        if self._child is None or not self._child.takes_jobs or now < self._claim_at:
            return False
        if self._charge.take(self._child, now):
            self._watch_at = now + WATCH_S
            self._beat()
            return False
        self._claim_at = now + POLL_S
        return self._idle_for_too_long(now)

    def _restart(self, now: float) -> None:
        """Replace the child. A running job first gets as much time to reach a safe point as when the worker stops."""
        log.info("asked to restart the child process")
        self._beat()  # this is the answer to the order
        if self._running and self._child:
            self._child.drain()
            self._running.restart_at = now + self._patient_s()
        else:
            self._seat.clear()
            self._owed.add(partial(self._store.schedules.set_residents, self._lease.id, {}))
            self._beat(status="starting", waits_for=None)

    def _next_at(self) -> float:
        """When the next step is due, if nothing happens earlier."""
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

    def _hear(self) -> None:
        """Handle the child's messages, then its death if it died: the last message may say that the job was done."""
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
                    self._child.leaving_since = time.monotonic() if last or self._child.draining else None
                    if self._charge.done(job_id, attempt):
                        self._idle_since = time.monotonic()
                        self._claim_at = 0.0
                        self._news["waits_for"] = None
                        self._beat_at = 0.0  # after the next claim, so that the beat can report it
        if dead:
            self._mourn()

    def _mourn(self) -> None:
        self._charge.lost(self._seat.bury(time.monotonic()))
        self._idle_since = time.monotonic()
        self._owed.add(partial(self._store.schedules.set_residents, self._lease.id, {}))
        self._beat(status="starting", waits_for=None)
        self._owed.pay()

    def _idle_for_too_long(self, now: float) -> bool:
        if self._max_idle_s is None or now - self._idle_since < self._max_idle_s:
            return False
        if self._store.jobs.retries_due(time.time() - JUST_DUE_S):  # a due retry counts as work
            return False
        log.info("idle for %.0f s", now - self._idle_since)
        return True

    def _patient_s(self) -> float:
        return self._limits.grace if self._grace_s is None else self._grace_s

    def _drain(self) -> None:
        """Let the running job reach a safe point, but not beyond the grace period or a second signal."""
        self._beat(status="draining")
        log.info("asked to stop%s", f"; {self._running.job.id} finishes its shard" if self._running else "")
        deadline = time.monotonic() + (self._patient_s() if self._running else 0.0)
        if self._child and self._running:
            self._child.drain()
        while self._running and self._child:
            now = time.monotonic()
            if now > deadline or self._signals.count > 1:
                self._charge.give_back(self._child, "the worker was stopped before the shard was finished")
                break
            try:
                self._hear()
                if self._child and now >= self._watch_at:
                    self._watch_at = now + WATCH_S
                    self._charge.watch(self._child, now)
            except HomeReplaced:
                raise
            except StoreError as error:  # the child may take until the deadline
                self._endure(error)
            if self._running:
                self._wait(min(deadline, self._watch_at))
        self._owed.settle(LAST_S)

    def _move_out(self) -> None:
        """The lock is not where others look for it: give the job back, and let `run` take another lock."""
        log.warning("the lock %s was replaced together with its folder; this worker starts over", self._lease.id)
        if self._running and self._child:
            self._charge.give_back(self._child, "the state folder was replaced under its worker")
            self._owed.pay()

    def _record(self, duty: str, reason: str) -> None:
        self._store.jobs.event("duty", f"worker {self._lease.id}: {duty} failed: {reason}", now=time.time())

    def _beat(self, **info: object) -> None:
        """Publish the worker's state. `seen_at` and similar times are of the monotonic clock, which is never set."""
        running, news = self._running, self._news | info
        self._beat_at = time.monotonic() + BEAT_S
        try:
            self._lease.update(
                seen_at=time.monotonic(),
                database=self._store.database_file,
                job=running and running.job.id,
                failing=self._duties.failing,
                wanted=self._heed.wanted,
                restarts=self._heed.restarted,
                moved_at=running and running.moved_at,
                stall_s=running and running.stall_s,
                **news,
            )
            self._news.clear()
        except StoreError as error:  # the next beat reports it
            log.debug("%s", error)

    def _endure(self, error: StoreError) -> None:
        """Keep running jobs going and retry in a second. Raises the error if it has lasted too long."""
        self._trouble.met(error)
        self._beat(trouble=str(error))
        now = time.monotonic()
        self._claim_at = self._watch_at = self._trusted_at = now + 1.0
