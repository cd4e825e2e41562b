"""Timers.

GET /api/timers?before=&limit=
    {"timers": [row of `cron ls --json` with "ticks": its last ticks], "next"}: by name.
GET /api/timers/{name}
    The object of `cron show --json`: a row of the listing with "spec", "next": the coming ticks, "ticks": past ones.
POST /api/timers/{name}/pause, resume, trigger
    What the commands of these names do. The answer is {"message", "job": id of the submitted job, for `trigger`}.
"""

from __future__ import annotations

from typing import Any

from nimble_jobs import cron
from nimble_jobs.cron import Watched
from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.query import Query
from nimble_jobs.dashboard.routing import get, post
from nimble_jobs.store import Store
from nimble_jobs.views.timers import due_rows, tick_row, timer_row, zone_of

_STRIP = 12  # past ticks of each timer in the listing
_PAST = 50
_AHEAD = 10


def timers(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    limit, after = query.limit(default=50, most=200), query.given.get("before", "")
    names = [name for name in desk.store.timers.names() if name > after]
    rows = [_row(desk.store, cron.show(name, store=desk.store, now=now), now, _STRIP) for name in names[:limit]]
    return {"timers": rows, "next": names[limit - 1] if len(names) > limit else None}


def timer(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    watched = cron.show(query.path["name"], store=desk.store, now=now)
    name, zone = watched.timer.name, zone_of(watched.timer)
    ahead = cron.upcoming(name, _AHEAD, store=desk.store, now=now) if watched.cron else []
    return _row(desk.store, watched, now, _PAST) | {
        "spec": watched.timer.spec,
        "next": due_rows(name, zone, [due for _, due in ahead], now),
    }


def _row(store: Store, watched: Watched, now: float, ticks: int) -> dict[str, Any]:
    past = store.timers.ticks(watched.timer.name, limit=ticks)
    jobs = {job.id: job for job in store.jobs.brief([tick.job for tick in past if tick.job])}
    zone = zone_of(watched.timer)
    return timer_row(watched, now) | {"ticks": [tick_row(tick, zone, jobs.get(tick.job or "")) for tick in past]}


def pause(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    paused = cron.pause(query.path["name"], store=desk.store, now=now)
    return {"message": f"{paused.name}: paused", "job": None}


def resume(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    resumed = cron.resume(query.path["name"], store=desk.store, now=now)
    return {"message": f"{resumed.name}: resumed", "job": None}


def trigger(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    tick = cron.trigger(query.path["name"], store=desk.store, now=now)
    return {"message": f"{tick.timer}: {tick.outcome.value}" + (f" as {tick.job}" if tick.job else ""), "job": tick.job}


ROUTES = (
    get("/api/timers", timers),
    get("/api/timers/{name}", timer),
    post("/api/timers/{name}/pause", pause),
    post("/api/timers/{name}/resume", resume),
    post("/api/timers/{name}/trigger", trigger),
)
