"""While a worker's child has no job, it builds schedules that earlier jobs missed, the most promising first.

Each build runs in its own process (`planner.jobs.background`), which ends at once if a job comes or the worker stops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nimble_jobs.errors import StoreError
from nimble_jobs.plural import count
from nimble_jobs.store import WantedState

if TYPE_CHECKING:
    from nimble_jobs.worker.executor import Station

log = logging.getLogger(__name__)

LOOK_S = 1.0  # how often an idle child looks
_TROUBLE_S = 30.0  # wait before the store is tried again after an error
_TRIES = 3  # tries of a build that ended for want of memory or the like


class Idle:
    """The idle times of one child. Times are of the monotonic clock."""

    def __init__(self, station: Station, worker: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._station = station
        self._worker = worker
        self._now = now
        self._since = now()
        self._key: str | None = None
        self._not_before = 0.0

    def look(self) -> None:
        """Called while there is no job: begin a build, or handle the end of the current one."""
        builders, now = self._station.builders, self._now()
        after_s = self._station.store.settings.usable().cache.build_after
        if builders is None or after_s == "off" or now < max(self._since + after_s, self._not_before):
            return
        try:
            self._close()
            if self._key is None and not builders.busy:
                self._begin()
        except StoreError as error:
            log.warning("missed schedules are not built: %s", error)
            self._not_before = now + _TROUBLE_S

    def over(self) -> None:
        """A job has come, or the worker stops: end the current build. It waits for the next idle time."""
        self._since = self._now()
        builders = self._station.builders
        if builders is None:
            return
        ended = builders.stop()
        key, self._key = self._key, None
        try:
            for each in {*ended, *([key] if key else [])}:
                self._station.store.wanted.put_back(each)
        except StoreError as error:
            log.warning("%s", error)

    def back(self) -> None:
        """The job is over."""
        self._since = self._now()

    def _begin(self) -> None:
        store, builders = self._station.store, self._station.builders
        assert builders is not None

        def alive(worker: str) -> bool:
            return any(each.id == worker for each in store.workers.live())

        if self._disturbs():
            return
        wanted = store.wanted.take(self._worker, self._station.described, alive=alive, now=time.time())
        if wanted is None:
            return
        missed = count(wanted.misses, "job")
        log.info("idle: building schedule %s for %s; %s ran without it", wanted.key[:12], wanted.model, missed)
        self._key = wanted.key
        builders.order(wanted.key, wanted.request | {"device": self._station.device}, beside=False)
        builders.idle(wanted.key)

    def _disturbs(self) -> bool:
        """Whether another worker of the same device builds: what both measure would be wrong."""
        store = self._station.store
        builds = {row.builder for row in store.wanted.list() if row.state is WantedState.BUILDING} - {self._worker}
        if not builds:
            return False
        devices = {each.id: each.device for each in store.workers.live()}
        return any(worker in devices and devices[worker] == devices.get(self._worker) for worker in builds)

    def _close(self) -> None:
        builders, store = self._station.builders, self._station.store
        if self._key is None or builders is None or builders.running(self._key):
            return
        key, self._key = self._key, None
        row = next((row for row in store.wanted.list() if row.key == key), None)
        again = builders.may_try_again(key) and row is not None and row.tries + 1 < _TRIES
        if builders.gave_up(key) and not again:
            why = "the build in an idle worker produced no schedule; see the worker's log"
            store.wanted.failed(key, why, time.time())
        elif row is not None and row.state is WantedState.BUILDING:
            store.wanted.put_back(key)
        builders.end(key)
