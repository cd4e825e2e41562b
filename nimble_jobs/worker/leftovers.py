"""Removes the files that a job left beside its output once the job is over."""

from __future__ import annotations

import logging
import time

from nimble_jobs.data import hidden
from nimble_jobs.errors import NotFound
from nimble_jobs.job import Job
from nimble_jobs.store import Store

log = logging.getLogger(__name__)


def tidy(store: Store, job_id: str, ended: Job | None = None) -> None:
    """Remove everything except checkpoints from which the same training can resume; an event names them.

    Not for a job that may run again. `ended`: the job, if its final state is known.
    """
    try:
        job = ended or store.jobs.get(job_id)
    except NotFound:  # the database was replaced by one without this job
        return
    event = hidden.tidy(job, store.home)
    if event is not None:
        log.info("%s: %s: %s", job.id, *event)
        store.jobs.event_soon(*event, job.id, job.attempt, {}, now=time.time())
