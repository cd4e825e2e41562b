"""Jobs whose process dies by SIGKILL in a stage, run by `acceptance/dying_stages.py`, and what they leave."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nimble_jobs import spec as specs
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.store_samples import queued

SCRIPT = Path(__file__).parent / "acceptance" / "dying_stages.py"
MARK = "NIMBLE_TEST_STAGE_KILLS"  # in the environment of all processes of a job


def queue(base: Path, spec: dict[str, Any], *, allowed: Path | None = None) -> None:
    """Queue a job in the state folder of `base`. It may execute what lies in `allowed`, by default in `base`."""
    with open_store(resolve(str(base / "home"))) as store:
        resolved = specs.dump(specs.restore(spec))
        queued(store, spec=resolved, name="n", kind="score", allow_python=[str(allowed or base)], now=time.time())


def score(base: Path, stage: str, number: int, *, device: str = "cpu") -> dict[str, int] | None:
    """Run the next attempt of the job in `base`, with a SIGKILL when `stage` works for the `number`-th time.

    Returns how often each stage worked, or None if the process was killed; the attempt then counts as lost, as a worker
    would count it.
    """
    command = [sys.executable, str(SCRIPT), str(base), stage, str(number), device]
    run = prefork.run if device == "cpu" else subprocess.run  # CUDA wants no forked process
    timeout_s = 120 if device == "cpu" else 240
    done = run(command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, MARK: str(base)})
    if done.returncode == -signal.SIGKILL:
        with open_store(base / "home") as store:
            (job,) = store.jobs.list()
            store.jobs.fail(job.id, job.attempt, error="the worker died", retry=True, lost=True, now=time.time())
        return None
    assert done.returncode == 0, done.stderr
    return dict(ast.literal_eval(done.stdout.strip().splitlines()[-1]))


def published(base: Path) -> dict[str, bytes]:
    """The files of the output by name, without the manifest."""
    return {file.name: file.read_bytes() for file in sorted((base / "out").iterdir()) if file.name != "manifest.json"}


def left_over(base: Path) -> list[int]:
    """The processes of a job that are still running."""
    mark = f"{MARK}={base}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes() + b"\0" and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found
