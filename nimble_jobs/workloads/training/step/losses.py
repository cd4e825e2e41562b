"""Losses: the mean over a batch, from the model's outputs and the batch's labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nimble_jobs.data.labels import Targets
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import ModelError
from nimble_jobs.models.from_python import load_function
from nimble_jobs.planner.step.request import Loss
from nimble_jobs.spec import TrainSpec, parse_source
from nimble_jobs.workloads.heads import logits_of
from nimble_jobs.workloads.training.step.own_loss import OwnLoss


def targets(name: str) -> Targets:
    """What labels a loss takes."""
    wanted: dict[str, Targets] = {"cross_entropy": "classes", "mse": "numbers", "bce": "shares"}
    return wanted.get(name, "stored")


def loss_name(train: TrainSpec) -> str:
    """What a step records as its loss, in words."""
    return f"{train.loss}, label smoothing {train.label_smoothing:g}" if train.label_smoothing else train.loss


def takes_names(name: str) -> bool:
    """Whether a loss finds what it needs in the model's outputs by name; a function of the user's may not."""
    return not name.startswith("python:")


def make_loss(train: TrainSpec, allowed_python: Sequence[Path], *, smoothing: bool = True) -> Loss:
    """The spec's loss. Validations measure it without `smoothing`.

    Raises ModelError if the loss is a function of the user's that does not exist or may not run.
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
            return OwnLoss(load_function(Path(source.target), source.factory or "", allowed_python, "train.loss"))


class CrossEntropy:
    """Cross-entropy of scores [n, classes] and class numbers [n], with label smoothing."""

    def __init__(self, smoothing: float) -> None:
        self._smoothing = smoothing

    def __call__(self, outputs: Any, y: torch.Tensor) -> torch.Tensor:
        logits = logits_of(flatten_outputs(outputs)).float()
        return nn.functional.cross_entropy(logits, y, label_smoothing=self._smoothing)


def mse(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the model's first output."""
    return nn.functional.mse_loss(_like(outputs, y), y)


def bce(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of the sigmoid of the model's first output, with labels from 0 to 1."""
    return nn.functional.binary_cross_entropy_with_logits(_like(outputs, y), y)


def _like(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    """The first output in the shape of the labels. Raises ModelError."""
    first = next(iter(flatten_outputs(outputs).values())).float()
    if first.shape == (*y.shape, 1):
        first = first[..., 0]
    if first.shape != y.shape:
        raise ModelError(
            f"train.loss: the model returns shape {list(first.shape)}; expected {list(y.shape)}, the labels' shape"
        )
    return first
