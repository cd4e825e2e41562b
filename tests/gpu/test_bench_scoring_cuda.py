"""The hand-written loops of `bench scoring` on a GPU: each gives the model the pixels of the files."""

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
from nimble_jobs.bench.scoring import photos


class Brightest(nn.Module):
    """A logit for each colour: its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) * self.scale


@pytest.mark.parametrize("loop", [dataloader_eager, dataloader_compiled, dataloader_torchvision, gpu_decode])
def test_loops_answer_for_every_file(loop: object, tmp_path: Path) -> None:
    """In the order of the files, with a short last batch, and with workers."""
    coarse = np.random.default_rng(7).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((640, 427), Image.Resampling.BICUBIC).save(tmp_path / "photo.png")
    recipe = photos.Recipe(count=20, width=96, height=64, photos=("photo.png",))
    files = photos.provide(tmp_path / "jpeg", recipe, [tmp_path / "photo.png"], lambda _: None)
    task = Task(
        files=[str(file) for file in files],
        model=Brightest(),
        dtype=torch.float16,
        device="cuda",
        side=48,
        batch_size=8,
        workers=2,
        mode="reduce-overhead",
        out=str(tmp_path / "out.parquet"),
    )
    assert loop.score(task) > 0  # type: ignore[attr-defined]
    table = pq.read_table(task.out)
    assert table["id"].to_pylist() == [file.name for file in files]
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    for file, probability, top1 in zip(files, table["probability"].to_pylist(), table["top1"].to_pylist(), strict=True):
        with Image.open(file) as image:
            small = np.asarray(image.resize((48, 48), Image.Resampling.BILINEAR)) / 255
        logits = ((small - mean) / std).mean((0, 1))
        shares = np.exp(logits) / np.exp(logits).sum()
        assert probability == pytest.approx(shares.max(), abs=0.02)
        assert shares[top1] == pytest.approx(shares.max(), abs=0.02)
