"""The classes of a training: which output scores them, which number each has, and who is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from nimble_jobs.data import Reader, open_reader
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from tests.trainings import Attempt, lay_out, metrics, spec_of

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


# ---- held-out labels

KINDS = {
    "numbers": [0, 1, 2, 3],
    "names": ["ant", "bee", "cat", "dog"],
    "fractions": [0.0, 1.0, 2.0, 3.0],
    "pairs": [[0.5, 1.0]] * 4,
}


@pytest.mark.parametrize(
    ("trained", "held", "loss", "told"),
    [
        ("numbers", "names", "cross_entropy", r"names \(ant, bee, cat, dog\); expected whole numbers, as the input's"),
        ("names", "numbers", "cross_entropy", r"whole numbers; expected names \(ant, bee, cat, dog\), as the input's"),
        ("numbers", "fractions", "python", "floating-point numbers; expected whole numbers, as the input's"),
        ("fractions", "pairs", "mse", "2 floating-point numbers for each record; expected floating-point numbers, as"),
    ],
)
def test_held_out_labels_of_another_kind_are_refused(
    trained: str, held: str, loss: str, told: str, tmp_path: Path
) -> None:
    """Names and numbers of their own would be taken for other classes."""
    lay_out(tmp_path)
    (tmp_path / "loss.py").write_text("from torch import nn\n\n\nof = nn.functional.cross_entropy\n")
    for name, kind in (("train", trained), ("held-out", held)):
        np.savez(tmp_path / f"{name}.npz", images=np.zeros((8, 8, 8), np.uint8), labels=np.array(KINDS[kind] * 2))
    spec = spec_of(tmp_path, train__loss=f"python:{tmp_path}/loss.py:of" if loss == "python" else loss)
    with pytest.raises(DataError, match=rf"train\.validation\.source: labels are {told}"):
        Attempt(spec).run()


def test_whole_numbers_are_targets_beside_fractions(tmp_path: Path) -> None:
    """Of a loss of one's own, too, whose labels are what the training's file holds."""
    lay_out(tmp_path)
    rng = np.random.default_rng(0)
    for name, y in (("train", [0.5, -1.5]), ("held-out", [1, -2])):
        np.savez(tmp_path / f"{name}.npz", x=rng.random((8, 3), dtype=np.float32), y=np.array(y * 4))
    spec = spec_of(
        tmp_path,
        model__source=f"python:{tmp_path}/model.py:line",
        input__fields={"x": "x", "label": "y"},
        schedule={"on_miss": "eager"},
        run={"error_threshold": 0},
        train__loss=f"python:{tmp_path}/model.py:absolute",
        train__augment={},
        train__epochs=1,
        train__optimizer={"name": "sgd", "lr": 1e-12},
        train__lr_schedule={"name": "constant"},
    )
    Attempt(spec).run()
    (epoch,) = metrics(tmp_path / "out/net", "epoch")
    weights = load_file(tmp_path / "out/net/model.safetensors")
    with np.load(tmp_path / "held-out.npz") as held:
        made = held["x"] @ weights["weight"].numpy().T[:, 0] + weights["bias"].numpy()
        assert epoch["val_loss"] == pytest.approx(float(np.abs(made - held["y"]).mean()), rel=1e-5)


def labels_of(folder: Path, labels: list[str], names: tuple[str, ...] | None = None) -> Reader:
    """A table with these labels as text."""
    rows = [f"{i}.5,{label}" for i, label in enumerate(labels)]
    (folder / "labels.csv").write_text("\n".join(["x,y", *rows]))
    fields = FieldsSpec(x="x", label="y")
    return open_reader(InputSpec(source=str(folder / "labels.csv"), format="csv", fields=fields), label_names=names)


@pytest.mark.parametrize(
    ("labels", "names", "values", "bad", "found"),
    [
        (["0.0", "nan", "2.0"], None, [0, 0, 2], {1: "label is missing"}, None),
        (["0", "NaN", "2"], None, [0, 0, 2], {1: "label is missing"}, None),
        (["cat", "nan", "ant"], None, [1, 2, 0], {}, ("ant", "cat", "nan")),
        (["nan", "nan"], None, [0, 0], {}, ("nan",)),
        (["0", "1"], ("ant", "bee"), [0, 1], {}, None),
        (["0.0", "1.0"], ("0", "1"), [0, 1], {}, None),
        (["1", "0"], ("0", "1"), [1, 0], {}, ("0", "1")),
        (["bee", "1"], ("ant", "bee"), [1, 0], {1: "label is '1'; expected one of the 2 known names"}, ("ant", "bee")),
    ],
)
def test_text_that_is_numbers(
    labels: list[str],
    names: tuple[str, ...] | None,
    values: list[int],
    bad: dict[int, str],
    found: tuple[str, ...] | None,
    tmp_path: Path,
) -> None:
    """NaN among numbers is a missing label, and numbers are no names that a training has not seen."""
    with labels_of(tmp_path, labels, names) as reader:
        (batch,) = reader.batches(batch_size=9)
        given = reader.labels(np.arange(reader.total))
        assert given is not None
        assert (given.tolist(), reader.label_names) == (values, found)
        assert {record.index: record.reason.partition(": ")[2] for record in batch.bad} == bad


def test_no_good_record_to_validate_on_says_why(tmp_path: Path) -> None:
    lay_out(tmp_path)
    for name, labels in (("train", ["ant", "bee"]), ("held-out", ["cow", "dog"])):
        np.savez(tmp_path / f"{name}.npz", images=np.zeros((8, 8, 8), np.uint8), labels=np.array(labels * 4))
    spec = spec_of(tmp_path, schedule={"on_miss": "eager"}, run={"error_threshold": -1}, train__lr_schedule={})
    told = "no good record to validate on, the first is 0: label is 'cow'; expected one of the 2 known names; expected"
    with pytest.raises(DataError, match=f"train.validation.source: {told}"):
        Attempt(spec).run()
