"""The switches of torch that trainings run with, and that the keys of their steps name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nimble_jobs.engine.device import current
from nimble_jobs.engine.private.runtime import deterministic

VARIES = r"(\S+) does not have a deterministic implementation"  # torch's warning; its first word is the operator
_CUBLAS = "Deterministic behavior was enabled .* uses CuBLAS"  # where streams share a workspace; here each has its own


@contextmanager
def as_in_training(device: torch.device) -> Iterator[None]:
    """While inside, torch and cuDNN choose implementations that give equal bits each time, if they have any, as an
    exact resume needs; streams and events are those of the device.

    Nothing is said of operators that have none.
    """
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic  # torch's annotations lack what it makes at run time
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
    deterministic(True, warn_only=True)
    try:
        with warnings.catch_warnings(), current(device):
            for known in (VARIES, _CUBLAS):
                warnings.filterwarnings("ignore", known)
            yield
    finally:
        deterministic(enabled, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before
