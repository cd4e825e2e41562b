"""The supervisor's side of its child, with real processes that do not listen."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from worker_fakes import hang_at_start, submit

from nimble_jobs.store import Store
from nimble_jobs.worker import process
from nimble_jobs.worker.process import Child


def test_a_long_order_to_a_stopped_process(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor does not wait for it; it can still be ended, though it is stopped."""
    monkeypatch.setattr(process, "SEND_S", 0.2)
    submit(store, tmp_path, do="batches", text="x" * 900_000)
    job = store.jobs.claim("w", device="cpu", now=time.time() + 1)
    assert job is not None
    child = Child(hang_at_start, store.home, "w", "cpu", None)
    pid = child._process.pid
    assert pid is not None
    try:
        os.kill(pid, signal.SIGSTOP)
        child.run(job)  # would never return
        while not child._stopped():
            time.sleep(0.01)
        assert child.end() is False
    finally:
        child.kill()
    assert child.bury() == "killed by SIGKILL"
