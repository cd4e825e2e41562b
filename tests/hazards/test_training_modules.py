"""Modules that try to have a training step replayed wrongly: each is as in eager over five steps, or refused."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.hazards.training import Draw, Verdict, judge

Body = Callable[[Any, torch.Tensor], Any]


class Small(nn.Module):
    """Two layers with something between them."""

    def __init__(self, body: Body, **attributes: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.body = body
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value.clone())
            else:
                setattr(self, name, value() if isinstance(value, type) and issubclass(value, nn.Module) else value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


class Custom(torch.autograd.Function):
    """Doubles, and has a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 2


class ItemInBackward(Custom):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * (2 if g.sum().item() > 0 else 3)


class ListInBackward(Custom):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * (2 if sum(x.flatten().tolist()) > 0 else 3)


class NumpyInBackward(Custom):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * (2 if np.asarray(x.detach()).sum() > 0 else 3)


class RandomInBackward(Custom):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * random.random()


class OftenZero(Custom):
    """Gives no gradient for most batches."""

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 2 if random.random() < 0.1 else None


class OutOfPlace(Custom):
    """A backward that writes into the gradient that it is given."""

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g.clone().mul_(2)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 3, sparse=True)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.rows(i)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(3, 4, batch_first=True, **options)
        self.head = nn.LazyLinear(2)
        self.head(self.recurrent(torch.zeros(1, 2, 3))[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0])


class Packed(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, torch.tensor([4, 3]), batch_first=True)
        return self.head(pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0])


class Colliding(nn.Module):
    """Parameters that are called like inputs and gradients."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, nn.ParameterList([nn.Parameter(torch.full((3,), 3.0))]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (getattr(self, self.name)[0] * x * 7).sum(1)


class OutputNames(nn.Module):
    """Outputs that are called like tensors of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.norm(x) * self.weight
        return {"grad.weight": y * 2, "weight": y.exp(), "norm.running_mean": y.sin(), "grad.grad.weight": y.cos()}


class Counts(nn.Module):
    """A counter of calls beside it, read or not."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.n = 0
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.layer(x) * (self.n if self.reads else 1)


class Anneals(nn.Module):
    """A temperature that falls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.schedule = {"temperature": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.schedule["temperature"] = max(0.1, self.schedule["temperature"] * 0.9)
        return self.layer(x) / self.schedule["temperature"]


class Grows(nn.Module):
    """A list that each call lengthens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return self.layer(x) * len(self.seen)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) + self.first(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Hidden(nn.Module):
    """A trained tensor that is no parameter."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        tensor = torch.ones(3, requires_grad=True)
        self.scale = [tensor] if listed else tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale[0] if isinstance(self.scale, list) else self.scale
        return self.layer(x) * scale

    def named_hidden(self) -> torch.Tensor:
        return self.scale[0] if isinstance(self.scale, list) else self.scale


class MovingBuffer(nn.Module):
    """A moving average kept in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.way = way
        self.register_buffer("average", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = 0.9 * self.average + 0.1 * x.detach().mean(0)
        if self.way == "data":
            self.average.data = new
        elif self.way == "assigned":
            self.average = new
        elif self.way == "set":
            with torch.no_grad():
                self.average.set_(new)
        elif self.way == "swapped":
            self._buffers["average"] = new
        else:
            self.average.copy_(new)
        return self.layer(x) * self.average


class MovingParameter(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight = self.layer.weight
            if self.way == "data":
                weight.data = weight.data * 0.9
            elif self.way == "in place":
                weight.mul_(0.9)
            else:
                self.layer.weight = nn.Parameter(weight * 0.9)
        return self.layer(x)


def branch(condition: Callable[[torch.Tensor], Any]) -> Body:
    """One of two layers, by a value that the host reads."""
    return lambda m, x: m.first(x) if condition(x) else m.second(x)


def _reentrant(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.second(checkpoint(m.first, x.requires_grad_(), use_reentrant=True))


def _reentrant_later(m: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(m.second, m.first(x), use_reentrant=True)


def _reentrant_without_gradient(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.second(checkpoint(m.first, x, use_reentrant=True))


def _non_reentrant(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.second(checkpoint(lambda t: m.first(t).sin().cos(), x, use_reentrant=False))


def _dropping(m: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    def block(t: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(m.first(t), 0.5).sin()

    return m.second(checkpoint(block, m.second(x), **options))


def _dropping_twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = checkpoint(lambda t: nn.functional.dropout(m.first(t), 0.5).tanh(), x, use_reentrant=False)
        x = nn.functional.dropout(m.second(x), 0.1)
    return x


def _nested(m: Any, x: torch.Tensor) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(m.first(t), 0.3).exp()

    def outer(t: torch.Tensor) -> torch.Tensor:
        return m.second(checkpoint(inner, t, use_reentrant=False)).tanh()

    return checkpoint(outer, x, use_reentrant=False)


def _hooked(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.first(x)
    y.register_hook(lambda g: g * 2)
    return m.second(y)


def _watched(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.first(x)
    y.register_hook(lambda g: m.log.append(1))
    return m.second(y)


def _saving(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        y = m.first(x).sin()
    return m.second(y)


def _stochastic_depth(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x if random.random() < 0.1 else m.second(m.first(x))


def _numpy_random(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.first(x) if np.random.rand() < 0.1 else m.second(x)


def _own_random(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.first(x) if m.draws.random() < 0.1 else m.second(x)


def _cached_weight(m: Any, x: torch.Tensor) -> torch.Tensor:
    version = m.first.weight._version
    if m.cache is None or m.cache[0] != version:
        m.cache = (version, m.first.weight.detach().t().contiguous())
    return m.second(x @ m.cache[1])


def _sometimes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.turn[0] += 1
    return m.first(x) if m.turn[0] % 3 else m.second(x)


def _sums(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.total.add_(x.detach().sum(0))
    return m.first(x) * (1 + m.total.tanh())


def _counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n += 1
    return m.first(x) / m.n


def _penalised(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = m.second(m.first(x).tanh())
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.sum() + g.square().sum()


def _clipped(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.first(x)
    norm = float(y.detach().norm())
    return m.second(y * min(1.0, 1.0 / norm))


def _vmapped(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: m.second(m.first(row).sin()))(x)


def _jacobian(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: m.first(row).sin().sum()))(x) + m.second(x)


def _retained(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.first(x)
    y.retain_grad()
    return m.second(y)


def _written_input(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.second(m.first(x).add_(1).relu_())


def _frozen_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = m.first(x)
    return m.second(y)


def _partly_detached(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = m.first(x)
    return m.second(y.detach()), y.exp()


def _evaluates_a_part(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.norm.eval()
    y = m.norm(m.first(x))
    m.norm.train()
    return m.norm(y)


def _drops(m: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(m.first(x), 0.5, training=m.training)


CASES: dict[str, Any] = {
    "hook on an intermediate": lambda: Small(_hooked),
    "hook that only watches": lambda: Small(_watched, log=[]),
    "retained gradient": lambda: Small(_retained),
    "saved-tensor hooks inside": lambda: Small(_saving),
    "reentrant checkpoint first": lambda: Small(_reentrant),
    "reentrant checkpoint later": lambda: Small(_reentrant_later),
    "reentrant checkpoint of what needs no gradient": lambda: Small(_reentrant_without_gradient),
    "reentrant checkpoint with dropout": lambda: Small(functools.partial(_dropping, use_reentrant=True)),
    "checkpoint": lambda: Small(_non_reentrant),
    "checkpoint with dropout": lambda: Small(functools.partial(_dropping, use_reentrant=False)),
    "checkpoint that draws anew": lambda: Small(
        functools.partial(_dropping, use_reentrant=False, preserve_rng_state=False)
    ),
    "several checkpoints with dropout": lambda: Small(_dropping_twice),
    "nested checkpoints with dropout": lambda: Small(_nested),
    "item in a branch": lambda: Small(branch(lambda x: x.sum().item() > 0)),
    "bool in a branch": lambda: Small(branch(lambda x: x.sum() > 0)),
    "tolist in a branch": lambda: Small(branch(lambda x: sum(x.flatten().tolist()) > 0)),
    "numpy in a branch": lambda: Small(branch(lambda x: x.detach().numpy().sum() > 0)),
    "asarray in a branch": lambda: Small(branch(lambda x: np.asarray(x.detach()).sum() > 0)),
    "dlpack in a branch": lambda: Small(branch(lambda x: np.from_dlpack(x.detach()).sum() > 0)),
    "item in a backward": lambda: Small(lambda m, x: ItemInBackward.apply(m.first(x))),
    "tolist in a backward": lambda: Small(lambda m, x: ListInBackward.apply(m.first(x))),
    "numpy in a backward": lambda: Small(lambda m, x: NumpyInBackward.apply(m.first(x))),
    "Python's random in a backward": lambda: Small(lambda m, x: RandomInBackward.apply(m.first(x))),
    "a gradient that comes and goes": lambda: Small(lambda m, x: OftenZero.apply(m.first(x)) + m.second(x)),
    "backward in place": lambda: Small(lambda m, x: OutOfPlace.apply(m.first(x))),
    "Python's random": lambda: Small(_stochastic_depth),
    "numpy's random": lambda: Small(_numpy_random),
    "a random state of its own": lambda: Small(_own_random, draws=random.Random(1)),
    "numpy's generator of its own": lambda: Small(_own_random, draws=np.random.default_rng(1)),
    "counter in Python": lambda: Counts(reads=True),
    "counter that nothing reads": lambda: Counts(reads=False),
    "annealing in a dict": Anneals,
    "a growing list": Grows,
    "a turn in a list": lambda: Small(_sometimes, turn=[0]),
    "counter in a buffer": lambda: Small(_counted, n=torch.ones(())),
    "sums in a buffer": lambda: Small(_sums, total=torch.zeros(3)),
    "cached weight": lambda: Small(_cached_weight, cache=None),
    "buffer set through data": lambda: MovingBuffer("data"),
    "buffer assigned": lambda: MovingBuffer("assigned"),
    "buffer set": lambda: MovingBuffer("set"),
    "buffer swapped": lambda: MovingBuffer("swapped"),
    "buffer written": lambda: MovingBuffer("in place"),
    "parameter set through data": lambda: MovingParameter("data"),
    "parameter written": lambda: MovingParameter("in place"),
    "parameter assigned": lambda: MovingParameter("assigned"),
    "second derivatives inside": lambda: Small(_penalised),
    "clipped by a host read": lambda: Small(_clipped),
    "vmap inside": lambda: Small(_vmapped),
    "a Jacobian inside": lambda: Small(_jacobian),
    "in place on intermediates": lambda: Small(_written_input),
    "a part without gradients": lambda: Small(_frozen_inside),
    "a detached part": lambda: Small(_partly_detached),
    "norm in both modes": lambda: Small(_evaluates_a_part, norm=nn.BatchNorm1d(3)),
    "dropout by the mode": lambda: Small(_drops),
    "cumulative norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)),
    "norm without statistics": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)),
    "tied weights": Tied,
    "complex weights": Complex,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "a hidden leaf": lambda: Hidden(listed=False),
    "a leaf in a list": lambda: Hidden(listed=True),
    "outputs named like gradients": OutputNames,
    "inverse": lambda: Small(lambda m, x: torch.linalg.inv(m.first(x)[:3] + 3 * torch.eye(3))),
    "solve": lambda: Small(lambda m, x: torch.linalg.solve(m.first.weight + 3 * torch.eye(3), m.second(x).t())),
    "cholesky": lambda: Small(lambda m, x: torch.linalg.cholesky(m.first.weight @ m.first.weight.t() + torch.eye(3))),
    "svd": lambda: Small(lambda m, x: torch.linalg.svdvals(m.first(x))),
    "a power of the depth": lambda: Small(lambda m, x: m.first(x) * math.pow(2, m.depth), depth=2),
    "gaussian noise": lambda: Small(lambda m, x: m.first(x) + torch.randn_like(x)),
    "random permutation": lambda: Small(lambda m, x: m.first(x)[torch.randperm(4)]),
    "unused layer": lambda: Small(lambda m, x: m.first(x)),
    "one layer twice": lambda: Small(lambda m, x: m.first(m.first(x))),
    "a max norm": lambda: Small(
        lambda m, x: m.first(m.rows(x.abs().long().clamp(max=4)).sum(1)), rows=nn.Embedding(5, 3, max_norm=0.5)
    ),
}


# What a schedule can hold: no needless refusal.
RECORDED = {
    "reentrant checkpoint later",
    "reentrant checkpoint with dropout",
    "nested checkpoints with dropout",
    "checkpoint",
    "checkpoint with dropout",
    "several checkpoints with dropout",
    "counter in a buffer",
    "sums in a buffer",
    "tied weights",
    "spectral norm",
    "inverse",
    "solve",
    "cholesky",
    "gaussian noise",
    "outputs named like gradients",
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_is_as_in_eager_or_refused(name: str) -> None:
    """Outputs, gradients, state, attributes and random states of five steps; a refusal leaves nothing behind."""
    verdict = judge(CASES[name])
    assert name not in RECORDED or verdict == Verdict(kind="equal")


OTHERS: dict[str, tuple[Any, Draw, bool]] = {
    "args": (lambda: Colliding("args"), lambda: torch.randn(4, 3), True),
    "kwargs": (lambda: Colliding("kwargs"), lambda: ((), {"x": torch.randn(4, 3)}), True),
    "sparse gradients": (Sparse, lambda: torch.randint(0, 5, (4,)), False),
    "LSTM": (lambda: Recurrent(nn.LSTM), lambda: torch.randn(2, 4, 3), False),
    "LSTM of two layers": (
        lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2, bidirectional=True),
        lambda: torch.randn(2, 4, 3),
        True,
    ),
    "LSTM with a projection": (lambda: Recurrent(nn.LSTM, proj_size=2), lambda: torch.randn(2, 4, 3), False),
    "GRU": (lambda: Recurrent(nn.GRU), lambda: torch.randn(2, 4, 3), True),
    "RNN": (lambda: Recurrent(nn.RNN), lambda: torch.randn(2, 4, 3), False),
    "packed LSTM": (lambda: Packed(nn.LSTM), lambda: torch.randn(2, 4, 3), False),
    "input that requires grad": (lambda: Small(_non_reentrant), lambda: torch.randn(4, 3), True),
    "reentrant over an input that requires grad": (lambda: Small(_reentrant), lambda: torch.randn(4, 3), True),
    "an encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        lambda: torch.randn(2, 3, 4),
        True,
    ),
}


OTHERS_RECORDED = {"args", "kwargs", "LSTM", "LSTM of two layers", "packed LSTM", "GRU", "RNN"}


@pytest.mark.parametrize("name", OTHERS)
def test_a_training_of_other_inputs_is_as_in_eager_or_refused(name: str) -> None:
    """Inputs that require grad, or are sequences or indices."""
    make, draw, grad = OTHERS[name]
    verdict = judge(make, draw, grad=grad)
    assert name not in OTHERS_RECORDED or verdict == Verdict(kind="equal")


def test_the_lists_name_cases() -> None:
    """A case that is renamed is not forgotten."""
    assert set(CASES) >= RECORDED
    assert set(OTHERS) >= OTHERS_RECORDED
