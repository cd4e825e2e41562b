"""Schedules that processes of their own build: beside a job, or while there is none.

A build in this process would share its allocator, its streams and the interpreter with the replays of the job; another
process shares only the device. What it measures is disturbed by the job all the same, and so is the job by it: so such
a process is niced, compiles on as many threads as cores are idle, and rests after each use of the device for as long as
that took (`payback.RESTS`), until it is told that it is alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.planner.keys.request import Request

_COMMAND = (sys.executable, "-m", "nimble_jobs.planner.jobs.builder")
_PATIENCE_S = 10.0
ALONE = b"!"  # to a builder: no job is disturbed any more
TRY_AGAIN = 75  # a builder's exit code, EX_TEMPFAIL of sysexits.h: another build may succeed


class Builders:
    """The builds that this process has started. They end with it, but not with the job that wanted them."""

    def __init__(self, home: Path, *, command: Sequence[str] = _COMMAND) -> None:
        self._home = home
        self._command = tuple(command)
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._ends_at_once: set[str] = set()  # keys of builds that end when a job comes

    def start(self, key: str, request: Request, device: torch.device, *, threads: int = 0, beside: bool = True) -> None:
        """Begin to build the schedule of a key, unless that is under way.

        `threads`: of compilers; 0: as many as they like. `beside` a job the process lets others have the device.
        """
        self.order(key, order_of(key, request, device), threads=threads, beside=beside)

    def order(self, key: str, order: dict[str, Any], *, threads: int = 0, beside: bool = False) -> None:
        """`start` by what `order_of` gave."""
        if self.running(key):
            return
        self.end(key)
        environment = os.environ | ({"TORCHINDUCTOR_COMPILE_THREADS": str(threads)} if threads else {})
        process = subprocess.Popen(  # noqa: S603  # ours
            self._command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
        )
        self._started[key] = process
        line = json.dumps(order | {"home": str(self._home), "beside": beside}).encode() + b"\n"
        self._say(process, line)  # the pipe stays open: with it ends the process

    def running(self, key: str) -> bool:
        """Whether the build of a key, started here, has not ended yet."""
        process = self._started.get(key)
        return process is not None and process.poll() is None

    def alone(self, key: str, *, ends_at_once: bool) -> None:
        """Tell the builder of a key that the job beside it has ended. With `ends_at_once`, `stop` ends the build."""
        if self.running(key):
            self._say(self._started[key], ALONE)
            if ends_at_once:
                self._ends_at_once.add(key)

    def idle(self, key: str) -> None:
        """Mark the build of a key as one for idle times, which `stop` ends."""
        self._ends_at_once.add(key)

    def stop(self) -> list[str]:
        """End the builds that must end when a job comes. Returns the keys of those that still ran."""
        ended = [key for key in sorted(self._ends_at_once) if self.running(key)]
        for key in sorted(self._ends_at_once):
            self.end(key)
        return ended

    @property
    def busy(self) -> list[str]:
        """Keys of the builds that run."""
        return [key for key in self._started if self.running(key)]

    def gave_up(self, key: str) -> bool:
        """Whether a build that was started here has ended without a schedule."""
        process = self._started.get(key)
        return process is not None and bool(process.poll())

    def may_try_again(self, key: str) -> bool:
        """Whether a build that gave up may succeed if it is repeated: it said so, or was killed."""
        process = self._started.get(key)
        code = process.poll() if process is not None else None
        return code is not None and (code == TRY_AGAIN or code < 0)

    def close(self) -> None:
        """End what still runs. Nothing of it is stored, and nobody waits for it."""
        for key in list(self._started):
            self.end(key)

    def _say(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: it is not running, and the job will say so
            process.stdin.write(line)

    def end(self, key: str) -> None:
        """End the build of a key if it runs, and forget it."""
        self._ends_at_once.discard(key)
        process = self._started.pop(key, None)
        if process is not None:
            process.kill()
            process.wait(_PATIENCE_S)
            assert process.stdin is not None
            process.stdin.close()


def order_of(key: str, request: Request, device: torch.device) -> dict[str, Any]:
    """What a builder needs to know, as JSON-able values."""
    return {"key": key, "device": str(device), "threads": torch.get_num_threads(), **request.to_json()}


def request_of_order(order: dict[str, Any]) -> Request:
    """The request in an order, not progressive: the builder waits for the whole build."""
    request = Request.of_json(order)
    return replace(request, schedule=request.schedule.model_copy(update={"progressive": False}))
