"""What a loop is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nimble_jobs.bench.loops.normal import MEAN, STD

__all__ = ["MEAN", "STD", "Task"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One scoring: of every file, top-1 and its probability, into one Parquet file (Ray Data: a folder of them)."""

    files: list[str]
    model: nn.Module  # in eval mode, fp32, on the CPU
    dtype: torch.dtype
    device: str  # cpu | cuda
    side: int  # pictures are resized to side x side, bilinear with antialiasing
    batch_size: int
    workers: int  # processes of the DataLoader, or CPUs of Ray; 0: the main process reads
    mode: str  # of torch.compile
    out: str
