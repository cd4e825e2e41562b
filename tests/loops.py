"""The hand-written loops of `bench scoring`: a picture to make JPEGs from, and what each loop must answer for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn

from nimble_jobs.bench.loops import dataloader_compiled, dataloader_eager, dataloader_torchvision, gpu_decode
from nimble_jobs.bench.loops.task import Task

LOOPS = [dataloader_eager, dataloader_compiled, dataloader_torchvision, gpu_decode]


class Brightest(nn.Module):
    """A logit for each colour: its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) * self.scale


def photo(path: Path) -> Path:
    """A picture with edges and texture."""
    coarse = np.random.default_rng(7).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((640, 427), Image.Resampling.BICUBIC).save(path)
    return path


def check_answers(
    loop: object,
    files: list[Path],
    out: Path,
    *,
    dtype: torch.dtype,
    device: str,
    side: int,
    workers: int,
    mode: str,
    within: float,
) -> None:
    """Run a loop in batches of 8: one row for each file, in their order, as Pillow's pixels have it.

    `within`: how far probabilities may be off.
    """
    task = Task(
        files=[str(file) for file in files],
        model=Brightest(),
        dtype=dtype,
        device=device,
        side=side,
        batch_size=8,
        workers=workers,
        mode=mode,
        out=str(out),
    )
    assert loop.score(task) > 0  # type: ignore[attr-defined]
    table = pq.read_table(task.out)
    assert table["id"].to_pylist() == task.files
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    for file, probability, top1 in zip(files, table["probability"].to_pylist(), table["top1"].to_pylist(), strict=True):
        with Image.open(file) as image:
            small = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR)) / 255
        logits = ((small - mean) / std).mean((0, 1))
        shares = np.exp(logits) / np.exp(logits).sum()
        assert probability == pytest.approx(shares.max(), abs=within)
        assert shares[top1] == pytest.approx(shares.max(), abs=within), f"{file.name}: {top1}, {probability}, {shares}"
