"""POST /api/jobs/{id}/cancel, retry, hold, release: what the commands of these names do.

The body may be `{"now": true}` for `cancel` (without finishing the running batch) and `{"with_dependents": true}` for
`retry`. The answer is {"message", "jobs": [row of `ls --json`]}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nimble_jobs import client, queue
from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.query import Query
from nimble_jobs.dashboard.routing import post
from nimble_jobs.job import Job, JobState
from nimble_jobs.views.jobs import job_row


def cancel(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    jobs = client.cancel(query.job(), store=desk.store, now=query.flag("now"))
    return _answer(jobs, "asked to stop" if jobs[0].state is JobState.RUNNING else jobs[0].state.value, now)


def retry(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    again = queue.retry(query.job(), with_dependents=query.flag("with_dependents"), store=desk.store, now=now)
    return _answer(again.queued, "queued again", now)


def hold(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    return _answer(queue.hold(query.job(), store=desk.store, now=now), "held", now)


def release(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    return _answer(queue.release(query.job(), store=desk.store, now=now), "released", now)


def _answer(jobs: Sequence[Job], done: str, now: float) -> dict[str, Any]:
    """The changed jobs, and the words that the command prints."""
    message = "; ".join(f"{job.name} {job.id}: {done}" for job in jobs[:8])
    return {"message": message, "jobs": [job_row(job, now) for job in jobs]}


ROUTES = (
    post("/api/jobs/{id}/cancel", cancel),
    post("/api/jobs/{id}/retry", retry),
    post("/api/jobs/{id}/hold", hold),
    post("/api/jobs/{id}/release", release),
)
