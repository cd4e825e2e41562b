"""`cron serve`, and workers, as processes that fire timers by the real clock."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from worker_processes import Start

from nimble_jobs.store import Store, Tick, WorkerInfo
from nimble_jobs.store.home import DATABASE
from tests.timers import HOUR, add
from tests.waiting import PATIENCE_S, until

COMMAND = """
import sys
from pathlib import Path
from nimble_jobs.worker.cron import serve
sys.exit(serve(Path(sys.argv[1])))
"""


@pytest.fixture
def serving(store: Store, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with (tmp_path / "serve.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", COMMAND, str(store.home)], stderr=log, text=True)
    yield process
    process.kill()
    process.wait()


def not_now() -> str:
    """Once an hour, half an hour from now."""
    return f"{(int(time.time()) // 60 + 30) % 60} * * * *"


def seen(store: Store) -> WorkerInfo | None:
    """What others see of it, once it is there."""
    return next((info for info in store.workers.live() if info.info.get("role") == "cron"), None)


def last(store: Store) -> Tick | None:
    return store.timers.last_ticks().get("nightly")


def test_cron_serve_fires(store: Store, tmp_path: Path, serving: subprocess.Popen[str]) -> None:
    """It submits what an absence left, runs nothing, is seen as what it is, and ends with 0 when told to."""
    add(store, tmp_path / "work", now=time.time() - 5 * HOUR, expression=not_now())
    tick = until(lambda: last(store))
    assert (tick.outcome, tick.kind) == ("submitted", "catch-up")
    info = until(lambda: seen(store))
    assert (info.pid, info.status) == (serving.pid, "ready")
    maps = Path(f"/proc/{serving.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert [job.state.value for job in store.jobs.list()] == ["queued"]
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(timeout=PATIENCE_S) == 0
    assert seen(store) is None


def test_cron_serve_waits_for_the_store(store: Store, tmp_path: Path, serving: subprocess.Popen[str]) -> None:
    """While the database is locked by somebody else it waits, says so, hears signals, and fires afterwards."""
    until(lambda: seen(store))
    timer = add(store, tmp_path / "work", now=time.time() + 1 - HOUR, expression="* * * * *")
    assert timer.next_due is not None
    with closing(sqlite3.connect(store.home / DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        until(lambda: (info := seen(store)) and info.info.get("trouble"))
        assert serving.poll() is None
        other.execute("ROLLBACK")
    until(lambda: (tick := last(store)) and tick.outcome == "submitted")
    until(lambda: (info := seen(store)) and not info.info.get("trouble"))


def test_several_fire_the_same_timer(
    store: Store, tmp_path: Path, serving: subprocess.Popen[str], start: Start
) -> None:
    """A worker fires, too: whoever is first. One tick, one job."""
    start()
    until(lambda: len(store.workers.live()) == 2)
    add(
        store,
        tmp_path / "work",
        now=time.time() - 5 * HOUR,
        expression=not_now(),
        **{"model.source": "torchvision:resnet18"},
    )
    until(lambda: last(store))
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(timeout=PATIENCE_S) == 0
    jobs = [tick.job for tick in store.timers.ticks("nightly") if tick.job]
    assert jobs == [job.id for job in store.jobs.list()]
    assert len(jobs) == 1
