"""What processes that run jobs set for CUDA before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nimble_jobs.machine import before_cuda
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import real_station

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set here ends with the test."""
    for name in (CONNECTIONS, "CUDA_MODULE_LOADING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_where_jobs_run_streams_have_queues_of_their_own(tmp_path: Path) -> None:
    """Also in processes that this one starts, such as builders: they inherit it."""
    with open_store(resolve(str(tmp_path / "home"))) as store:
        station = real_station(store, "worker", "cpu", None)
    try:
        assert os.environ[CONNECTIONS] == "32"
    finally:
        station.close()


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS, "4")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    before_cuda()
    assert (os.environ[CONNECTIONS], os.environ["CUDA_MODULE_LOADING"]) == ("4", "EAGER")
