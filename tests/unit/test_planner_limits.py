"""Whole numbers out of range are found on the host, with their record, before they reach the device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.data import Batch
from nimble_jobs.planner.module.limits import Limits, find_limits

CPU = torch.device("cpu")
SHAPE = (4, 32)


class Tokens(nn.Module):
    """A vocabulary of 100, positions, and a table of two types that no input chooses from."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.types = nn.Embedding(100, 4), nn.Embedding(40, 4), nn.Embedding(2, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        types = torch.zeros_like(x)
        return self.words(x) + self.places(torch.arange(x.shape[1])) + self.types(types)


class Columns(nn.Module):
    """Each column of a row chooses from a table of its own; the last is a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(7, 3), nn.EmbeddingBag(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x[:, 0]) + self.b(x[:, 1:3]) + x[:, 3:]


class Functional(nn.Module):
    """Tables that no Embedding holds, an input of another type, and negative indexes where Python has them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.embedding(x.int(), self.table) + self.table[x]


def test_the_vocabulary_bounds_the_input() -> None:
    """Only tables that are indexed by the input count; the module stays as it was."""
    module = Tokens()
    found = find_limits(module, SHAPE, CPU)
    assert found.low is not None
    assert found.high is not None
    assert (found.low.tolist(), found.high.tolist()) == ([0] * 32, [100] * 32)
    assert found.bounded
    assert Limits(parts={"words": found, "free": Limits()}).bounded
    assert int(module.calls) == 0


def test_the_call_leaves_no_trace() -> None:
    """Weights that a lookup writes, attributes, the mode and the random states are as before."""

    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.calls = nn.Embedding(100, 4, max_norm=0.1), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.words(x) + torch.rand(()) + random.random() + float(np.random.rand())

    module = Restless()
    weight, states = module.words.weight.detach().clone(), (torch.get_rng_state(), random.getstate())
    following = np.random.get_state(legacy=False)
    assert find_limits(module, SHAPE, CPU).high is not None
    assert torch.equal(module.words.weight, weight)
    assert (module.calls, module.training) == (0, True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert repr(np.random.get_state(legacy=False)) == repr(following)


def test_each_column_has_its_own_bound() -> None:
    """A row of categories is bounded column by column; a column that nothing is looked up by is free."""
    found = find_limits(Columns(), (4, 4), CPU)
    assert found.high is not None
    assert found.high[:3].tolist() == [7, 5, 5]
    rows = np.array([[6, 4, 4, 10**6], [6, 5, 0, 0], [0, 0, 0, -5], [-1, 0, 0, 0]])
    assert found.wrong(rows) == {
        1: "holds 5 at [1]; expected 0 to 4: the model looks it up in a table of 5 rows",
        3: "holds -1 at [0]; expected 0 to 6: the model looks it up in a table of 7 rows",
    }


def test_tables_without_an_embedding() -> None:
    """A copy of the input in another type is seen as well; the narrowest bounds hold."""
    found = find_limits(Functional(), SHAPE, CPU)
    assert found.low is not None
    assert found.high is not None
    assert (set(found.low.flat), set(found.high.flat)) == ({0}, {9})


def test_a_model_without_tables_is_not_bounded() -> None:
    """Numbers that are only computed with may be anything."""

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float().sum(1)

    found = find_limits(Sum(), SHAPE, CPU)
    assert found.wrong(np.full((1, 32), 10**9)) == {}
    assert not found.bounded


def test_a_model_that_refuses_random_numbers() -> None:
    """Nothing is known of its input, and why: what it is really given may suit it."""

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    found = find_limits(Picky(), SHAPE, CPU)
    assert found.unchecked == "the model cannot be called with whole numbers below 2: ValueError: no"
    assert found.wrong(np.full((1, 32), 10**9)) == {}


def test_records_out_of_range_are_bad_records() -> None:
    """They leave the batch, with id, place, value and bounds; the others keep their rows."""
    limits = Limits(low=np.zeros(2, dtype=np.int64), high=np.full(2, 10, dtype=np.int64))
    x = np.array([[1, 2], [3, 10], [5, 6]])
    values: Any = {"start": 0, "stop": 3, "indexes": np.array([4, 5, 6]), "ids": ["d", "e", "f"], "bad": ()}
    sifted = limits.sift(Batch(x=x, labels=np.array([0, 1, 2]), **values), lambda i: f"tokens.npy: record {i}")
    assert (sifted.ids, sifted.x.tolist(), sifted.indexes.tolist()) == (["d", "f"], [[1, 2], [5, 6]], [4, 6])
    assert sifted.labels is not None
    assert sifted.labels.tolist() == [0, 2]
    assert [(b.index, b.id, b.reason) for b in sifted.bad] == [
        (5, "e", "tokens.npy: record 5: holds 10 at [1]; expected 0 to 9: the model looks it up in a table of 10 rows")
    ]
