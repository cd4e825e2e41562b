"""The classes of a training: which output scores them, which number each has, and who is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.trainings import Attempt, metrics, spec_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TWO_OUTPUTS = """
from torch import nn


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 8), nn.Linear(8, 4)

    def forward(self, x):
        features = self.hidden(x.flatten(1)).relu()
        return {"features": features, "logits": self.head(features)}


class Unnamed(Two):
    def forward(self, x):
        return tuple(super().forward(x).values())


def of_second(outputs, y):
    return nn.functional.cross_entropy(outputs[1], y)
"""


def two_outputs(folder: Path, x: np.ndarray, y: np.ndarray) -> None:
    """Records, and models that return features before their scores."""
    (folder / "two.py").write_text(TWO_OUTPUTS)
    np.savez(folder / "two.npz", images=x, labels=y)


def test_accuracy_is_of_the_scores_that_loss_and_validations_take(tmp_path: Path) -> None:
    """Without a change of weights, training and validation on the same records measure the same accuracy."""
    rng = np.random.default_rng(0)
    two_outputs(tmp_path, rng.random((24, 8, 8), dtype=np.float32), rng.integers(0, 4, 24))
    spec = spec_of(
        tmp_path,
        model__source=f"python:{tmp_path}/two.py:Two",
        input__source=str(tmp_path / "two.npz"),
        train__validation={"source": str(tmp_path / "two.npz")},
        train__augment={},
        train__optimizer={"name": "sgd", "lr": 1e-12},
    )
    for on_miss in ("eager", "build"):
        changes = {"on_miss": on_miss, "progressive": False}
        Attempt(spec.model_copy(update={"schedule": spec.schedule.model_copy(update=changes)}), job=on_miss).run()
        for epoch in metrics(tmp_path / "out/net", "epoch"):
            assert epoch["accuracy"] == epoch["val_accuracy"] > 0


def test_no_accuracy_where_several_outputs_may_be_meant(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    two_outputs(tmp_path, rng.random((16, 8, 8), dtype=np.float32), rng.integers(0, 4, 16))
    spec = spec_of(
        tmp_path,
        model__source=f"python:{tmp_path}/two.py:Unnamed",
        input__source=str(tmp_path / "two.npz"),
        schedule={"on_miss": "eager"},
        train__validation=None,
        train__augment={},
        train__loss=f"python:{tmp_path}/two.py:of_second",
    )
    Attempt(spec).run()
    assert all("accuracy" not in epoch for epoch in metrics(tmp_path / "out/net", "epoch"))
