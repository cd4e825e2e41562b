"""Runs one command to its end in a process of its own, with a time limit, and says how long it took."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimble_jobs.bench.process import ended_with

Start = Callable[..., Any]  # as subprocess.Popen, with command, stdin, stdout, stderr, env
_INFRASTRUCTURE = ("[W", "[rank")  # how lines of torch's own log begin


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended."""

    wall_s: float  # from its start to its end
    out: str  # stdout
    error: str | None  # why it failed
    late: bool = False  # whether it was ended at the time limit


def start_alone(command: Sequence[str], **named: Any) -> subprocess.Popen[bytes]:
    """A process that leads a session of its own, so that it can be ended with all that it started."""
    return subprocess.Popen(command, start_new_session=True, **named)  # noqa: S603  # this interpreter, our modules


def run(
    command: Sequence[str],
    *,
    log: Path,
    limit_s: float,
    start: Start = start_alone,
    env: Mapping[str, str] | None = None,
    seen: Callable[[Any], None] = lambda _: None,
) -> Ended:
    """Its stderr goes to the end of `log`. `seen` gets the process when it has started."""
    with tempfile.TemporaryFile() as out, log.open("ab") as err:
        written = err.tell()
        begin = time.perf_counter()
        named = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "env": {**os.environ, **(env or {})}}
        process = start(command, **named)
        leads = start is start_alone
        try:
            seen(process)
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            wall_s = time.perf_counter() - begin
            _end(process, leads=leads)
        out.seek(0)
        said = out.read().decode(errors="replace")
    if code is None:
        return Ended(wall_s=wall_s, out=said, error=f"over the time limit of {limit_s:g} s", late=True)
    error = ended_with(code, log, written, skip=_INFRASTRUCTURE) if code else None
    return Ended(wall_s=wall_s, out=said, error=error)


def _end(process: Any, *, leads: bool) -> None:
    """End it, and where it leads a process group, also what it left behind."""
    if leads:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
        process.wait()
