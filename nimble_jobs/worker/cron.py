"""`cron serve`: fires timers and sends notifications without a worker. It runs no job and never loads torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from nimble_jobs.courier import Courier
from nimble_jobs.errors import HomeReplaced, LeaseLost, StoreError
from nimble_jobs.store import Store, WorkerLease
from nimble_jobs.worker.attend import attend
from nimble_jobs.worker.duties import Duties, Duty
from nimble_jobs.worker.firing import Fire
from nimble_jobs.worker.reread import Reread
from nimble_jobs.worker.sending import LAST_NOTICES_S, Send
from nimble_jobs.worker.signals import StopSignals
from nimble_jobs.worker.trouble import Trouble

log = logging.getLogger(__name__)

ROLE = "cron"  # in the lock's info; a worker's is `worker`
LOOK_S = 0.5  # how often duties are checked
BEAT_S = 5.0


def serve(home: Path) -> int:
    """Fire timers and send notifications until SIGTERM or SIGINT; 0 then. Meanwhile a lock in `workers/` with the role
    `cron` is held.

    It waits for a full, locked or read-only store. Raises StoreError if the state folder cannot be used, HomeReplaced
    if another folder took its place.
    """

    def body(store: Store, leases: Sequence[WorkerLease], signals: StopSignals) -> bool:
        (lease,) = leases
        log.info("%s fires timers", lease.id)
        courier = Courier(store, lease.id)
        over = Loop(store, lease, signals, (Fire(store), Reread(store), Send(courier))).run()
        courier.finish(LAST_NOTICES_S)
        log.info("%s ends", lease.id)
        return over

    return attend(home, [{"role": ROLE, "status": "ready"}], body)


class Loop:
    """Runs duties until it is asked to stop."""

    def __init__(self, store: Store, lease: WorkerLease, signals: StopSignals, duties: tuple[Duty, ...]) -> None:
        self._store = store
        self._lease = lease
        self._signals = signals
        self._duties = Duties(
            duties,
            record=lambda name, reason: store.jobs.event("duty", f"{name}: {reason}", now=time.time()),
            leaves=lambda: signals.count > 0,
        )
        self._trouble = Trouble(store.settings.usable().limits.patience)
        self._beat_at = 0.0

    def run(self) -> bool:
        """False if it must begin anew, because its lock is no longer in the state folder."""
        while not self._signals.count:
            try:
                self._store.jobs.running()
                self._duties.run(time.time())
                if not self._lease.in_place:
                    log.warning("the lock %s was replaced together with its folder; starting over", self._lease.id)
                    return False
                recovered = self._trouble.over()
                if recovered or time.monotonic() >= self._beat_at:
                    self._beat(trouble=None)
            except HomeReplaced:
                raise
            except LeaseLost:
                log.warning("the lease of %s has ended; starting over", self._lease.id)
                return False
            except StoreError as error:
                self._trouble.met(error)
                self._beat(trouble=str(error))
            wait([self._signals.fileno()], timeout=LOOK_S)
            self._signals.clear()
        return True

    def _beat(self, **info: object) -> None:
        self._beat_at = time.monotonic() + BEAT_S
        try:
            self._lease.update(
                seen_at=time.monotonic(), database=self._store.database_file, failing=self._duties.failing, **info
            )
        except StoreError as error:  # the next beat reports it
            log.debug("%s", error)
