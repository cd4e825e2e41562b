"""The states of random generators: those of Python, numpy and torch, and of objects that a module holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from nimble_jobs.engine.device import able


class RandomStates:
    """The random states of Python, of numpy, and of torch on the host and on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if able(device).random_states else None
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def changed(self) -> str | None:
        """Which random numbers have been drawn since, Python's or numpy's; None if neither."""
        if random.getstate() != self._python:
            return "Python's random module"
        now = np.random.get_state(legacy=False)
        if not _equal(now, self._numpy):
            return "numpy.random"
        return None

    def put_back(self) -> None:
        """Restore all random states."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _equal(one: Any, other: Any) -> bool:
    """Whether two states of numpy are equal: dictionaries of arrays, numbers and words."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    return bool(np.array_equal(one, other))


def generator_state(value: Any) -> Any:
    """The state of a random generator; None for any other value."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return None


def set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
