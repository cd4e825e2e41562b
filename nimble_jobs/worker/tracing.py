"""A duty of every worker: sends the attempts that it ended as traces, if the configuration says where to."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nimble_jobs.errors import NimbleError, NotFound
from nimble_jobs.job import Job
from nimble_jobs.store import Store
from nimble_jobs.tracing import Target, attempt_span, target_of

if TYPE_CHECKING:
    from nimble_jobs.tracing.tracer import Tracer

log = logging.getLogger(__name__)

LAST_TRACES_S = 5.0  # how long a process that ends tries to send traces
_AT_MOST = 1000  # attempts that wait to be read; of more, the oldest are dropped
_UNENDED_S = 60.0  # how long an attempt may take to be recorded as ended, for instance while the store is full


class Trace:
    """Remembers the attempts that ended, reads them a moment later, and hands their spans to the exporter's thread."""

    name = "trace"
    every_s = 1.0

    def __init__(self, store: Store, *, environ: Mapping[str, str] | None = None) -> None:
        self._store = store
        self._environ = os.environ if environ is None else environ
        self._over: deque[tuple[str, int, str | None, float]] = deque(maxlen=_AT_MOST)
        self._target: Target | None = None
        self._tracer: Tracer | None = None

    def over(self, job: Job, device: str | None = None) -> None:
        """Note that the job's attempt is over, or about to be recorded as such."""
        if target_of(self._store.settings.usable(), self._environ) is not None:
            self._over.append((job.id, job.attempt, device, time.monotonic()))

    def run(self, now: float) -> None:
        """Send what has ended. Raises NimbleError if OpenTelemetry is not installed, StoreError."""
        target = target_of(self._store.settings.usable(), self._environ)
        if target != self._target:
            self._close()
            self._target = target
        if target is None:
            self._over.clear()
            return
        for _ in range(len(self._over)):
            job, number, device, since = self._over[0]
            tracer = self._opened(target)
            try:
                attempts = self._store.jobs.attempts(job)  # first: if it has ended here, the job's row says how
                span = attempt_span(self._store.jobs.get(job), attempts, number, device=device)
            except NotFound:
                log.debug("%s: removed before its trace was made", job)
            else:
                if span is not None:
                    tracer.send(span)
                elif time.monotonic() - since < _UNENDED_S:
                    self._over.append(self._over[0])
            self._over.popleft()

    def finish(self, limit_s: float) -> None:
        """Send what is left before this process ends, for at most `limit_s`."""
        try:
            self.run(time.time())
        except NimbleError as error:
            log.warning("the last traces are not sent: %s", error)
        self._close(limit_s)

    def _opened(self, target: Target) -> Tracer:
        if self._tracer is None:
            try:
                # Imported here, because most processes send no traces, and it may not be installed.
                from nimble_jobs.tracing.tracer import Tracer
            except ModuleNotFoundError as error:
                raise NimbleError(
                    f"traces are not sent: {error.name} is not installed; install it with: pip install "
                    "'nimble-jobs[opentelemetry]', or no endpoint for them"
                ) from error
            self._tracer = Tracer(target, self._environ)
        return self._tracer

    def _close(self, limit_s: float = 0.0) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None and not tracer.close(limit_s) and limit_s:
            log.warning("traces were dropped, because their collector did not take them within %g s", limit_s)
