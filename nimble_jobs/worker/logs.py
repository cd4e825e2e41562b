"""Logs of a worker and its jobs: UTC times, one file per job. On a full disk, lines wait for space."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s"
_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_KEPT_BYTES = 1 << 20  # most bytes that wait for the disk; further lines are only counted


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


def forgive_stderr() -> None:
    """Let writes to stderr, by a model's code for instance, succeed even if stderr is a file on a full disk."""
    sys.stderr = io.TextIOWrapper(
        _Forgiving(sys.stderr.fileno()), encoding="utf-8", errors="backslashreplace", write_through=True
    )


def job_log_path(home: Path, job_id: str) -> Path:
    """The log file of one job, for all of its attempts."""
    return home / "logs" / f"{job_id}.log"


@contextmanager
def job_log(home: Path, job_id: str) -> Iterator[None]:
    """Append everything that this process logs to the job's own log."""
    ours = logging.getLogger("nimble_jobs")
    if ours.level != logging.INFO:  # setting it clears the caches of all loggers
        ours.setLevel(logging.INFO)
    handler = _JobLog(job_log_path(home, job_id))
    handler.setFormatter(_formatter())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


class _JobLog(logging.Handler):
    """Appends to the file at the path, even if it was replaced. Lines that cannot be written wait for the next one."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._waiting = bytearray()
        self._lost = 0
        self._write()

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        if self._waiting and len(self._waiting) + len(line) > _KEPT_BYTES:
            self._lost += 1
        else:
            self._waiting += line
        self._write()

    def close(self) -> None:
        self._write()
        if self._waiting:  # they are not lost if stderr is another file
            sys.stderr.write(
                f"{self._path}: could not be written; these lines are "
                f"missing:\n{self._waiting.decode('utf-8', 'replace')}"
            )
        super().close()

    def _write(self) -> None:
        if not (self._waiting or self._lost):
            return
        with suppress(OSError):
            try:
                descriptor = os.open(self._path, _APPENDING, 0o666)
            except FileNotFoundError:
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                descriptor = os.open(self._path, _APPENDING, 0o666)
            try:
                while self._waiting:
                    del self._waiting[: os.write(descriptor, self._waiting)]
                if self._lost:
                    lost, self._lost = self._lost, 0
                    os.write(descriptor, f"({lost} lines are missing: the disk was full)\n".encode())
            finally:
                os.close(descriptor)


class _Forgiving(io.RawIOBase):
    """A descriptor to which writes do not fail. Lost bytes are counted, and the count is written once that works."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lost = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        left = view
        try:
            if self._lost:
                os.write(self._descriptor, f"\n({self._lost} bytes are missing: the disk was full)\n".encode())
                self._lost = 0
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            self._lost += len(left)
        return len(view)
