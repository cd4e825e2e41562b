"""Workers and GPUs.

GET /api/workers
    {"workers": [row of `worker ls --json` with "running": the job's progress row and name, "resident_bytes": memory
     of its device that resident models and graphs take, "host_memory_bytes" of its processes],
     "gpus": [{"index", "name", "memory_used_bytes", "memory_total_bytes", "utilisation": 0 to 1, "temperature_c",
     "power_w"}]}
POST /api/workers/{id}/pause, drain, resume
    What `worker pause` and so on do. The answer, after at most a few seconds, is {"message", "answered"}.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import psutil

from nimble_jobs import control
from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.query import Query
from nimble_jobs.dashboard.routing import Answer, get, post
from nimble_jobs.job import JobState
from nimble_jobs.store import Wanted
from nimble_jobs.views import workers as views
from nimble_jobs.views.jobs import progress_row

_GPUS_S = 1.0  # the driver is asked at most this often
_MEMORY_S = 5.0


def workers(desk: Desk, query: Query, now: float) -> dict[str, Any]:
    rows = views.worker_rows(desk.store)
    running = {job.id: job for job in desk.store.jobs.list(states=[JobState.RUNNING])} if rows else {}
    resident = desk.store.schedules.resident_bytes()
    for row in rows:
        job = running.get(row["job"] or "")
        row["running"] = progress_row(job, now) | {"name": job.name, "kind": job.kind} if job else None
        row["resident_bytes"] = resident.get(row["id"])
        row["host_memory_bytes"] = desk.kept(f"memory of {row['id']}", _MEMORY_S, partial(_memory, row["pid"]))
    return {"workers": rows, "gpus": gpus(desk)}


def gpus(desk: Desk) -> list[dict[str, Any]]:
    """The GPUs of this machine; empty without a driver."""
    found, _ = desk.kept("gpus", _GPUS_S, desk.gpus.read)
    return [
        {
            "index": gpu.index,
            "name": gpu.name,
            "memory_used_bytes": gpu.memory_used_bytes,
            "memory_total_bytes": gpu.memory_total_bytes,
            "utilisation": gpu.used_share,
            "temperature_c": gpu.temperature_celsius,
            "power_w": gpu.power_watts,
        }
        for gpu in found
    ]


def _memory(pid: int | None) -> int | None:
    """Resident memory of a worker's processes; None if it is gone."""
    try:
        process = psutil.Process(pid)
        return sum(int(each.memory_info().rss) for each in (process, *process.children(recursive=True)))
    except (psutil.Error, TypeError, ValueError):
        return None


def _order(wanted: Wanted, words: tuple[str, str]) -> Answer:
    def order(desk: Desk, query: Query, now: float) -> dict[str, Any]:
        asked = control.ask(desk.store, wanted, [query.path["id"]], now=now)
        rows = views.answers(desk.store, asked, words)
        message = "; ".join(f"worker {row['id']} (process {row['pid']}): {row['words']}" for row in rows)
        return {"message": message, "answered": all(row["answered"] for row in rows)}

    return order


ROUTES = (
    get("/api/workers", workers),
    post("/api/workers/{id}/pause", _order(Wanted.PAUSE, views.PAUSES)),
    post("/api/workers/{id}/drain", _order(Wanted.DRAIN, views.DRAINS)),
    post("/api/workers/{id}/resume", _order(Wanted.RUN, views.RESUMES)),
)
