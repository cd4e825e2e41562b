"""Ends attempts in the store. Every write is fenced by the attempt number, so a stale attempt changes nothing.

Callers must wait for the store, with `Store.patient` or by calling again, because results must reach it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from nimble_jobs.errors import NimbleError
from nimble_jobs.job import Job
from nimble_jobs.spec.units import format_duration
from nimble_jobs.store import Jobs

if TYPE_CHECKING:  # it imports torch
    from nimble_jobs.workloads.context import Outcome

log = logging.getLogger(__name__)


def succeeded(jobs: Jobs, job: Job, outcome: Outcome) -> bool:
    """The attempt published its output, or had nothing to publish. False if it no longer owned the job."""
    mine = jobs.finish(
        job.id,
        job.attempt,
        outputs=outcome.outputs,
        timings=outcome.timings,
        schedule=outcome.schedule,
        publication=outcome.publication,
        scored=outcome.scored,
        empty=outcome.empty,
        now=time.time(),
    )
    if mine:
        log.info("%s: attempt %d succeeded", job.id, job.attempt)
    else:
        log.warning("%s: attempt %d finished, but it no longer owned the job", job.id, job.attempt)
    return mine


def failed(jobs: Jobs, job: Job, error: NimbleError, *, retry: bool) -> None:
    """The attempt raised `error`. With `retry=False` every error is final."""
    again = retry and error.retryable
    state = jobs.fail(job.id, job.attempt, error=str(error), retry=again, lost=False, now=time.time())
    log.info("%s: attempt %d failed; the job is %s", job.id, job.attempt, state or "no longer owned by this attempt")


def timed_out(jobs: Jobs, job: Job) -> None:
    """The attempt exceeded its time limit. Another attempt would do the same, so the job fails."""
    text = f"timed out after {format_duration(job.timeout_s or 0.0)}"
    jobs.fail(job.id, job.attempt, error=text, retry=False, lost=False, now=time.time())
    log.info("%s: attempt %d %s", job.id, job.attempt, text)


def stalled(jobs: Jobs, job: Job, reason: str, *, retry: bool = True) -> None:
    """The attempt made no progress for too long. It counts as an attempt, and another one may succeed."""
    state = jobs.fail(job.id, job.attempt, error=reason, retry=retry, stalled=True, now=time.time())
    log.warning(
        "%s: attempt %d: %s; the job is %s", job.id, job.attempt, reason, state or "no longer owned by this attempt"
    )


def requeued(jobs: Jobs, job: Job, reason: str) -> None:
    """The job goes back to the queue, which is no failure."""
    jobs.requeue(job.id, job.attempt, reason=reason, now=time.time())
    log.info("%s: attempt %d goes back to the queue: %s", job.id, job.attempt, reason)


def cancelled(jobs: Jobs, job: Job) -> None:
    """The user cancelled the job."""
    if jobs.cancelled(job.id, job.attempt, now=time.time()):
        log.info("%s: attempt %d cancelled", job.id, job.attempt)
    else:
        log.info("%s: attempt %d stopped, because it no longer owns the job", job.id, job.attempt)
