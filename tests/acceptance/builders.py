"""A process that wants the schedule of one small model, as a worker's child does.

`python builders.py HOME MODEL HOW`: prints one JSON line. HOW: `slow` takes a second to build, `hang` never ends the
build, `hang-saving` never saves it, though its artifacts are there. The file `builds` beside the model gets a line, the
process id, for each build that begins; the file `hangs` says that one will not go on, `waits-PID` that a process waits.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from nimble_jobs import planner
from nimble_jobs.planner.forward.build import build_schedule
from nimble_jobs.planner.keys.request import Request
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import Wait, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents
from tests.one_batch import outputs_of

CODE = """\
import torch


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3))) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def make():
    return Tiny()
"""


def request(model: Path) -> Request:
    """Of eager's own kernels, whose bits are compared."""
    return Request(
        model=ModelSpec(source=f"python:{model}:make"),
        shape=(1, 8, 8),
        dtype="float32",
        batch_size=2,
        schedule=ScheduleSpec(fuse="off"),
        allowed_python=(model.parent,),
    )


def example() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 64).reshape(2, 1, 8, 8)


def digest(outputs: torch.Tensor) -> str:
    return hashlib.sha256(outputs.contiguous().numpy().tobytes()).hexdigest()


def main(home: str, model: str, how: str) -> None:
    def build(*args: Any, **named: Any) -> Any:
        with (Path(model).parent / "builds").open("a") as file:
            file.write(f"{os.getpid()}\n")
        if how == "hang":
            hang()
        time.sleep(1)
        return build_schedule(*args, **named)

    def hang(*_args: Any, **_named: Any) -> None:
        (Path(model).parent / "hangs").touch()
        time.sleep(600)

    importlib.import_module("nimble_jobs.planner.jobs.building").build_schedule = build  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    waits: list[float] = []

    def wait(found: Wait) -> None:
        waits.append(found.waited_s)
        (Path(model).parent / f"waits-{os.getpid()}").touch()

    with open_store(resolve(home)) as store:
        if how == "hang-saving":
            store.schedules.save_all = hang  # type: ignore[method-assign]
        made = planner.prepare(
            request(Path(model)),
            device=torch.device("cpu"),
            store=store,
            residents=Residents(2**30),
            waiting=wait,
        )
        outputs = outputs_of(made.loaded, example())
    summary = made.summary()
    print(json.dumps(summary | {"sha256": digest(outputs["output"]), "waited": bool(waits)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
