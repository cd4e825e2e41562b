"""GET /api/overview: what a person must know at first sight.

{"home": {"id", "path"}, "version", "read_only", "csrf", "now",
 "last_seq":  number of the newest event: open /api/stream?after=LAST_SEQ after this answer,
 "counts":    {"queued", "running", "succeeded", "failed", "cancelled", "quarantined"},
 "well":      whether there is nothing to do for the user,
 "alerts":    [{"level": "problem" | "note", "title", "words", "hint"}]}
"""

from __future__ import annotations

from typing import Any

from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.query import Query
from nimble_jobs.dashboard.routing import get
from nimble_jobs.store.home import identity
from nimble_jobs.version import __version__
from nimble_jobs.views import figures


def overview(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    store = desk.store
    last_seq = store.jobs.event_span()[1]  # first, so that whatever changes from here on is in the stream
    return {
        "home": {"id": identity(store.home), "path": str(store.home)},
        "version": __version__,
        "read_only": desk.read_only,
        "csrf": desk.keys.csrf,
        "now": figures.iso(now),
        "last_seq": last_seq,
        "counts": {state.value: number for state, number in store.jobs.counts().items()},
        "well": True,
        "alerts": [],
    }


ROUTES = (get("/api/overview", overview),)
