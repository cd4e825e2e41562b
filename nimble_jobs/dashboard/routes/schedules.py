"""Stored schedules.

GET /api/schedules?model=&device=&state=&before=&limit=
    {"schedules": [row of `cache ls --json`], "next"}: the newest first. `state` is ready, stale or quarantined.
GET /api/schedules/{key}
    The object of `cache show --json`; whether artifacts are damaged is left out, because it takes reading them.
GET /api/store
    {"schedules": the first page of /api/schedules, "next", "stats": the object of `cache stats --json`,
     "sizes": {"database_bytes", "artifacts_bytes", "logs_bytes", ..., "total_bytes", "limit_bytes"},
     "recent_misses": [{"at", "job", "name", "reason"}]: among the newest jobs}
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.query import Query
from nimble_jobs.dashboard.routing import get
from nimble_jobs.errors import NotFound
from nimble_jobs.job import JobState
from nimble_jobs.store import ScheduleState
from nimble_jobs.store.prune import aged
from nimble_jobs.store.sizes import sizes
from nimble_jobs.views import figures
from nimble_jobs.views.schedules import look, rows_of, statistics

_KEY = re.compile(r"[0-9a-zA-Z:._-]{4,128}")
_AT_ONCE = 500  # schedules that are read at once when their state is asked for
_MISSES = 20
_AMONG = 2000  # newest jobs in which misses are looked for
_KEPT_S = 5.0  # the sizes and statistics take reading every row and the size of every file


def schedules(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    state, limit = query.word("state", tuple(ScheduleState)), query.limit()
    model, device = query.text("model"), query.text("device")
    start, more = query.key("before") or 0, True
    shown: list[dict[str, Any]] = []
    while more and len(shown) < limit:
        # A schedule's age is known here and not in the database, so a page by state may have to read several.
        at_once = limit if state is None else _AT_ONCE
        found, following = desk.store.schedules.page(model=model, device=device, before=start, limit=at_once)
        wanted = [
            (place, row)
            for place, row in enumerate(rows_of(desk.store, aged(found)), start + 1)
            if state in (None, row["state"])
        ]
        taken = wanted[: limit - len(shown)]
        shown += [row for _, row in taken]
        more = following is not None or len(taken) < len(wanted)
        start = taken[-1][0] if len(taken) < len(wanted) else following or 0
    return {"schedules": shown, "next": start if more else None}


def schedule(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    if not _KEY.fullmatch(query.path["key"]):
        raise NotFound("no schedule has this key")
    return look(desk.store, query.path["key"], every_byte=False).json()


def store(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    page = schedules(desk, Query(), now)
    return page | {
        "stats": desk.kept("stats", _KEPT_S, lambda: statistics(desk.store)),
        "sizes": desk.kept("sizes", _KEPT_S, lambda: _sizes(desk)),
        "recent_misses": [
            {
                "at": figures.iso(job.started_at),
                "job": job.id,
                "name": job.name,
                "state": JobState(job.state).value,
                "reason": job.schedule.get("miss_reason") or job.schedule.get("fallback"),
            }
            for job in desk.store.jobs.recent_misses(among=_AMONG, limit=_MISSES)
        ],
    }


def _sizes(desk: Desk) -> dict[str, Any]:
    usage = sizes(desk.store)
    limit = desk.store.settings.usable().cache.size
    return asdict(usage) | {"total_bytes": usage.total_bytes, "limit_bytes": limit}


ROUTES = (
    get("/api/schedules", schedules),
    get("/api/schedules/{key}", schedule),
    get("/api/store", store),
)
