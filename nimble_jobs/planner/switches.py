"""The switches of torch that trainings run with, and that the keys of their steps name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def as_in_training(device: torch.device) -> Iterator[None]:
    """While inside, cuDNN chooses kernels that give equal bits each time, as an exact resume needs; streams and events
    are those of the device.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
