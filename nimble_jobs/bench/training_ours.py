"""Our own training rows: the search gives all candidates; the chosen one is timed here, as everything else is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nimble_jobs.bench.figures import figures
from nimble_jobs.bench.memory import Meter
from nimble_jobs.bench.ours import of_candidates, of_search, options_of
from nimble_jobs.bench.request import CONTIGUOUS, Unit
from nimble_jobs.bench.row import Row, failed
from nimble_jobs.bench.runners import Tensors
from nimble_jobs.bench.settings import Settings
from nimble_jobs.bench.training_cell import TrainingCell
from nimble_jobs.bench.training_systems import weights_on_host
from nimble_jobs.engine.device import synchronize
from nimble_jobs.planner.step.build import TrainingStep, prepare_step


def rows(cell: TrainingCell, unit: Unit, settings: Settings) -> Iterator[Row]:
    """The best single stream, the best on many, and the chosen one.

    The first two are the planner's measurements of candidates that it has let go of; so is `built_replay_us` of the
    chosen one, with which they compare.
    """
    cell.ready(CONTIGUOUS)
    meter = Meter(cell.device)
    meter.start()
    module = cell.module(CONTIGUOUS)  # the search lays its weights out as the winner needs them
    begin = time.perf_counter()
    step = prepare_step(cell.request(module, CONTIGUOUS, options_of(settings)), device=cell.device)
    synchronize(cell.device)
    prepare_s = time.perf_counter() - begin
    if step.schedule is None:
        yield from failed(unit, unit.systems, f"runs in eager: {step.fallback}")
        return
    try:
        ready = of_search(unit, step.schedule, prepare_s, meter)
        yield from of_candidates(unit, step.schedule.candidates, float("inf"))
        runner = Trained(step, module, cell.case.lr)
        yield dataclasses.replace(ready, **figures(cell, runner, CONTIGUOUS, settings, meter))
    finally:
        step.close()


class Trained:
    """A captured step, run as the other systems are."""

    loads_free = False

    def __init__(self, step: TrainingStep, module: nn.Module, lr: float) -> None:
        self._step = step
        self._module = module
        self._lr = lr
        self._weights = weights_on_host(module)
        self._state: dict[str, Any] = {n: t.cpu().clone() for n, t in step.state_dict().items()}

    def load(self, inputs: Tensors) -> None:
        for buffer, given in zip(self._step.inputs.values(), inputs.values(), strict=True):
            buffer.copy_(given, non_blocking=True)

    def run(self) -> None:
        static = self._step.inputs
        self._step.run(static["x"], static["y"], self._lr)

    def outputs(self) -> dict[str, torch.Tensor]:
        return {"loss": self._step.loss}

    def reset(self) -> None:
        self._module.load_state_dict(self._weights)
        self._step.load_state_dict(self._state)

    def close(self) -> None:
        self._step.close()
