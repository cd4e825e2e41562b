"""Record a whole training step, from the batch to the updated weights, as one program.

Everything that it reads and writes is state. Names of state outside of the module begin with @, such as the batch's and
the learning rate's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from nimble_jobs.engine.host_reads import watching
from nimble_jobs.engine.inductor import compile_module, kernels_to, refusing_compilers
from nimble_jobs.engine.private.operators import add_
from nimble_jobs.engine.recompute import draw_once
from nimble_jobs.engine.record import Recording, held, module_names, recorder_for, refusing
from nimble_jobs.engine.recorder import Recorder
from nimble_jobs.errors import CannotRecord
from nimble_jobs.graph.collectives import hoisted
from nimble_jobs.graph.split import split_convolutions
from nimble_jobs.kernel_switches import NOTHING, Kernel, Without
from nimble_jobs.kernels.depthwise import with_own_depthwise
from nimble_jobs.planner.sources.source import Kernels
from nimble_jobs.planner.step.eager import Arithmetic, state_of_step
from nimble_jobs.schedule import Program

_WARM_UP_STEPS = 2  # the first compiles, the second runs what was compiled


def objective_with(arithmetic: Arithmetic, kernels: Kernels) -> Callable[..., Any]:
    """The objective itself, or compiled by Inductor, drawing the same random numbers."""
    if kernels == "eager":
        return arithmetic.objective
    return compile_module(arithmetic.objective, max_autotune=kernels == "max-autotune", eager_random=True)


def record_step(
    arithmetic: Arithmetic,
    inputs: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    objective: Callable[..., Any],
    compiled: bool,
    update: bool,
    accumulate: bool = False,
    without: Without = NOTHING,
    like: Program | None = None,
) -> Recording:
    """Record one batch, x and y of `inputs`, with or without the update of the weights. Outputs: loss, correct and, if
    the step has them, found_inf and grad_norm.

    This trains on the batch, with `compiled` several times. `accumulate`: as in `engine.step.differentiate`. Our own
    kernels in `without` are left out. With `like`, an earlier recording, nothing is measured. Raises CannotRecord as
    `engine.record.record` does, and if the backward pass draws random numbers.
    """
    with refusing_compilers("the backward pass") if compiled else contextlib.nullcontext():
        found = _recorded(
            arithmetic, inputs, device, objective, compiled=compiled, update=update, accumulate=accumulate
        )
        split = replace(found, program=hoisted(split_convolutions(found.program)))
        own = compiled and Kernel.DEPTHWISE not in without
        return with_own_depthwise(split, device, like=like) if own else split


def _recorded(
    arithmetic: Arithmetic,
    inputs: Mapping[str, torch.Tensor],
    device: torch.device,
    objective: Callable[..., Any],
    *,
    compiled: bool,
    update: bool,
    accumulate: bool,
) -> Recording:
    recorder = recorder_for({}, state_of_step(arithmetic, inputs), device)

    def in_eager() -> None:
        with torch.enable_grad():
            (loss, _), _ = arithmetic.forward(objective, inputs["x"], inputs["y"])
            arithmetic.gradients(loss, arithmetic.start_gradient(loss.detach()), accumulate=accumulate)

    for _ in range(_WARM_UP_STEPS if compiled else 0):
        in_eager()
    with refusing(in_eager), held(arithmetic.objective.module, arithmetic.tensors, recorder):
        outputs, forward = _watched(
            recorder, arithmetic, inputs, objective, compiled=compiled, update=update, accumulate=accumulate
        )
    recording = recorder.finish({}, outputs)
    program, _ = draw_once(recording.program, forward, recorder.draws)
    return replace(recording, program=program)


def _watched(
    recorder: Recorder,
    arithmetic: Arithmetic,
    inputs: Mapping[str, torch.Tensor],
    objective: Callable[..., Any],
    *,
    compiled: bool,
    update: bool,
    accumulate: bool,
) -> tuple[dict[str, torch.Tensor], int]:
    """Train on the batch while the recorder looks on: the outputs, and how many tasks come before the backward pass."""
    with torch.enable_grad():
        with (
            module_names(None if compiled else arithmetic.objective.module, recorder),
            kernels_to(recorder) if compiled else watching(recorder),
        ):
            (loss, correct), counters = arithmetic.forward(objective, inputs["x"], inputs["y"])
        if not loss.requires_grad:
            raise CannotRecord("the loss does not depend on a parameter that requires grad")
        recorder.path = ["backward"]
        with recorder:
            start = arithmetic.start_gradient(loss.detach())
            if counters:
                add_(counters, 1)
        forward, _ = recorder.counts
        with kernels_to(recorder) if compiled else watching(recorder):
            found = arithmetic.gradients(loss, start, accumulate=accumulate)
    recorder.path = ["update"]
    with recorder:
        done = arithmetic.finish(found, update=update)
        whole_loss, whole_correct = arithmetic.figures(loss, correct)
        outputs = {"loss": whole_loss, "correct": whole_correct}
        if done is not None and done.found_inf is not None:
            outputs["found_inf"] = done.found_inf
        if done is not None and done.grad_norm is not None:
            outputs["grad_norm"] = done.grad_norm
        with torch.no_grad():
            outputs = recorder.own(outputs)
    return outputs, forward
