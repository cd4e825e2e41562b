"""Which errors are due to whole numbers that a model was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.errors import JobFailed
from nimble_jobs.spec import loads
from nimble_jobs.workloads.whole_numbers import refusal

SPEC = """\
version: 1
name: n
kind: score
model: {source: torchvision:resnet18}
input: {source: x.npy, format: npy}
output: {path: out}
"""
X = torch.ones(2, 3, dtype=torch.int64)
PICTURE = torch.ones(1, 3, 4, 4, dtype=torch.int64)


def told(error: Exception) -> str | None:
    reader: Any = SimpleNamespace(packing=None, signature=SimpleNamespace(dtype="int64", stored="uint8"))
    return refusal(loads(SPEC, "s.yaml", Path("/nowhere"), check_files=False), reader, error)


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as e:  # noqa: BLE001
        return e
    pytest.fail("it raised nothing")


@pytest.mark.parametrize(
    "call",
    [
        lambda: nn.Linear(3, 2)(X),
        lambda: X @ torch.ones(3, 2),
        lambda: nn.Conv2d(3, 2, 1)(PICTURE),
        lambda: nn.BatchNorm1d(3).eval()(X),
        lambda: nn.LayerNorm(3)(X),
        lambda: functional.gelu(X),
        lambda: X.softmax(1),
        lambda: X.mean(),
        lambda: nn.GRU(3, 2)(X),
        lambda: nn.PReLU()(X),
        lambda: functional.interpolate(PICTURE, scale_factor=2),
    ],
)
def test_named(call: Callable[[], object]) -> None:
    """What torch's layers say of them."""
    found = told(raised(call))
    assert found is not None
    assert found.endswith("if it wants fractions, set input.transform.scale: 1")


@pytest.mark.parametrize(
    "call",
    [
        lambda: functional.mse_loss(torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.int64)).backward(),
        lambda: functional.cross_entropy(torch.ones(2, 3), torch.ones(2)),
        lambda: torch.ones(3).gather(0, torch.ones(2)),
        lambda: functional.embedding(torch.ones(2), torch.ones(2, 2)),
        lambda: torch.ones(3).index_select(0, torch.ones(2)),
        lambda: functional.one_hot(torch.ones(2)),
        lambda: {}["Long"],
    ],
)
def test_labels_and_indexes_are_another_matter(call: Callable[[], object]) -> None:
    assert told(raised(call)) is None


def test_errors_of_others_are_left_alone() -> None:
    class Odd(RuntimeError):
        def __str__(self) -> str:
            raise ValueError

    mismatch = "mat1 and mat2 must have the same dtype, but got Long and Float"
    assert told(RuntimeError(mismatch)) is not None
    for error in (MemoryError(mismatch), JobFailed(mismatch), ValueError("Long sequences are refused"), Odd()):
        assert told(error) is None
