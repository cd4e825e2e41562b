"""Loss and accuracy on held-out records."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import DataError
from nimble_jobs.planner.step.request import Loss
from nimble_jobs.workloads.context import Stop
from nimble_jobs.workloads.heads import logits_of
from nimble_jobs.workloads.training.feed import DeviceBatch
from nimble_jobs.workloads.training.forward import Forward
from nimble_jobs.workloads.training.setup import autocast, evaluating


def validate(
    module: nn.Module,
    forward: Forward,
    batches: Iterable[DeviceBatch],
    loss: Loss,
    *,
    dtype: str,
    classes: int | None,
    device: torch.device,
    stop: Callable[[], Stop] = lambda: Stop.GO,
) -> dict[str, float] | Stop:
    """val_loss and, for classes, val_accuracy: means over all good records, in evaluation mode.

    Or how it was told to stop, which it asks before each batch. Raises DataError where there is no good record.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    seen = 0
    with evaluating(module):
        for batch in batches:
            if (wish := stop()) is not Stop.GO:
                return wish
            with autocast(dtype, device):
                outputs = forward(batch.x)
                loss_sum += loss(outputs, batch.y).double() * len(batch.y)
            if classes is not None:
                right += (logits_of(flatten_outputs(outputs)).argmax(1) == batch.y).sum()
            seen += len(batch.y)
    if not seen:
        raise DataError("train.validation.source: no good record to validate on; expected at least one")
    measured = {"val_loss": float(loss_sum) / seen}
    if classes is not None:
        measured["val_accuracy"] = int(right) / seen
    return measured
