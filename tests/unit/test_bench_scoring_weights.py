"""The weights of `bench scoring`: they tell pictures apart, and rounding does not change what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from nimble_jobs.bench.scoring import photos
from nimble_jobs.bench.scoring.preparation import fitted

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
