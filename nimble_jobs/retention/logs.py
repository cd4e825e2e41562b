"""Old files in the folder of logs."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nimble_jobs.store.ids import ALPHABET, LENGTH

_JOB = re.compile(rf"([{ALPHABET}]{{{LENGTH}}})\.log")
_WORKER = re.compile(r"worker-(\d{8}T\d{6}Z)-[0-9a-f]+\.log")
_STARTS_WITHIN_S = 600.0  # time of a worker between creating its log and taking its lock


@dataclass(frozen=True, kw_only=True)
class Log:
    """A file in the folder of logs."""

    path: Path
    bytes: int
    written_at: float  # Unix seconds, by the file system
    job: str | None  # None for a worker's
    begun_at: float  # a worker's: Unix seconds, from its name


def log_of(home: Path, job_id: str) -> Path:
    """The path of a job's log."""
    return home / "logs" / f"{job_id}.log"


def logs(home: Path) -> Iterator[Log]:
    """The logs of jobs and of workers. Other files are skipped."""
    for path in sorted((home / "logs").glob("*.log")):
        job, worker = _JOB.fullmatch(path.name), _WORKER.fullmatch(path.name)
        if not job and not worker:
            continue
        with suppress(OSError, ValueError):
            info = path.stat()
            begun = calendar.timegm(time.strptime(worker[1], "%Y%m%dT%H%M%SZ")) if worker else 0.0
            yield Log(
                path=path,
                bytes=info.st_size,
                written_at=info.st_mtime,
                job=job[1] if job else None,
                begun_at=begun,
            )


def old(log: Log, age_s: float | None, now: float, *, started: Collection[float]) -> bool:
    """Whether nothing was written to it for this long, and no running worker writes to it.

    `started`: start times of running workers. A worker creates its log a moment earlier.
    """
    if age_s is None or now - log.written_at < age_s:
        return False
    return log.job is not None or not any(0 <= at - log.begun_at + 1 < _STARTS_WITHIN_S for at in started)
