"""How long a supervisor tolerates an unusable store, and what it reports meanwhile."""

from __future__ import annotations

import logging
import time

from nimble_jobs.errors import StoreError, StoreGone
from nimble_jobs.patience import TELL_AFTER_S, passes
from nimble_jobs.spec.units import format_duration

log = logging.getLogger(__name__)

TROUBLE_S = 60.0  # how long the store may be broken before the worker gives up; temporary errors get longer
GONE_S = 300.0  # how long the state folder may be missing


class Trouble:
    """A time of store errors, from the first error to the first success."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None
        self._told = False

    def met(self, error: StoreError) -> None:
        """Handle one more error. Raises it if the trouble has lasted too long."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        waited_s = now - self._since
        limit_s = GONE_S if isinstance(error, StoreGone) else self._patience_s if passes(error) else TROUBLE_S
        if waited_s > limit_s:
            raise error
        if waited_s >= TELL_AFTER_S and not self._told:
            self._told = True
            log.error("waiting until this works again, for at most %s: %s", format_duration(limit_s), error)

    def lasted_s(self, now: float) -> float:
        """For how long the store has been broken; 0 if it works."""
        return 0.0 if self._since is None else max(0.0, now - self._since)

    def over(self) -> bool:
        """The store works. True if it did not before."""
        since, self._since = self._since, None
        if since is not None and self._told:
            log.warning("the store works again, after %.0f s", time.monotonic() - since)
        self._told = False
        return since is not None
