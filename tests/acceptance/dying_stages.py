"""Runs the next attempt of a scoring job, and dies by SIGKILL in the n-th work of a stage.

Usage: `dying_stages.py BASE STAGE N DEVICE`. With N = 0 it lives, and prints how often each stage worked.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nimble_jobs.data import Staging, object_inputs, reader
from nimble_jobs.data.reader import Reader
from nimble_jobs.data.shard_files import ShardFiles
from nimble_jobs.engine.arrivals import Arrivals
from nimble_jobs.engine.landings import Lane
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.engine.seats import ReplaySeat
from nimble_jobs.objects import Objects
from nimble_jobs.planner import Loaded
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import execute, real_station
from nimble_jobs.workloads.columns import Columns
from nimble_jobs.workloads.text import windows

STAGES: dict[str, tuple[type, str]] = {
    "read": (Reader, "_load"),
    "upload": (Arrivals, "upload"),
    "replay": (Loaded, "_in_eager"),
    "columns": (Columns, "add"),
    "shards": (Staging, "write_shard"),
    "sheets": (ShardFiles, "write_sheet"),
    "publish": (Staging, "publish"),
}
# Of a job whose pictures a GPU decodes, and that has a schedule.
GPU_STAGES: dict[str, tuple[type, str]] = {
    **{name: STAGES[name] for name in ("read", "columns", "shards", "sheets", "publish")},
    "decode": (PictureDecoder, "decode"),
    "upload": (Arrivals, "finish"),
    "replay": (ReplaySeat, "compute"),
    "download": (Lane, "start"),
}
FETCHES: dict[str, tuple[type, str]] = {"fetch": (Objects, "fetch"), "list": (Objects, "list")}  # of objects
FEW = 8  # pictures from which on processes decode them
THREADS = 2  # that fetch objects, so that a few are scored before the others are there
WINDOW = 64  # texts in a window, at least


def main() -> None:
    """Claim, score, end the job."""
    base, stage, last, device = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    counts, lock = Counter[str](), threading.Lock()

    def counting(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            with lock:
                counts[name] += 1
                if (name, counts[name]) == (stage, last):
                    os.kill(os.getpid(), signal.SIGKILL)
            return work(*args, **named)

        return counted

    for name, (owner, method) in ((STAGES if device == "cpu" else GPU_STAGES) | FETCHES).items():
        setattr(owner, method, counting(name, getattr(owner, method)))
    reader.FEW = FEW  # type: ignore[attr-defined]
    windows.FEW_RECORDS = WINDOW
    object_inputs.THREADS = THREADS
    with open_store(resolve(str(base / "home"))) as store:
        job = store.jobs.claim("w", device=device, now=time.time() + 1e6)
        assert job is not None
        station = real_station(store, "w", device, None)
        execute(job, station)
        print({**counts, "processes": len(station.decoders.pids) if station.decoders is not None else 0})
        station.close()


if __name__ == "__main__":
    main()
