"""GET /api/overview: what a person must know at first sight.

{"home": {"id", "path"}, "version", "read_only", "csrf", "now",
 "last_seq":  number of the newest event: open /api/stream?after=LAST_SEQ after this answer,
 "counts":    {"queued", "running", "succeeded", "failed", "cancelled", "quarantined"},
 "well":      whether there is no problem,
 "alerts":    [{"level": "problem" | "note", "title", "words", "hint"}]: problems first; `hint` may be null,
 "workers":   {"running", "busy", "paused"},
 "gpus":      as in /api/workers}

All but `last_seq` and `csrf` may be a second old, because each page asks for it again and again.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.query import Query
from nimble_jobs.dashboard.routes.workers import gpus
from nimble_jobs.dashboard.routing import get
from nimble_jobs.store.home import identity
from nimble_jobs.version import __version__
from nimble_jobs.views import figures
from nimble_jobs.views.health import alerts
from nimble_jobs.views.workers import worker_rows

_KEPT_S = 1.0


def overview(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    desk.recover()
    last_seq = desk.store.jobs.event_span()[1]  # first, so that whatever changes from here on is in the stream
    return desk.kept(f"overview at {last_seq}", _KEPT_S, lambda: _overview(desk, now)) | {
        "now": figures.iso(now),
        "csrf": desk.keys.csrf,
        "last_seq": last_seq,
    }


def _overview(desk: Desk, now: float) -> dict[str, Any]:
    store = desk.store
    found = alerts(store, now)
    live = worker_rows(store)
    return {
        "home": {"id": identity(store.home), "path": str(store.home)},
        "version": __version__,
        "read_only": desk.read_only,
        "counts": {state.value: number for state, number in store.jobs.counts().items()},
        "well": all(alert.level != "problem" for alert in found),
        "alerts": [asdict(alert) for alert in found],
        "workers": {
            "running": len(live),
            "busy": sum(row["job"] is not None for row in live),
            "paused": sum(row["status"] == "paused" for row in live),
        },
        "gpus": gpus(desk),
    }


ROUTES = (get("/api/overview", overview),)
