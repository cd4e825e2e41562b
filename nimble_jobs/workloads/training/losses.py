"""Losses: of a model's outputs and a batch's labels, the mean over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nimble_jobs.data.reader import Targets
from nimble_jobs.engine.device import synchronize
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import ModelError
from nimble_jobs.models.from_python import explained, load_function
from nimble_jobs.planner.module.restoring import no_traces
from nimble_jobs.planner.step.request import Loss, StepRequest
from nimble_jobs.spec import TrainSpec, parse_source
from nimble_jobs.workloads.heads import logits_of


def targets(name: str) -> Targets:
    """What a loss wants labels to be."""
    wanted: dict[str, Targets] = {"cross_entropy": "classes", "mse": "numbers", "bce": "shares"}
    return wanted.get(name, "stored")


def make_loss(train: TrainSpec, allowed_python: Sequence[Path], *, smoothing: bool = True) -> Loss:
    """The spec's loss; without `smoothing`, as a validation measures it.

    Raises ModelError for a function of the user's that may not be run or is not there.
    """
    match train.loss:
        case "cross_entropy":
            return CrossEntropy(train.label_smoothing if smoothing else 0.0)
        case "mse":
            return mse
        case "bce":
            return bce
        case text:
            source = parse_source(text)
            function: Loss = load_function(Path(source.target), source.factory or "", allowed_python, "train.loss")
            return function


def try_loss(train: TrainSpec, request: StepRequest, device: torch.device) -> None:
    """Call a loss of the user's own once, with what the model makes of the example; no trace is left.

    Raises ModelError where it returns anything but a zero-dimensional floating tensor that requires grad, and, with its
    file and line, where its code fails.
    """
    if not train.loss.startswith("python:"):
        return
    file = Path(parse_source(train.loss).target).resolve()
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(request.precision)
    with (
        no_traces(request.module, device),
        torch.enable_grad(),
        torch.autocast(device.type, dtype=mixed, enabled=mixed is not None),
    ):
        outputs = request.module(request.x)
        with explained(file, "train.loss"):
            found: Any = request.loss(outputs, request.y)
            synchronize(device)
    if not isinstance(found, torch.Tensor):
        what = f"a {type(found).__name__}"
    elif found.dim() or not found.is_floating_point() or not found.requires_grad:
        grad = "requires" if found.requires_grad else "does not require"
        what = f"a tensor of shape {list(found.shape)}, {found.dtype}, that {grad} grad"
    else:
        return
    raise ModelError(
        f"train.loss: {file} returned {what}; expected the mean loss, a zero-dimensional floating tensor that "
        "requires grad"
    )


class CrossEntropy:
    """Of scores [n, classes] and class numbers [n], with label smoothing."""

    def __init__(self, smoothing: float) -> None:
        self._smoothing = smoothing

    def __call__(self, outputs: Any, y: torch.Tensor) -> torch.Tensor:
        logits = logits_of(flatten_outputs(outputs)).float()
        return nn.functional.cross_entropy(logits, y, label_smoothing=self._smoothing)


def mse(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the model's first output."""
    return nn.functional.mse_loss(_like(outputs, y), y)


def bce(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of scores, which a sigmoid is applied to, and labels from 0 to 1."""
    return nn.functional.binary_cross_entropy_with_logits(_like(outputs, y), y)


def _like(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    found = next(iter(flatten_outputs(outputs).values())).float()
    if found.shape == (*y.shape, 1):
        found = found[..., 0]
    if found.shape != y.shape:
        raise ModelError(
            f"train.loss: the model returns shape {list(found.shape)}; expected {list(y.shape)}, as the labels have"
        )
    return found
