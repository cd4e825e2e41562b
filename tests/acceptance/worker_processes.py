"""Helpers of tests that start real workers with fake jobs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from nimble_jobs import client
from nimble_jobs.job import Job
from nimble_jobs.store import Store
from tests import zygote
from tests.waiting import PATIENCE_S

Start = Callable[..., "subprocess.Popen[str]"]


def noted(tmp_path: Path, name: str = "fake") -> list[list[str]]:
    """Attempt, process id and text of each line that the job wrote."""
    path = tmp_path / f"{name}.note"
    return [line.split(maxsplit=2) for line in path.read_text().splitlines()] if path.exists() else []


def ended(store: Store, *jobs: Job, timeout_s: float = PATIENCE_S) -> list[Job]:
    return client.wait([job.id for job in jobs], store=store, timeout_s=timeout_s)


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The process that runs jobs; the other one is multiprocessing's resource tracker."""
    (found,) = zygote.spawned(process.pid)
    return found
