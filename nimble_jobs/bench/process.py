"""One process a model: asked for a unit at a time, killed with everything that it started when it takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nimble_jobs.errors import NimbleError

Message = dict[str, Any]
MODULE = "nimble_jobs.bench"
_TAIL_BYTES = 4000


class ProcessDied(NimbleError, RuntimeError):
    """The process that measures ended by itself."""


class TooLong(NimbleError, TimeoutError):
    """The process that measures did not answer in time."""


class Process:
    """The process that measures one model. What it and its compilers print goes to a log file."""

    def __init__(self, options: Message, log: Path, *, module: str = MODULE) -> None:
        self._log = log
        self._buffer = b""
        self._read, write = os.pipe()
        try:
            with log.open("ab") as out:
                self._start = out.tell()
                self._process = subprocess.Popen(  # noqa: S603  # this interpreter, one of our modules
                    [sys.executable, "-m", module, str(write), json.dumps(options)],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    pass_fds=[write],
                    start_new_session=True,
                )
        finally:
            os.close(write)

    def ask(self, message: Message) -> None:
        """Send one request. Raises ProcessDied."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as e:
            raise ProcessDied(self._last_words()) from e

    def answer(self, within_s: float) -> Message:
        """The next message of the process. Raises TooLong, ProcessDied."""
        deadline = time.monotonic() + within_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TooLong
            if not select.select([self._read], [], [], min(left, 1.0))[0]:
                if self._process.poll() is not None and not select.select([self._read], [], [], 0)[0]:
                    raise ProcessDied(self._last_words())
                continue
            data = os.read(self._read, 1 << 16)
            if not data:
                raise ProcessDied(self._last_words())
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: Message = json.loads(line)
        return message

    def close(self, grace_s: float = 10.0) -> None:
        """End the process: by closing its input, and by force where that takes longer than `grace_s` seconds."""
        self._release()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process and all that it started, now."""
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._release()

    def _release(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and will not read what is left
            self._process.stdin.close()
        if self._read >= 0:
            os.close(self._read)
            self._read = -1

    def _last_words(self) -> str:
        """How the process ended, and the last line that it printed."""
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            return "the process closed its output"
        return f"the process {ended_with(code, self._log, self._start)}"


def ended_with(code: int, log: Path, start: int, *, skip: tuple[str, ...] = ()) -> str:
    """How a process ended, and the last line that it wrote to a log since `start`, in bytes.

    Lines that begin with one of `skip` do not count.
    """
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(start, file.tell() - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith(skip)]
    return f"ended with {how}" + (f": {said[-1][:300]}" if said else "")
