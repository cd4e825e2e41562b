"""A store, and workers with fake jobs on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import worker_fakes
from several_devices import worker
from worker_processes import Start

from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.waiting import until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(resolve(str(tmp_path / "home")))
    yield opened
    opened.close()


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[Start]:
    """Starts workers; none of them, nor a child, is left behind."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        *, idle: float = 0, grace: float = 20, device: str = "auto", target: str = "", limit: float = 0
    ) -> subprocess.Popen[str]:
        log = (tmp_path / f"worker-{len(started)}.log").open("w")
        words = [str(store.home), str(idle), str(grace), device, target, str(limit)]
        command = [sys.executable, worker_fakes.__file__, *words]
        started.append(prefork.start(command, stderr=log, text=True))
        log.close()
        return started[-1]

    yield begin
    for number, process in enumerate(started):
        process.kill()
        process.wait()
        print((tmp_path / f"worker-{number}.log").read_text())  # seen where a test fails


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The store of a worker with two devices, for all tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("running")
    with open_store(resolve(str(folder / "home"))) as store, worker(store, folder, "cpu,cpu"):
        until(lambda: len(store.workers.live()) == 2)
        yield store
