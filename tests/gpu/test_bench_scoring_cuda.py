"""The hand-written loops of `bench scoring` on a GPU: each gives the model the pixels of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nimble_jobs.bench.scoring import photos
from tests.loops import LOOPS, check_answers, photo

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:The CUDA Graph is empty")


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_answer_for_every_file(loop: object, tmp_path: Path) -> None:
    """In the order of the files, with a short last batch, and with workers."""
    recipe = photos.Recipe(count=20, width=96, height=64, photos=("photo.png",))
    files = photos.provide(tmp_path / "jpeg", recipe, [photo(tmp_path / "photo.png")], lambda _: None)
    check_answers(
        loop,
        files,
        tmp_path / "out.parquet",
        dtype=torch.float16,
        device="cuda",
        side=48,
        workers=2,
        mode="reduce-overhead",
        within=0.02,
    )
