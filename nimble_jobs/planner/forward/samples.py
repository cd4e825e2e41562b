"""Inputs for replays that are timed: one alone says little, for a device computes some numbers faster than others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch

from nimble_jobs.engine import verify
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.inputs import Below
from nimble_jobs.schedule import Port

_COUNT = 4


class Samples:
    """A few random inputs that take turns. They lie on the host: on the device they would take what is measured."""

    def __init__(
        self,
        ports: tuple[Port, ...],
        below: Below,
        integers: Mapping[str, torch.Tensor],
        put_back: Callable[[], object] = lambda: None,
    ) -> None:
        """`put_back` undoes what replays write into the state; it is called with each input."""
        host = torch.device("cpu")
        made = [verify.random_inputs(ports, host, seed, below, integers) for seed in range(_COUNT)]
        self._put_back = put_back
        self._turns = itertools.cycle(made)

    def fill(self, instance: Instance) -> None:
        """Give the instance the next input."""
        self._put_back()
        for name, value in next(self._turns).items():
            instance.inputs[name].copy_(value)
