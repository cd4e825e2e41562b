"""How far a training has come: everything that a checkpoint must know beside tensors and random states."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from nimble_jobs.spec import CheckpointSpec, EarlyStoppingSpec


@dataclass(kw_only=True)
class Progress:
    """A training's place. Written to checkpoints as it is."""

    step: int = 0  # steps of the optimizer that are done
    epoch: int = 1  # the one under way
    batch: int = 0  # batches of it that were taken
    bad: int = 0  # bad records among them
    bad_records: dict[str, list[str]] = field(default_factory=dict)  # of all epochs: position -> id, reason
    finished: bool = False
    epochs: list[dict[str, Any]] = field(default_factory=list)  # metrics of the epochs that are done
    best: dict[str, Any] | None = None  # step, epoch, metric and value of the best epoch
    goal: float | None = None  # best value that early stopping has seen
    waited: int = 0  # measurements since then

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Progress:
        return cls(**found)

    def note(
        self, metrics: dict[str, Any], checkpoint: CheckpointSpec | None, stopping: EarlyStoppingSpec | None
    ) -> bool:
        """Take the metrics of an epoch that ended. True where it is the best one so far."""
        self.epochs.append(metrics)
        improved = False
        if checkpoint is not None and checkpoint.best is not None and checkpoint.best in metrics:
            name, value = checkpoint.best, metrics[checkpoint.best]
            improved = better(name, value, self.best["value"] if self.best else None)
            if improved:
                self.best = {"step": self.step, "epoch": metrics["epoch"], "metric": name, "value": value}
        if stopping is not None and stopping.metric in metrics:
            value = metrics[stopping.metric]
            if better(stopping.metric, value, self.goal, stopping.min_delta):
                self.goal, self.waited = value, 0
            else:
                self.waited += 1
                self.finished = self.waited >= stopping.patience
        return improved


def better(metric: str, value: float | None, than: float | None, by: float = 0.0) -> bool:
    """Is a measure an improvement: more accuracy, less loss? Nothing is better than NaN, and NaN than nothing."""
    if value is None or math.isnan(value):
        return False
    if than is None:
        return True
    gain = value - than if metric.endswith("accuracy") else than - value
    return gain > by
