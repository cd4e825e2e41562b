"""`NimbleScorer` as Ray Data calls it, without Ray: a class, built once, then called with dicts of arrays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.verify import tolerance_for
from nimble_jobs.errors import UsageError
from nimble_jobs.ray import NimbleScorer
from nimble_jobs.ray.lot import Lot
from nimble_jobs.store import open_store

RECORDS, BATCH = 21, 8


class Two(nn.Module):
    """Two inputs by name, several outputs of which one is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, ids: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        found = self.table(ids).mean(1) * scale[:, None]
        return {"logits": self.head(found), "parts": (found, ids.sum(1)), "kind": "two"}


class Branches(nn.Module):
    """Batch normalisation, so that the mode matters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def branches() -> nn.Module:
    return seeded(Branches)


def records(count: int = RECORDS) -> np.ndarray:
    found = np.random.default_rng(0).normal(size=(count, 6)).astype(np.float32)
    found.setflags(write=False)  # as Ray's arrays are
    return found


@pytest.fixture
def scorer(tmp_path: Path) -> NimbleScorer:
    return NimbleScorer(branches, inputs="x", batch_size=BATCH, device="cpu", home=tmp_path / "home")


def test_it_equals_the_module(scorer: NimbleScorer) -> None:
    """Within the tolerance that schedules are checked by; a whole batch, a partial one, one that is too large, none."""
    module = branches().eval()
    x = records()
    with torch.no_grad():
        expected = module(torch.tensor(x))
    for count in (BATCH, 5, RECORDS, 1):
        made = scorer({"x": x[:count], "id": np.arange(count)})
        assert list(made) == ["id", "output"]
        assert made["output"].dtype == np.float32
        assert made["output"].shape == (count, 4)
        error = relative_norm(torch.from_numpy(made["output"]), expected[:count])
        assert error <= tolerance_for(module, expected)
    assert scorer({"x": x[:0], "id": np.arange(0)})["output"].shape == (0, 4)
    assert scorer.fallback is None


def test_actors_share_a_stored_schedule(scorer: NimbleScorer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first builds and stores it, the next finds it, also for other weights; another shape has its own."""
    with caplog.at_level(logging.WARNING):
        first = scorer({"x": records()})["output"]
    assert "schedule built and stored" in caplog.text
    caplog.clear()
    other = NimbleScorer(branches(), inputs=["x"], batch_size=BATCH, device="cpu", home=tmp_path / "home")
    with caplog.at_level(logging.WARNING):
        second = other({"x": records()})["output"]
    assert "stored schedule" in caplog.text
    assert "built" not in caplog.text
    np.testing.assert_array_equal(first, second)
    with open_store(tmp_path / "home") as store:
        assert len(store.schedules.list()) == 1


def test_a_batch_is_filled_up_with_its_last_record() -> None:
    """Whatever an earlier batch left there could be out of the range of an index."""
    rows = np.arange(8).reshape(4, 2)
    lot = Lot({"x": rows}, 4, torch.device("cpu"), torch.float32)
    lot.fill({"x": rows + 100})
    assert lot.fill({"x": rows[:2]}) == 2
    assert lot.tensors["x"].tolist() == [[0, 1], [2, 3], [2, 3], [2, 3]]


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    """Arguments by name from columns of other names; nested outputs have dotted names, and what is no tensor is left
    out. Doubles become the weights' dtype.
    """
    module = seeded(Two).eval()
    scorer = NimbleScorer(
        lambda: seeded(Two),
        inputs={"ids": "tokens", "scale": "weight"},
        batch_size=4,
        device="cpu",
        home=tmp_path / "home",
        keep=["weight"],
    )
    rng = np.random.default_rng(1)
    batch = {"tokens": rng.integers(0, 10, (6, 5)), "weight": rng.random(6), "name": np.array(list("abcdef"))}
    made = scorer(batch)
    assert list(made) == ["weight", "logits", "parts.0", "parts.1"]
    with torch.no_grad():
        expected = module(torch.tensor(batch["tokens"]), scale=torch.tensor(batch["weight"]).float())
    np.testing.assert_allclose(made["logits"], expected["logits"], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(made["parts.1"], batch["tokens"].sum(1))


def test_one_column_to_keep(tmp_path: Path) -> None:
    """A name alone is one column, as for the inputs."""
    scorer = NimbleScorer(branches, inputs="x", batch_size=4, device="cpu", home=tmp_path / "home", keep="id")
    made = scorer({"x": records(3), "id": np.arange(3), "name": np.array(list("abc"))})
    assert list(made) == ["id", "output"]


def test_half_precision(tmp_path: Path) -> None:
    """bfloat16 in, float32 out, since numpy lacks it."""
    scorer = NimbleScorer(branches().bfloat16(), inputs="x", batch_size=4, device="cpu", home=tmp_path / "home")
    made = scorer({"x": records(3)})["output"]
    assert made.dtype == np.float32
    with torch.no_grad():
        expected = branches().eval()(torch.tensor(records(3)))
    assert relative_norm(torch.from_numpy(made), expected) < 5e-2


def test_a_model_that_no_schedule_can_hold_runs_in_eager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why, and later batches do not change what earlier ones returned."""

    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if float(x.sum()) < 1e9 else -x

    scorer = NimbleScorer(Reads, inputs="x", batch_size=4, device="cpu", home=tmp_path / "home")
    with caplog.at_level(logging.WARNING):
        first = scorer({"x": np.ones((4, 2), np.float32)})["output"]
    scorer({"x": np.zeros((4, 2), np.float32)})
    np.testing.assert_array_equal(first, np.ones((4, 2), np.float32))
    large = np.arange(12, dtype=np.float32).reshape(6, 2)  # cut in two calls of the model, which returns its input
    np.testing.assert_array_equal(scorer({"x": large})["output"], large)
    assert scorer.fallback is not None
    assert f"in eager: {scorer.fallback}" in caplog.text


@pytest.mark.parametrize("dtype", [">i4", ">i8", ">f4", "<i4", ">u1"])
def test_either_byte_order(dtype: str) -> None:
    """Files of other machines may hold numbers the other way round."""
    rows = np.arange(6).reshape(3, 2).astype(dtype)
    lot = Lot({"x": rows}, 4, torch.device("cpu"), torch.float32)
    assert lot.fill({"x": rows}) == 3
    assert lot.tensors["x"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]


def test_bad_arguments_name_what_was_expected(tmp_path: Path) -> None:
    """Each says which one it is."""
    bad: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": 0}, "batch_size: found 0; expected a number of records, at least 1"),
        ({"batch_size": True}, "batch_size: found True"),
        ({"inputs": []}, r"inputs: found \[\]; expected a column"),
        ({"inputs": {"x": 1}}, "inputs: found"),
        ({"inputs": 3}, "inputs: found 3"),
        ({"keep": 3}, "keep: found 3; expected a column or a list of columns"),
        ({"keep": [b"id"]}, "keep: found list; expected a column or a list of columns"),
        ({"model": 3}, "model: found 3; expected a torch.nn.Module, or a function that makes one"),
        ({"model": "resnet18"}, "model: found str; expected a torch.nn.Module, or a function that makes one"),
        ({"device": "cuda:00"}, "device: found 'cuda:00'; expected auto, cpu or cuda"),
        ({"device": "gpu"}, "device: found 'gpu'; expected auto, cpu or cuda"),
        ({"model": lambda: 3}, "model: made a int; expected a torch.nn.Module"),
    ]
    if not torch.cuda.is_available():
        bad.append(({"device": "cuda"}, "sees no GPU; expected num_gpus=1"))
    for given, message in bad:
        whole = {"model": branches, "inputs": "x", "batch_size": 4, "device": "cpu", "home": tmp_path / "home"} | given
        with pytest.raises(UsageError, match=message):
            NimbleScorer(**whole)


def test_bad_batches_name_the_column(scorer: NimbleScorer, tmp_path: Path) -> None:
    """Missing, not numbers, ragged, not numpy, of two lengths; and outputs that are not one row a record."""
    ragged = np.array([np.zeros(2), np.zeros(3)], dtype=object)
    for batch, message in (
        ({"y": records()}, "column 'x': not in the batch; expected one of 'y'"),
        ({"x": np.array(["a"])}, "column 'x': found values of dtype <U1; expected numbers"),
        ({"x": ragged}, "column 'x': found values of dtype object; expected numbers, in records of one shape"),
        ({"x": records().tolist()}, "column 'x': found list; expected batch_format='numpy'"),
        ({"x": records(), "output": np.zeros(RECORDS)}, "keep: found 'output'"),
    ):
        with pytest.raises(UsageError, match=message):
            scorer(batch)
    for batch, kind in ((records(), "ndarray"), (records().tolist(), "list")):
        with pytest.raises(UsageError) as refused:
            scorer(batch)  # type: ignore[arg-type]
        assert str(refused.value) == f"batch: found {kind}; expected a dict of columns, batch_format='numpy'"
    both = NimbleScorer(Two, inputs={"ids": "a", "scale": "b"}, batch_size=4, device="cpu", home=tmp_path / "home")
    with pytest.raises(UsageError, match="column 'b': found 2 records; expected 3"):
        both({"a": np.zeros((3, 2), np.int64), "b": np.ones(2)})

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    lone = NimbleScorer(Mean, inputs="x", batch_size=4, device="cpu", home=tmp_path / "home")
    with pytest.raises(UsageError, match=r"output 'output' has the shape \[\]; expected one row a record, 4 in all"):
        lone({"x": records(3)})
