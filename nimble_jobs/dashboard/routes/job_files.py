"""What a job has written so far.

GET /api/jobs/{id}/log?offset=&limit=
    {"text", "start", "offset", "size", "end"}: bytes of the log. Without `offset` the last ones. Pass `offset` of the
    answer to get what follows; `end` says that there is no more yet. At most `limit` bytes, 64 KiB by default.
GET /api/jobs/{id}/curves
    {"points": [{"step", "loss", "accuracy", "lr", ..., "val_loss", ...}]}: at most some hundred points a series; also
    while the training runs.
GET /api/jobs/{id}/timeline.svg
    The drawing of `explain --timeline`, from the stored schedule. 404 if the job has none, or it was removed.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.responses import Response

from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.query import Query
from nimble_jobs.dashboard.reads import curves as training
from nimble_jobs.dashboard.reads.log import read_part
from nimble_jobs.dashboard.reads.places import file_of
from nimble_jobs.dashboard.routing import get
from nimble_jobs.draw import to_svg
from nimble_jobs.errors import NotFound
from nimble_jobs.views.schedules import look
from nimble_jobs.worker.logs import job_log_path

METRICS = "metrics.jsonl"  # of trainings, whose own room loads torch
_LOG_BYTES = 64 * 1024
_TASKS = 20_000  # a drawing with more of them would be too large for a page


def log(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    job = desk.store.jobs.get(query.job())
    limit = query.number("limit", _LOG_BYTES, least=1024, most=1024 * 1024)
    return asdict(read_part(job_log_path(desk.store.home, job.id), query.key("offset"), limit))


def curves(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    job = desk.store.jobs.get(query.job())
    if job.kind != "finetune":
        return {"points": []}
    epochs = desk.store.jobs.events_of_kind(job.id, "epoch")
    return {"points": training.points(file_of(desk.store, job, METRICS), epochs)}


def timeline(desk: Desk, query: Query, now: float) -> Response:
    job = desk.store.jobs.get(query.job())
    key = job.schedule.get("key")
    if not key:
        raise NotFound(f"job {job.id} has no schedule")
    schedule = look(desk.store, str(key), every_byte=False).schedule
    if schedule is None:
        raise NotFound(f"the schedule of job {job.id} cannot be read; nimble-jobs cache show tells why")
    if len(schedule.program.tasks) > _TASKS:
        raise NotFound(f"the schedule has more than {_TASKS:,} tasks; draw it with: nimble-jobs explain --timeline")
    return Response(to_svg(schedule), media_type="image/svg+xml")


ROUTES = (
    get("/api/jobs/{id}/log", log),
    get("/api/jobs/{id}/curves", curves),
    get("/api/jobs/{id}/timeline.svg", timeline),
)
