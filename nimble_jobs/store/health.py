"""Problems of a worker that holds its lock, as far as others can see them."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path

from nimble_jobs.spec.units import format_duration
from nimble_jobs.store.database import FileId, file_id
from nimble_jobs.store.home import DATABASE
from nimble_jobs.store.leases import LEASE_S, boot_id
from nimble_jobs.store.records import WorkerInfo

QUIET_S = 20.0  # a worker gives a sign of life every five seconds
STILL_S = 600.0  # after this time without progress, a worker is reported
_NOTICES_S = 15.0  # within this time a worker notices that its database was replaced


@dataclass(frozen=True, kw_only=True)
class Health:
    """A worker's health. Times are in seconds; None if it never reported them."""

    seen_s: float | None  # since its last sign of life
    progress_s: float | None  # since its job last made progress; None without a job
    state: str | None  # stuck | deaf | waits | still; None if healthy
    words: str = ""  # the meaning, and what to do

    @property
    def broken(self) -> bool:
        """Whether the user has to do something."""
        return self.state in ("stuck", "deaf", "waits")


def health_of(worker: WorkerInfo, home: Path) -> Health:
    """Judged by the worker's info file, a clock that cannot be set, and the files of the state folder."""
    now = time.monotonic()
    seen_s, progress_s = _since(worker, "seen_at", now), _since(worker, "moved_at", now)
    left_s = worker.info.get("lease_left_s")  # of a worker of another machine, whose clock says nothing here
    if isinstance(left_s, int | float):
        seen_s = max(0.0, LEASE_S - left_s)

    def health(state: str | None, words: str = "") -> Health:
        return Health(seen_s=seen_s, progress_s=progress_s, state=state, words=words)

    elsewhere = elsewhere_on(worker)
    name = f"worker {worker.id} (process {worker.pid}{elsewhere and f' on {elsewhere}'})"
    if seen_s is not None and seen_s > QUIET_S:
        how = "it is stopped or stuck; continue it (kill -CONT) or end it (kill -KILL); its job is not lost"
        if elsewhere:
            how = (
                f"it is stopped, cut off or dead, which shows once its lease ends, {_rounded(LEASE_S)} after the last "
                f"sign; if its process is still there, continue it (kill -CONT) or end it (kill -KILL) on {elsewhere}; "
                "its job is not lost"
            )
        return health("stuck", f"{name} has given no sign of life for {_rounded(seen_s)}: {how}")
    if _deaf(worker, home):
        how = "stop it and start another; its job is not lost"
        return health("deaf", f"{name} still uses the old file of {home / DATABASE}, which was replaced: {how}")
    reason = worker.info.get("trouble") or worker.info.get("waits_for")
    if reason:
        return health("waits", f"{name} is waiting until this works again: {reason}")
    if progress_s is not None and progress_s > STILL_S:
        job = worker.info.get("job")
        stall_s = worker.info.get("stall_s")
        end = f"; its worker will end it after {_rounded(stall_s)} (run.stall)" if stall_s else ""
        return health("still", f"{name} runs job {job}, which has made no progress for {_rounded(progress_s)}{end}")
    return health(None)


def elsewhere_on(worker: WorkerInfo) -> str:
    """The host of a worker that runs on another one, where its process id means something; otherwise empty."""
    host = str(worker.info.get("host") or "")
    here = (host, worker.info.get("boot")) == (socket.gethostname(), boot_id())
    return "" if here else host


def _deaf(worker: WorkerInfo, home: Path) -> bool:
    known = worker.info.get("database")
    path = home / DATABASE
    present: FileId | None = file_id(path)
    if not isinstance(known, list) or present is None or tuple(known) == present:
        return False
    return time.time() - path.stat().st_ctime > _NOTICES_S


def _since(worker: WorkerInfo, name: str, now: float) -> float | None:
    at = worker.info.get(name)
    return max(0.0, now - at) if isinstance(at, int | float) else None


def _rounded(seconds: float) -> str:
    return format_duration(round(seconds))
