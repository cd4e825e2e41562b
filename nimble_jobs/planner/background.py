"""Schedules that processes of their own build while jobs already run, on something quicker to have.

A build in this process would share its allocator, its streams and the interpreter with the replays of the job; another
process shares only the device. What it measures is disturbed by the job all the same, and so is the job by it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.planner.request import Request
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.spec import ModelSpec, ScheduleSpec

_COMMAND = (sys.executable, "-m", "nimble_jobs.planner.builder")
_PATIENCE_S = 10.0


class Builders:
    """The builds that this process has started. They end with it, but not with the job that wanted them."""

    def __init__(self, home: Path, *, command: Sequence[str] = _COMMAND) -> None:
        self._home = home
        self._command = tuple(command)
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, key: str, request: Request, device: torch.device) -> None:
        """Begin to build the schedule of a key, unless that is under way."""
        if self.running(key):
            return
        self._forget(key)
        order = order_of(key, request, device) | {"home": str(self._home)}
        process = subprocess.Popen(  # noqa: S603  # ours
            self._command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        self._started[key] = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: it is not running, and the job will say so
            process.stdin.write(json.dumps(order).encode() + b"\n")  # the pipe stays open: with it ends the process

    def running(self, key: str) -> bool:
        """Whether the build of a key, started here, has not ended yet."""
        process = self._started.get(key)
        return process is not None and process.poll() is None

    def close(self) -> None:
        """End what still runs. Nothing of it is stored, and nobody waits for it."""
        for key in list(self._started):
            self._forget(key)

    def _forget(self, key: str) -> None:
        process = self._started.pop(key, None)
        if process is not None:
            process.kill()
            process.wait(_PATIENCE_S)
            assert process.stdin is not None
            process.stdin.close()


def order_of(key: str, request: Request, device: torch.device) -> dict[str, Any]:
    """What a builder must be told, as JSON."""
    return {
        "key": key,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "model": request.model.model_dump(mode="json"),
        "shape": list(request.shape),
        "dtype": request.dtype,
        "batch_size": request.batch_size,
        "preprocess": None if request.preprocess is None else request.preprocess.to_json(),
        "schedule": request.schedule.model_dump(mode="json"),
        "embedding": request.embedding,
        "memory_bytes": request.memory_bytes,
        "allowed_python": [str(folder) for folder in request.allowed_python],
    }


def request_of(order: dict[str, Any]) -> Request:
    """The request that an order was made of."""
    return Request(
        model=ModelSpec.model_validate(order["model"]),
        shape=tuple(order["shape"]),
        dtype=order["dtype"],
        batch_size=order["batch_size"],
        preprocess=None if order["preprocess"] is None else Preprocess.of_json(order["preprocess"]),
        schedule=ScheduleSpec.model_validate(order["schedule"]).model_copy(update={"progressive": False}),
        embedding=order["embedding"],
        memory_bytes=order["memory_bytes"],
        allowed_python=tuple(Path(folder) for folder in order["allowed_python"]),
    )
