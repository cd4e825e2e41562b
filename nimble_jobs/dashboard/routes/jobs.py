"""Jobs: the queue, and all about one job.

GET /api/jobs?state=&kind=&q=&before=&limit=
    {"jobs": [row], "next"}: rows of `ls --json`, the newest first, each with `remaining_s`, `doing`, `step`, `steps`
    and `steps_per_s`, as in the stream's `progress`. `waits` says why a queued job does not run yet. `q` searches
    names and errors.
GET /api/jobs/{id}
    {"job": the object of `show --json` without its events, with the keys of `progress`, "spec_yaml": text,
     "words": {"summary", "schedule", "speed": texts or null, "first_run", "stages": lists of [name, text]}}
    `words` is what `show` says. The last of `stages` names the bottleneck, and what would help.
GET /api/jobs/{id}/events?after=&limit=
    {"events": [{"seq", "at", "attempt", "kind", "message", "data"}], "next"}: oldest first; pass `next` as `after`.
"""

from __future__ import annotations

from typing import Any

import yaml

from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.query import Query
from nimble_jobs.dashboard.routing import get
from nimble_jobs.job import JobState
from nimble_jobs.store.listed import TEXT, Match, Wanted
from nimble_jobs.views import figures, stages, waits
from nimble_jobs.views.jobs import event_json, first_run, job_row, progress_row, schedule_state, summary
from nimble_jobs.views.shown import TOLD_BY_EVENTS, look

KINDS = ("score", "finetune")


def jobs(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    desk.recover()
    limit = query.limit()
    matches = [
        Match(column=column, compare="=", value=value)
        for column, value in (("state", query.word("state", tuple(JobState))), ("kind", query.word("kind", KINDS)))
        if value is not None
    ]
    if words := query.text("q"):
        matches.append(Match(column=TEXT, compare="contains", value=words))
    wanted = Wanted(matches=matches, limit=limit, now=now)
    found, following = desk.store.jobs.page(wanted, before=query.key("before"))
    why = waits.reasons(desk.store, found, now)
    rows = [job_row(job, now, why.get(job.id)) | progress_row(job, now) for job in found]
    return {"jobs": rows, "next": following}


def job(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    found = desk.store.jobs.get(query.job())
    some = desk.store.jobs.events_of_kind(found.id, *TOLD_BY_EVENTS)
    value = look(desk.store, found, now, events=some).json(now) | progress_row(found, now)
    del value["events"]
    return {
        "job": value,
        "spec_yaml": yaml.safe_dump(found.spec, sort_keys=False, allow_unicode=True),
        "words": {
            "summary": summary(found) if found.state.final else None,
            "schedule": schedule_state(found) or None,
            "speed": figures.speedup(found.schedule) or None,
            "first_run": first_run(found),
            "stages": stages.of_job(found),
        },
    }


def events(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    limit = query.limit(default=200, most=1000)
    found = desk.store.jobs.events(query.job(), since=query.number("after", 0), limit=limit)
    rows = [{"seq": event.seq} | event_json(event) for event in found]
    return {"events": rows, "next": found[-1].seq if len(found) == limit else None}


ROUTES = (
    get("/api/jobs", jobs),
    get("/api/jobs/{id}", job),
    get("/api/jobs/{id}/events", events),
)
