#!/usr/bin/env python3
"""Measure the dashboard: the time of each view among many jobs, idle cost, and claims beside open streams.

    python scripts/measure_dashboard.py [--jobs 100000] [--streams 500] [--claims 200] [--out FILE]

Prints figures, and writes them as JSON. Exits with 1 when a view takes the server over 100 ms of a core.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from measuring import ROOT, environment, save

sys.path.insert(0, str(ROOT))

from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests.dashboards import Dashboard
from tests.store_samples import many_jobs

LIMIT_MS = 100.0
CALLS = 20
DAYS_BACK_S = 100_000.0


def main() -> int:
    """Measure, write; 0 if every view is quick enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--claims", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "measurements" / "dashboard.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nimble-jobs-") as folder, ExitStack() as open_ones:
        store = open_ones.enter_context(open_store(resolve(folder)))
        ids = many_jobs(store, options.jobs, now=time.time() - DAYS_BACK_S)
        board = open_ones.enter_context(Dashboard.started(Path(folder)))
        rows = views(board, ids)
        idle = idle_share(board)
        streams = beside_streams(board, store, options.streams, options.claims)
    results = {"environment": environment(), "jobs": options.jobs, "views": rows, "idle": idle, "streams": streams}
    save(options.out, results)
    return int(any(row["server_ms"] > LIMIT_MS for row in rows))


def views(board: Dashboard, ids: list[str]) -> list[dict[str, Any]]:
    """For each view the time of a core that the server takes, and the median and longest time that a client waits."""
    process = psutil.Process(board.process.pid)
    job = ids[len(ids) // 2]
    paths = (
        "/api/overview",
        "/api/jobs",
        "/api/jobs?limit=500",
        f"/api/jobs?before={len(ids) // 2}",
        *(f"/api/jobs?state={state}" for state in ("queued", "running", "succeeded", "failed")),
        "/api/jobs?kind=score",
        "/api/jobs?kind=finetune",
        "/api/jobs?kind=finetune&state=succeeded",
        "/api/jobs?q=job-3",
        "/api/jobs?q=nothing-has-this",
        "/api/jobs?q=no such file",
        "/api/jobs?state=succeeded&q=nothing-has-this",
        f"/api/jobs/{job}",
        f"/api/jobs/{job}/events",
        f"/api/jobs/{job}/log",
        "/api/store",
        "/api/schedules",
        "/api/timers",
        "/api/workers",
        "/metrics",
        "/api/jobs/nothing",
    )
    rows = []
    for path in paths:
        times = []
        before = _used_s(process)
        for _ in range(CALLS):
            began = time.perf_counter()
            board.ask("GET", path.replace(" ", "%20"), {"Cookie": board.cookie})
            times.append((time.perf_counter() - began) * 1e3)
        server_ms = (_used_s(process) - before) / CALLS * 1e3
        figures = {"server_ms": server_ms, "median_ms": statistics.median(times), "longest_ms": max(times)}
        row = {"path": path.replace(job, "ID")} | figures
        print(f"{row['path']:45}", ", ".join(f"{name} {value:7.1f}" for name, value in figures.items()), flush=True)
        rows.append(row)
    return rows


def idle_share(board: Dashboard, seconds: float = 20.0) -> dict[str, float]:
    """The share of a core that the server takes without any page open, and with one."""
    process = psutil.Process(board.process.pid)
    shares = {"without_pages": _share(process, seconds)}
    with board.stream() as stream:
        next(iter(stream))
        shares["with_one_page"] = _share(process, seconds)
    for name, share in shares.items():
        print(f"{name:50} {share:8.2%} of a core", flush=True)
    return shares


def _share(process: psutil.Process, seconds: float) -> float:
    before = _used_s(process)
    time.sleep(seconds)
    return (_used_s(process) - before) / seconds


def _used_s(process: psutil.Process) -> float:
    """Seconds of a core that the process has taken so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def beside_streams(board: Dashboard, store: Store, count: int, claims: int) -> dict[str, Any]:
    """Claims of one worker before and while streams are open, all of which read what they get."""
    before = claim(store, claims)
    sockets = [_opened(board) for _ in range(count)]
    over = threading.Event()
    received = [0] * count
    reader = threading.Thread(target=_read_all, args=(sockets, received, over))
    reader.start()
    time.sleep(2.0)
    during = claim(store, claims)
    time.sleep(2.0)
    over.set()
    reader.join()
    for one in sockets:
        one.close()
    found: dict[str, Any] = {"streams": count, "claims": claims, "least_bytes_received": min(received, default=0)}
    for name, times in (("before", before), ("during", during)):
        ordered = sorted(times)
        found[name] = {
            "median_ms": statistics.median(ordered),
            "p99_ms": ordered[int(len(ordered) * 0.99)],
            "longest_ms": ordered[-1],
        }
        figures = ", ".join(f"{key} {value:.1f}" for key, value in found[name].items())
        print(f"claims {name} {count} open streams: {figures}", flush=True)
    return found


def claim(store: Store, count: int) -> list[float]:
    """Milliseconds of each claim; each job ends at once."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        job = store.jobs.claim("measure", device="cpu", now=time.time())
        times.append((time.perf_counter() - began) * 1e3)
        assert job is not None, "no queued job is left"
        store.jobs.fail(job.id, job.attempt, error="measured", retry=False, now=time.time())
    return times


def _opened(board: Dashboard) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", board.port))
    one.sendall(f"GET /api/stream HTTP/1.1\r\nHost: {board.host}\r\nCookie: {board.cookie}\r\n\r\n".encode())
    one.setblocking(False)
    return one


def _read_all(sockets: list[socket.socket], received: list[int], over: threading.Event) -> None:
    while not over.is_set():
        for i, one in enumerate(sockets):
            try:
                received[i] += len(one.recv(1 << 16))
            except BlockingIOError:
                continue
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
