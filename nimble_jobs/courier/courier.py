"""Empties the outbox on a thread of its own, so that claiming never waits for a receiver."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping

from nimble_jobs.courier.refusals import Refused
from nimble_jobs.errors import NimbleError, SettingsError
from nimble_jobs.settings import NotifySettings
from nimble_jobs.store import Store
from nimble_jobs.store.notices import Notice
from nimble_jobs.store.outbox import FURTHEST_S

log = logging.getLogger(__name__)

FIRST_S = 5.0  # longest wait after the first attempt, doubled with each one
_SHORTEST_S = 0.5
LEASE_SPARE_S = 15.0  # beyond what an attempt may take


def pause_s(attempts: int, retry_after_s: float | None, chance: float) -> float:
    """Seconds to the next attempt: exponential with full jitter (`chance` is uniform in [0, 1)), as
    https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter/ has it; later where the receiver
    asked for it.
    """
    wait_s = chance * min(FIRST_S * 2.0 ** min(attempts - 1, 30), FURTHEST_S)
    return min(max(wait_s, retry_after_s or 0.0, _SHORTEST_S), FURTHEST_S)


class Courier:
    """Sends for one process. `look` starts a round where something is due; rounds never overlap."""

    def __init__(
        self,
        store: Store,
        sender: str,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._sender = sender
        self._environ = os.environ if environ is None else environ
        self._clock = clock
        self._chance = chance
        self._thread: threading.Thread | None = None

    def look(self, now: float) -> None:
        """Start a round unless one is going on or nothing is due. Returns at once. Raises StoreError."""
        if self.busy or not self._store.outbox.waiting(now):
            return
        self._thread = threading.Thread(target=self._rounds, name="nimble-jobs courier", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Is a round going on?"""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, limit_s: float) -> None:
        """Before this process ends: send what is due, but wait `limit_s` at most. What is left goes to another."""
        try:
            self.look(self._clock())
        except NimbleError as e:
            log.warning("notifications stay in the outbox: %s", e)
        if self._thread is not None:
            self._thread.join(limit_s)

    def deliver(self) -> int:
        """Send what is due now, in this thread; how many attempts were made. Raises NimbleError."""
        return asyncio.run(self._round())

    def _rounds(self) -> None:
        try:
            while self.deliver():
                pass
        except NimbleError as e:  # leases lapse, and it is tried again
            log.warning("notifications stay in the outbox: %s", e)
        except Exception:
            log.exception("sending notifications failed")

    async def _round(self) -> int:
        from nimble_jobs.courier import http  # loads httpx2, which few processes need, and those not at their start

        now = self._clock()
        outbox = self._store.outbox
        settings = self._store.settings.usable()
        try:
            outbox.route(self._store.settings.now(), now)
        except SettingsError:  # who is told is not known until it is mended
            log.debug("config.yaml is not valid")
        notices = outbox.lease(
            self._sender,
            now,
            lease_s=http.longest_s(settings.notify.timeout) + LEASE_SPARE_S,
            command_s=settings.notify.command_timeout + LEASE_SPARE_S,
        )
        attempts = (self._attempt(notice, settings.notify) for notice in notices)
        ends = await asyncio.gather(*attempts, return_exceptions=True)
        for error in filter(None, ends):  # each had its turn
            raise error
        return len(notices)

    async def _attempt(self, notice: Notice, settings: NotifySettings) -> None:
        from nimble_jobs.courier.attempt import send

        try:
            await send(notice, settings, self._environ, self._clock())
        except Refused as e:
            self._failed(notice, settings, e)
        else:
            self._store.outbox.sent(notice.id, self._clock())
            log.info("%s: %s of %s sent (%s)", notice.name, notice.channel, notice.event, notice.id)

    def _failed(self, notice: Notice, settings: NotifySettings, error: Refused) -> None:
        now = self._clock()
        next_at: float | None = now + pause_s(notice.attempts, error.retry_after_s, self._chance())
        if now >= notice.since + settings.give_up:
            next_at = None
        what = "given up" if next_at is None else f"again in {next_at - now:.0f} s"
        log.warning("%s: %s of %s, %s: %s", notice.name, notice.channel, notice.event, what, error)
        self._store.outbox.failed(notice, str(error), next_at=next_at, now=now)
