"""Where a worker and its jobs write what they do: UTC times, one file a job."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s"


def _formatter() -> logging.Formatter:
    formatter = logging.Formatter(_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    return formatter


def to_stderr() -> None:
    """Send this process's log to stderr. Calling it again changes nothing."""
    logging.getLogger("nimble_jobs").setLevel(logging.INFO)
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_formatter())
        root.addHandler(handler)


def job_log_path(home: Path, job_id: str) -> Path:
    """The log of one job; its attempts follow each other in it."""
    return home / "logs" / f"{job_id}.log"


@contextmanager
def job_log(home: Path, job_id: str) -> Iterator[None]:
    """Append everything that this process logs to the job's own log."""
    logging.getLogger("nimble_jobs").setLevel(logging.INFO)
    path = job_log_path(home, job_id)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_formatter())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
