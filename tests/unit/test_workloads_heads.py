"""What columns are made of: classes and their probability, from scores of any float type."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.errors import DataError, ModelError
from nimble_jobs.workloads.columns import Columns
from nimble_jobs.workloads.heads import Heads


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(["float16", "bfloat16", "float32"]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_classes_and_probabilities_are_those_of_numpy(rows: int, classes: int, dtype: str, seed: int) -> None:
    """Few different scores, so that many are equal: the first class counts."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-3, 3, (rows, classes)).astype(np.float32)).to(getattr(torch, dtype))
    made = Heads.of(["id", "top1", "top5", "probability", "logits"])({"output": logits})
    plain = logits.float().numpy()
    assert made["top1"].tolist() == plain.argmax(axis=1).tolist()
    assert made["top5"].tolist() == np.argsort(-plain, axis=1, kind="stable")[:, :5].tolist()
    shares = np.exp(plain) / np.exp(plain).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(made["probability"].numpy(), shares.max(axis=1), rtol=1e-5)
    assert made["logits"] is logits
    assert "id" not in made


def test_columns_leave_padding_out_and_copy_what_will_be_written_over() -> None:
    """Half precision becomes float32, as few readers know it."""
    columns = Columns(["id", "embedding", "label"])
    x = torch.arange(6.0, dtype=torch.float16).view(3, 2)
    columns.add({"embedding": x}, ["a", "b"], np.array([4, 5]))
    x.zero_()
    columns.add({"embedding": x}, ["c"], np.array([6]))
    found = columns.finish()
    assert found["id"] == ["a", "b", "c"]
    assert np.asarray(found["embedding"]).tolist() == [[0, 1], [2, 3], [0, 0]]
    assert np.asarray(found["embedding"]).dtype == np.float32
    assert np.asarray(found["label"]).tolist() == [4, 5, 6]


def test_what_the_model_does_not_return_is_named() -> None:
    """With what it returns instead."""
    outputs = {"features": torch.zeros(2, 3, 4)}
    with pytest.raises(ModelError, match=r"top1.*\[batch, classes\]; the model returns features \[2, 3, 4\]"):
        Heads.of(["top1"])(outputs)
    with pytest.raises(ModelError, match="the model returns no 'mask'; it returns features"):
        Heads.of(["mask"])(outputs)
    with pytest.raises(ModelError, match="one row per record"):
        Columns(["n"]).add({"n": torch.zeros(())}, ["a"], None)
    with pytest.raises(DataError, match=r"label needs input\.fields\.label"):
        Columns(["label"]).add({}, ["a"], None)
