"""Sends from the outbox on its own thread, so that claiming jobs never waits for a receiver."""

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

FIRST_S = 5.0  # longest wait after the first attempt; it doubles with each one
_SHORTEST_S = 0.5
LEASE_SPARE_S = 15.0  # margin of a lease beyond the limit of an attempt


def pause_s(attempts: int, retry_after_s: float | None, chance: float) -> float:
    """Seconds to the next attempt: exponential with full jitter (`chance` is uniform in [0, 1)), as
    https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter/ describes it; later if the
    receiver asked for it.
    """
    wait_s = chance * min(FIRST_S * 2.0 ** min(attempts - 1, 30), FURTHEST_S)
    return min(max(wait_s, retry_after_s or 0.0, _SHORTEST_S), FURTHEST_S)


class Courier:
    """The sender of one process. `look` starts a round if something is due; rounds never overlap."""

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
        """Whether a round is going on."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, limit_s: float) -> None:
        """Send due notifications before this process ends, for at most `limit_s`. Other processes send the rest."""
        try:
            self.look(self._clock())
        except NimbleError as e:
            log.warning("notifications wait in the outbox: %s", e)
        if self._thread is not None:
            self._thread.join(limit_s)

    def deliver(self) -> int:
        """Send what is due now, in this thread. Returns the number of attempts. Raises NimbleError."""
        return asyncio.run(self._round())

    def _rounds(self) -> None:
        try:
            while self.deliver():
                pass
        except NimbleError as e:  # the leases expire, and the messages are tried again
            log.warning("notifications wait in the outbox: %s", e)
        except Exception:
            log.exception("sending notifications failed")

    async def _round(self) -> int:
        from nimble_jobs.courier import http  # imported here, because it loads httpx2, which few processes need

        now = self._clock()
        outbox = self._store.outbox
        settings = self._store.settings.usable()
        try:
            outbox.route(self._store.settings.now(), now)
        except SettingsError:  # targets are unknown until the file is valid again
            log.debug("config.yaml is not valid")
        notices = outbox.lease(
            self._sender,
            now,
            lease_s=http.longest_s(settings.notify.timeout) + LEASE_SPARE_S,
            command_s=settings.notify.command_timeout + LEASE_SPARE_S,
        )
        attempts = (self._attempt(notice, settings.notify) for notice in notices)
        ends = await asyncio.gather(*attempts, return_exceptions=True)
        for error in filter(None, ends):  # every message was tried
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
