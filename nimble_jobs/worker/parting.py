"""How an attempt ends for one worker: the whole attempt, or its part of one on which other workers go on.

Every write is fenced by the attempt number. Callers must wait for the store, as for `endings`.
"""

from __future__ import annotations

import logging
import time

from nimble_jobs.errors import JobFailed, NimbleError
from nimble_jobs.job import Job
from nimble_jobs.store import Left, Store
from nimble_jobs.worker import endings

log = logging.getLogger(__name__)


def shared(job: Job) -> bool:
    """Whether other workers may work on the job too."""
    return job.gpus > 1 and not job.foreground


def requeued(store: Store, job: Job, reason: str) -> None:
    """The worker stops, or needs its device for something else. That is no failure."""
    if not shared(job) or store.shards.leave(job, now=time.time()) is Left.END:
        endings.requeued(store.jobs, job, reason)


def failed(store: Store, job: Job, error: NimbleError, *, retry: bool) -> None:
    """The worker's part raised `error`. Others go on if another try may succeed, or if failed shards are tolerated."""
    tolerated = int(job.spec.get("run", {}).get("max_failed_shards", 0))
    passes = error.retryable or (tolerated > 0 and isinstance(error, JobFailed))
    if not (shared(job) and retry and passes):
        endings.failed(store.jobs, job, error, retry=retry)
    elif _to_end(store, job, str(error)):
        store.jobs.fail(job.id, job.attempt, error=str(error), retry=True, now=time.time())
        log.info("%s: attempt %d failed: %s", job.id, job.attempt, error)


def stalled(store: Store, job: Job, reason: str) -> None:
    """The worker's part made no progress for too long."""
    if _to_end(store, job, reason):
        endings.stalled(store.jobs, job, reason)


def lost(store: Store, job: Job, reason: str) -> None:
    """The worker's process died."""
    if _to_end(store, job, reason):
        state = store.jobs.fail(job.id, job.attempt, error=reason, retry=True, lost=True, now=time.time())
        if state:
            log.warning("%s: attempt %d lost, %s; the job is %s", job.id, job.attempt, reason, state)


def _to_end(store: Store, job: Job, error: str) -> bool:
    """The worker leaves the job because of an error. True if the attempt is over with it."""
    if not shared(job):
        return True
    match store.shards.leave(job, now=time.time(), error=error):
        case Left.END:
            return True
        case Left.AGAIN:
            endings.requeued(store.jobs, job, error)
        case Left.FAILED:
            log.warning("%s: attempt %d failed, because a shard failed again and again: %s", job.id, job.attempt, error)
        case Left.NOTHING:
            log.warning("%s: this worker left attempt %d: %s", job.id, job.attempt, error)
    return False
