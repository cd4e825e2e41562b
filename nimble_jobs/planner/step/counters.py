"""Batch normalisations count their batches, each with a kernel of its own for one number; count them all at once.

A counter that only counts is taken away from its module during the forward pass, which then leaves it alone, and is
raised with all the others by one call.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from nimble_jobs.engine.private.modules import buffers_of

_NAME = "num_batches_tracked"
_COUNTING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Counters:
    """The counters of one module's batch normalisations."""

    def __init__(self, module: nn.Module) -> None:
        # with a momentum of None the count is part of the arithmetic
        self._all = [m for m in module.modules() if type(m) in _COUNTING and m.momentum is not None]
        self._once: list[nn.Module] | None = None  # those that a forward pass calls exactly once

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around a first forward pass in eager, which tells how often each is called."""
        calls: Counter[nn.Module] = Counter()
        handles = [m.register_forward_pre_hook(lambda m, _: calls.update([m])) for m in self._all]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._once = [m for m in self._all if calls[m] == 1]

    @property
    def known(self) -> bool:
        """Whether a forward pass was watched."""
        return self._once is not None

    @contextlib.contextmanager
    def apart(self) -> Iterator[list[torch.Tensor]]:
        """Around a forward pass: the counters that it does not raise, and that must be raised by one."""
        members = [m for m in self._once or () if m.training and buffers_of(m).get(_NAME) is not None]
        taken = [(m, buffers_of(m)[_NAME]) for m in members]
        for module, _ in taken:
            buffers_of(module)[_NAME] = None
        try:
            yield [counter for _, counter in taken if counter is not None]
        finally:
            for module, counter in taken:
                buffers_of(module)[_NAME] = counter
