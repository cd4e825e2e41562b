"""What the ranks of a training sum over all of them: gradients in flat buckets, figures, and running statistics.

Each rank weighs what it computes with its share of the batch's records, so sums are means over the whole batch. The
order of all sums is the same on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from nimble_jobs.engine.collectives import all_reduce_
from nimble_jobs.engine.private.modules import WithStatistics
from nimble_jobs.engine.private.operators import copy_
from nimble_jobs.errors import JobFailed
from nimble_jobs.planner.step.request import Ranks, Tensors

WEIGHT, TURN = "@ranks.weight", "@ranks.turn"  # in a program's state


class Peers(Protocol):
    """All ranks of a training, as one of them sees them."""

    rank: int
    count: int

    def gather(self, value: Any) -> list[Any]:
        """The JSON-able values of all ranks, by rank. All of them call this. Raises RankLost."""


class Reduction:
    """Sums over ranks. Its tensors never move."""

    def __init__(self, ranks: Ranks, module: nn.Module, device: torch.device) -> None:
        """`module` is in training mode."""
        self.count = ranks.count
        # This rank's share of the batch's records. While it rehearses alone, it has all of them.
        self.weight = torch.ones((), device=device)
        self._turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._bucket_bytes = ranks.bucket_bytes
        self._statistics = _statistics(module)
        self._buckets: list[list[str]] | None = None  # names of parameters; None: no gradient was seen yet

    def state(self) -> dict[str, torch.Tensor]:
        """The live tensors that programs read and write, by the names under which they know them."""
        return {WEIGHT: self.weight, TURN: self._turn}

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that get a gradient, in the order in which they are summed; empty before `arrange`."""
        return tuple(name for bucket in self._buckets or () for name in bucket)

    def arrange(self, gradients: Tensors) -> None:
        """Put gradients into buckets, the last parameters first: the backward pass reaches them first.

        Raises JobFailed if other parameters had gradients before.
        """
        if self._buckets is not None:
            _check_same(set(self.names), gradients.keys())
            return
        buckets: list[list[str]] = []
        filled, kind = 0, None
        for name, gradient in reversed(list(gradients.items())):
            nbytes = gradient.numel() * gradient.element_size()
            if not buckets or gradient.dtype is not kind or filled + nbytes > self._bucket_bytes:
                buckets.append([])
                filled, kind = 0, gradient.dtype
            buckets[-1].append(name)
            filled += nbytes
        self._buckets = buckets

    def gradients(self, found: Tensors) -> dict[str, torch.Tensor]:
        """The sums of gradients over all ranks, in the memory layout of those that are given, no two overlapping."""
        self.arrange(found)
        summed: dict[str, torch.Tensor] = {}
        for bucket in self._buckets or ():
            given = [found[name] for name in bucket]
            flat = torch.empty(sum(g.numel() for g in given), dtype=given[0].dtype, device=given[0].device)
            slots = _slots(flat, given)
            copy_(slots, given)
            all_reduce_(flat, self._turn)
            summed |= dict(zip(bucket, slots, strict=True))
        return {name: summed[name] for name in found}

    def figures(self, loss: torch.Tensor, correct: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss of the whole batch, and how many of its records were classified right.

        Running statistics become the means of all ranks', too.
        """
        flat = torch.cat([loss.reshape(1).float(), *(s.reshape(-1).float() for s in self._statistics)])
        flat.mul_(self.weight)
        flat = torch.cat([flat, correct.reshape(1).float()])  # exact below 2^24 records
        all_reduce_(flat, self._turn)
        if self._statistics:
            copy_(list(self._statistics), _slots(flat[1:-1], self._statistics))
        return flat[0].clone(), flat[-1].round().to(correct.dtype)


def _slots(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of a flat tensor, one after another, each in the shape and memory layout of a tensor in `like`."""
    slots, start = [], 0
    for tensor in like:
        part = flat[start : start + tensor.numel()]
        dense = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        laid_out = dense == tensor.numel()
        slots.append(
            part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())
            if laid_out
            else part.view(tensor.shape)
        )
        start += tensor.numel()
    return slots


def _statistics(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Running means and variances that a step in training mode moves."""
    norms = [part for part in module.modules() if isinstance(part, WithStatistics) and part.training]
    return tuple(t for part in norms for t in (part.running_mean, part.running_var) if t is not None)


def _check_same(before: set[str], now: Iterable[str]) -> None:
    for name in sorted(before ^ set(now)):
        has = "had a gradient before and has none now" if name in before else "has a gradient now and had none before"
        raise JobFailed(
            f"run.gpus: the parameter {name!r} {has}; with several devices the same parameters must get gradients in "
            "each batch; expected 1"
        )
