"""The weights of `bench scoring`: they tell pictures apart, and rounding does not change what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nimble_jobs.bench.scoring import photos
from nimble_jobs.bench.scoring.preparation import fitted
from nimble_jobs.errors import UsageError

SIDE = 64


def test_a_few_classes_compete_and_rounding_decides_nothing(tmp_path: Path) -> None:
    """All answers are among eight classes, more than one is given, and one level of 255 hardly changes any."""
    sources = photos.sources()
    recipe = photos.Recipe(count=64, width=96, height=80, photos=tuple(source.name for source in sources))
    files = photos.provide(tmp_path / "jpeg", recipe, sources, lambda _: None)
    model = fitted("shufflenet_v2_x0_5", files, SIDE)
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB").resize((SIDE, SIDE))) for file in files])
    rounded = np.clip(pixels + np.random.default_rng(0).integers(-1, 2, pixels.shape), 0, 255)
    with torch.inference_mode():
        found, others = (
            model(torch.from_numpy(x / 255.0).float().sub(0.45).div(0.225).permute(0, 3, 1, 2)).argmax(1)
            for x in (pixels, rounded)
        )
    assert int(found.max()) < 8
    assert len(found.unique()) > 3
    assert float((found == others).float().mean()) > 0.85


def test_files_that_cannot_be_decoded_are_passed_over(tmp_path: Path) -> None:
    """What they do to a system is its own affair. Without any good file there is nothing to measure."""
    sources = photos.sources()
    recipe = photos.Recipe(count=6, width=96, height=80, photos=tuple(source.name for source in sources))
    good = photos.provide(tmp_path / "jpeg", recipe, sources, lambda _: None)
    cut, empty = tmp_path / "cut.jpg", tmp_path / "empty.jpg"
    cut.write_bytes(good[0].read_bytes()[:900])
    empty.touch()
    with_bad, without = (
        fitted("shufflenet_v2_x0_5", files, SIDE) for files in ([cut, *good[:3], empty, *good[3:]], good)
    )
    for mine, others in zip(with_bad.state_dict().values(), without.state_dict().values(), strict=True):
        assert torch.equal(mine, others)
    with pytest.raises(UsageError, match="--images: none of 2 files can be decoded"):
        fitted("shufflenet_v2_x0_5", [cut, empty], SIDE)
