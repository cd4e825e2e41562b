"""One device of a worker: its lock, the child process that has the device, and the attempt that it works on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from multiprocessing.connection import Connection

from nimble_jobs.errors import NimbleError, StoreError, UsageError
from nimble_jobs.job import Job
from nimble_jobs.settings import LimitSettings
from nimble_jobs.store import Store, Wanted, WantedState, WorkerLease
from nimble_jobs.worker.charge import Charge
from nimble_jobs.worker.heed import Heed
from nimble_jobs.worker.messages import Borrows, Done, Ready, Refused, Waits
from nimble_jobs.worker.process import Child
from nimble_jobs.worker.running import Running
from nimble_jobs.worker.seat import Seat

log = logging.getLogger(__name__)

POLL_S = 0.1  # how often an idle device looks for jobs
WATCH_S = 0.25  # how often the running job is checked
BEAT_S = 5.0  # how often a sign of life is given


class Post:
    """One device's part of the supervisor's loop. Times are of the monotonic clock."""

    def __init__(
        self,
        store: Store,
        lease: WorkerLease,
        spawn: Callable[[], Child],
        *,
        grace_s: float | None = None,
        on_over: Callable[[Job, str | None], None] = lambda _job, _device: None,
        failing: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """`grace_s`: time to reach a safe point, by default limits.grace. `on_over` gets each job whose attempt has
        ended, and the device. `failing` returns the errors of duties that others are to see.
        """
        self._store = store
        self.lease = lease
        self.seat = Seat(spawn)
        self._grace_s = grace_s
        self._failing = failing
        self.charge = Charge(store, lease.id, lambda job: on_over(job, self.child.device if self.child else None))
        self.owed = self.charge.owed
        self.heed = Heed(store, lease.id, on_change=self.beat)
        self.idle_since = time.monotonic()
        self._beat_at = 0.0
        self._news: dict[str, object] = {}  # what else the next beat reports
        self._watch_at = 0.0
        self._claim_at = 0.0
        self._gone = False
        self.was_ready = False  # some child of it could use the device
        self.lent: str | None = None  # the job of another post that has the device meanwhile

    @property
    def id(self) -> str:
        """The worker's id, under which the device claims jobs."""
        return self.lease.id

    @property
    def child(self) -> Child | None:
        return self.seat.child

    @property
    def running(self) -> Running | None:
        return self.charge.running

    def job(self) -> Job | None:
        """The job that its child works on."""
        return self.charge.job

    @property
    def idle(self) -> bool:
        """Whether its child waits for a job."""
        return self.running is None and self.child is not None and self.child.takes_jobs

    @property
    def _limits(self) -> LimitSettings:
        return self._store.settings.usable().limits

    @property
    def patient_s(self) -> float:
        """How long a job may take to reach a safe point."""
        return self._limits.grace if self._grace_s is None else self._grace_s

    def act(self, now: float) -> bool:
        """Do everything that is due now. True if the device takes no more jobs, because it is drained."""
        if self.lent is not None:  # orders are obeyed once it is back
            if now >= self._beat_at:
                self.beat()
            return False
        self.seat.fill(now)
        if self.heed.restart():
            self._restart(now)
        drained = False
        if self.running and self.child:
            self.watch(now)
        else:
            self.seat.check(now, self._limits.start)
            drained = self._seek(now)
        if now >= self._beat_at:
            self.beat()
        return drained

    def finish(self) -> None:
        """While its worker stops: hear the child, and watch its job. Raises StoreError."""
        self.hear()
        self.watch(time.monotonic())
        self.owed.pay()

    def watch(self, now: float) -> None:
        """Check the running job, if that is due. Raises StoreError."""
        if self.child and now >= self._watch_at:
            self._watch_at = now + WATCH_S
            self.charge.watch(self.child, now)

    def _seek(self, now: float) -> bool:
        """Look for a job, if the device takes jobs. True if it is drained."""
        match self.heed.wanted:
            case Wanted.DRAIN:
                log.info("drained")
                return True
            case Wanted.PAUSE:
                self.idle_since, self._claim_at = now, now + POLL_S
                return False
        if self.child is None or not self.child.takes_jobs or now < self._claim_at:
            return False
        if self.charge.take(self.child, now):
            self._watch_at = now + WATCH_S
            self.beat()
        else:
            self._claim_at = now + POLL_S
        return False

    def _restart(self, now: float) -> None:
        """Replace the child. A running job first gets as much time to reach a safe point as when the worker stops."""
        log.info("asked to restart the child process")
        self.beat()  # this is the answer to the order
        if self.running and self.child:
            self.child.drain()
            self.running.restart_at = now + self.patient_s
        else:
            self.seat.clear()
            self._forget_residents()
            self.beat(status="starting", waits_for=None)

    def next_at(self) -> float:
        """When its next step is due, if nothing happens earlier."""
        if self.lent is not None:
            return self._beat_at
        if self.child is None:
            return min(self._beat_at, self.seat.start_at)
        if self.running:
            return min(self._beat_at, self._watch_at)
        return min(self._beat_at, self._claim_at) if self.child.takes_jobs else self._beat_at

    @property
    def watch_at(self) -> float:
        """When its running job is checked next."""
        return self._watch_at

    def awaited(self) -> list[Connection | int]:
        """What becomes readable when its child says something or dies."""
        return [self.child.link, self.child.sentinel] if self.child else []

    def hear(self) -> None:
        """Handle the child's messages, then its death if it died: the last message may say that the job was done.

        Raises UsageError or NimbleError if no child can ever use the device.
        """
        if self.child is None:
            return
        dead = not self.child.alive
        for message in self.child.messages():
            match message:
                case Ready(device=device, software=software, most_ranks=most_ranks):
                    self.child.device, self.child.software, self.child.most_ranks = device, software, most_ranks
                    self.seat.ready()
                    self.was_ready = True
                    self.idle_since = time.monotonic()
                    self.beat(device=device, status="ready", software=software, most_ranks=most_ranks)
                    log.info("ready on %s", device)
                case Refused(message=text, exit_code=code):
                    raise UsageError(text) if code == UsageError.exit_code else NimbleError(text)
                case Waits(reason=reason):
                    if self.running:
                        self.running.waits(reason, time.monotonic())
                    self.beat(waits_for=reason)
                case Borrows():
                    if self.running:
                        self.running.borrow(message, time.monotonic())
                case Done(job_id=job_id, attempt=attempt, last=last):
                    self.child.leaving_since = time.monotonic() if last or self.child.draining else None
                    if self.charge.done(job_id, attempt):
                        self.idle_since = time.monotonic()
                        self._claim_at = 0.0
                        self._news["waits_for"] = None
                        self._beat_at = 0.0  # after the next claim, so that the beat can report it
        if dead:
            self._mourn()

    def _mourn(self) -> None:
        self.charge.lost(self.seat.bury(time.monotonic()))
        self.idle_since = time.monotonic()
        self._forget_residents()
        self.beat(status="starting", waits_for=None)

    def _forget_residents(self) -> None:
        self.owed.add(partial(self._store.schedules.set_residents, self.lease.id, {}))

    def _put_back_build(self) -> None:
        """Another worker may build the schedule that its child was building while idle."""
        for row in self._store.wanted.list():
            if row.builder == self.id and row.state is WantedState.BUILDING:
                self._store.wanted.put_back(row.key)

    def give_back(self, reason: str) -> None:
        """End the child at once if it has a job; the job goes back to the queue with the next `owed.pay`."""
        if self.running and self.child:
            self.charge.give_back(self.child, reason)

    @property
    def device(self) -> str:
        """As it is shown, and as jobs ask for it."""
        return str(self.lease.info["device"])

    def may_lend(self, devices: Collection[str]) -> bool:
        """Whether its device is one of these, and meant to work."""
        return self.lent is None and self.device in devices and self.heed.wanted is Wanted.RUN

    def lend(self, job: str) -> None:
        """Let another post's job have the device: no child, and so none of its memory."""
        log.info("lent to %s", job)
        self.seat.clear()
        self._forget_residents()
        self.owed.add(self._put_back_build)
        self.lent = job
        self.beat(status="lent", waits_for=None)

    def take_back(self) -> None:
        """The device takes jobs again, once it has a child."""
        self.lent = None
        self.beat(status="starting")

    def leave(self) -> None:
        """Give the device up for good: no child, no lock."""
        self.seat.clear()
        self._forget_residents()
        self._gone = True
        self.lease.release()

    def rest(self, until: float) -> None:
        """The store cannot be used: ask it nothing until then."""
        self._claim_at = self._watch_at = until

    def beat(self, **info: object) -> None:
        """Publish the state. `seen_at` and similar times are of the monotonic clock, which is never set."""
        if self._gone:  # another worker may have its lock by now
            return
        running, news = self.running, self._news | info
        self._beat_at = time.monotonic() + BEAT_S
        try:
            self.lease.update(
                seen_at=time.monotonic(),
                database=self._store.database_file,
                job=running and running.job.id,
                failing=self._failing(),
                apart=self.charge.apart,
                wanted=self.heed.wanted,
                restarts=self.heed.restarted,
                lent=self.lent,
                moved_at=running and running.moved_at,
                stall_s=running and running.stall_s,
                **news,
            )
            self._news.clear()
        except StoreError as error:  # the next beat reports it
            log.debug("%s", error)
