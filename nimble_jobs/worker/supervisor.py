"""The worker: claims jobs and hands them to child processes, one a device. It never touches a device itself.

A child may die at any moment, and so may this process. `recover` then finds the claimed jobs and queues them again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait

from nimble_jobs.errors import HomeReplaced, LeaseLost, NimbleError, StoreError, UsageError
from nimble_jobs.job import Job
from nimble_jobs.spec.units import format_duration
from nimble_jobs.store import Store, WorkerLease
from nimble_jobs.worker.duties import Duties, Duty, Together
from nimble_jobs.worker.lending import lend
from nimble_jobs.worker.post import Post
from nimble_jobs.worker.process import Child
from nimble_jobs.worker.signals import StopSignals
from nimble_jobs.worker.trouble import Trouble
from nimble_jobs.worker.upkeep import Reclaim

log = logging.getLogger(__name__)

JUST_DUE_S = 1.0  # a retry may have become due since the last look for a job
DUTIES_S = 0.5  # how often, at least, duties are checked
LAST_S = 5.0  # how long a worker that stops tries to write what it owes the store


class Supervisor:
    """One worker's event loop over its devices."""

    def __init__(
        self,
        store: Store,
        seats: Sequence[tuple[WorkerLease, Callable[[], Child]]],
        signals: StopSignals,
        *,
        duties: Iterable[Duty] = (),
        max_idle_s: float | None,
        grace_s: float | None,
        on_over: Callable[[Job, str | None], None] = lambda _job, _device: None,
    ) -> None:
        """`seats`: for each device the lock that stands for it, and what starts its child. `on_over` gets each job
        whose attempt has ended, and the device that it ran on.
        """
        self._store = store
        self._signals = signals
        self._max_idle_s = max_idle_s
        self._posts = [
            Post(store, lease, spawn, grace_s=grace_s, on_over=on_over, failing=lambda: self._duties.failing)
            for lease, spawn in seats
        ]
        mine = (
            Together([post.heed for post in self._posts]),
            *duties,
            Together([Reclaim(store, post.id, post.job) for post in self._posts]),
        )
        self._duties = Duties(mine, record=self._record, leaves=lambda: self._signals.asked)
        self._trouble = Trouble(store.settings.usable().limits.patience)
        self._trusted_at = 0.0  # after store errors: when the next step can prove that the store works

    def loop(self) -> bool:
        """Work until asked to stop, or idle for too long. False if the worker must begin anew, because its locks are
        no longer in the state folder.
        """
        while not self._signals.asked:
            try:
                asked = time.monotonic() >= self._trusted_at
                if self._step():
                    return True
                if asked and not all(post.lease.in_place for post in self._posts):
                    self._move_out()
                    return False
                if asked and self._trouble.over():
                    self._beat(trouble=None)
            except HomeReplaced:
                raise
            except LeaseLost:
                self._move_out()
                return False
            except StoreError as error:
                self._endure(error)
            self._wait(min(time.monotonic() + DUTIES_S, *(post.next_at() for post in self._posts)))
        self._drain()
        return True

    def close(self) -> None:
        """Leave no child behind."""
        for post in self._posts:
            post.seat.clear()

    def _step(self) -> bool:
        """Do everything that is due now. True if the worker has been idle for too long or is drained."""
        now = time.monotonic()
        self._hear()
        # Before the duties: an attempt whose end is only not written yet must not look as if nobody ran it.
        self._each(self._posts, lambda post: post.owed.pay())
        self._duties.run(time.time())
        lend(self._posts)
        drained: list[Post] = []
        self._each(self._posts, lambda post: drained.append(post) if post.act(now) else None)
        return any(self._left(post) for post in drained) or self._idle_for_too_long(now)

    @staticmethod
    def _each(posts: Iterable[Post], work: Callable[[Post], object]) -> None:
        """Do this for every device, also if the store fails for one of them. Raises the first StoreError."""
        trouble: StoreError | None = None
        for post in posts:
            try:
                work(post)
            except (HomeReplaced, LeaseLost):
                raise
            except StoreError as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble

    def _hear(self) -> None:
        """Handle what the children say. A device that no child can use any more leaves the others at work."""
        for post in list(self._posts):
            try:
                post.hear()
            except (HomeReplaced, StoreError):
                raise
            except NimbleError as error:
                # A device that never was usable is most likely a mistake in the command, so nothing runs at all.
                if len(self._posts) == 1 or (isinstance(error, UsageError) and not post.was_ready):
                    self._give_back("another device of its worker cannot be used")
                    raise
                text = f"worker {post.id} gives up {post.lease.info['device']}: {error}"
                log.error("%s; the other devices go on", text)
                post.owed.add(partial(self._store.jobs.event, "device", text, now=time.time()))
                self._left(post)

    def _left(self, post: Post) -> bool:
        """A device takes no more jobs. True if no other is left, after which the worker ends."""
        if len(self._posts) == 1:
            return True
        post.leave()
        self._posts.remove(post)
        for pending in post.owed.rest():
            self._posts[0].owed.add(pending)
        return False

    def _wait(self, until: float) -> None:
        awaited: list[Connection | int] = [self._signals.fileno()]
        for post in self._posts:
            awaited += post.awaited()
        wait(awaited, timeout=max(0.0, until - time.monotonic()))
        self._signals.clear()

    def _idle_for_too_long(self, now: float) -> bool:
        if self._max_idle_s is None or not all(post.idle for post in self._posts):
            return False
        idle_s = now - max(post.idle_since for post in self._posts)
        if idle_s < self._max_idle_s:
            return False
        if self._store.jobs.retries_due(time.time() - JUST_DUE_S):  # a due retry counts as work
            return False
        log.info("idle for %.0f s", idle_s)
        return True

    def _leave_a_dead_store(self, error: StoreError, now: float) -> None:
        """Without a store there is no work: raises StoreError after `max_idle_s` of that, unless a job is running."""
        if self._max_idle_s is None or any(post.running for post in self._posts):
            return
        idle_s = now - max(post.idle_since for post in self._posts)
        if min(idle_s, self._trouble.lasted_s(now)) >= self._max_idle_s:
            limit = format_duration(self._max_idle_s)
            # No StoreTrouble, and no cause that is one: nobody is to wait for it any longer.
            raise StoreError(
                f"no work for {limit} (--max-idle), because the store cannot be used; the worker ends: {error}"
            ) from None

    def _drain(self) -> None:
        """Let running jobs reach a safe point, but not beyond the grace period or a second signal."""
        self._beat(status="draining")
        busy = [post for post in self._posts if post.running]
        names = ", ".join(post.running.job.id for post in busy if post.running)
        why = "asked to stop" if self._signals.count else "its time is over"
        log.info("%s%s", why, f"; at the end of their shards: {names}" if names else "")
        deadline = time.monotonic() + max((post.patient_s for post in busy), default=0.0)
        for post in busy:
            if post.child:
                post.child.drain()
        while busy := [post for post in self._posts if post.running and post.child]:
            now = time.monotonic()
            if now > deadline or self._signals.count > 1:
                self._give_back("the worker was stopped before the shard was finished", pay=False)
                break
            try:
                self._each(busy, Post.finish)
            except HomeReplaced:
                raise
            except StoreError as error:  # the children may take until the deadline
                self._endure(error)
            self._wait(min(deadline, *(post.watch_at for post in busy)))
        for post in self._posts:
            post.owed.settle(LAST_S)

    def _give_back(self, reason: str, *, pay: bool = True) -> None:
        """All running jobs go back to the queue."""
        for post in self._posts:
            post.give_back(reason)
            if pay:
                post.owed.settle(LAST_S)

    def _move_out(self) -> None:
        """A lock is not where others look for it, or a lease is over for good: give the jobs back and begin anew."""
        names = ", ".join(post.id for post in self._posts)
        log.warning("a lock or lease of %s was replaced or has ended; this worker starts over", names)
        for post in self._posts:
            if post.running:
                post.give_back("the state folder was replaced under its worker")
                with suppress(LeaseLost):  # then the job is no longer its own to give back
                    post.owed.pay()

    def _record(self, duty: str, reason: str) -> None:
        self._store.jobs.event("duty", f"worker {self._posts[0].id}: {duty} failed: {reason}", now=time.time())

    def _beat(self, **info: object) -> None:
        for post in self._posts:
            post.beat(**info)

    def _endure(self, error: StoreError) -> None:
        """Keep running jobs going and retry in a second. Raises the error if it has lasted too long."""
        self._trouble.met(error)
        self._leave_a_dead_store(error, time.monotonic())
        self._beat(trouble=str(error))
        self._trusted_at = time.monotonic() + 1.0
        for post in self._posts:
            post.rest(self._trusted_at)
