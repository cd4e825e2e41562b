"""Inputs of bench_devices.py: large folders of few different files, made from a seed, and a model that can fault.

A file is there under many names (hard links), so that a job of minutes needs the disk of a second's.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from nimble_jobs.bench.scoring import arrays, photos
from nimble_jobs.errors import UsageError

PICTURE = (500, 375)  # width and height of a JPEG, pixels
_DRAWN = 6
MODEL = """\
import pathlib

import torch
import torchvision

FAULT = pathlib.Path(__file__).with_name("fault")


class Faulty(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.get_model({model!r}, weights=None)

    def forward(self, x):
        try:
            FAULT.unlink()  # whoever does it is the one that faults
        except FileNotFoundError:
            return self.net(x)
        if x.device.type != "cuda":
            raise RuntimeError("CUDA error: device-side assert triggered")
        torch.zeros(1, device=x.device)[torch.full((1,), 7, device=x.device)]
        return self.net(x)
"""


def array_files(folder: Path, records: int, side: int, each: int) -> Path:
    """A folder of uint8 npy files [each, side, side, 3], which are one file, with `records` or a few more in all."""
    each = min(each, records)
    made = arrays.provide(folder / "npy", each, side)
    return _linked([made], folder / f"npy-{records}-{each}-{side}", -(-records // each))


def picture_files(folder: Path, count: int, different: int, given: Path | None) -> tuple[Path, str]:
    """A folder of `count` JPEGs, of which at most so many are different, and what they were made from."""
    sources, origin = _photographs(folder, given)
    different = min(different, count)
    recipe = photos.Recipe(
        count=different, width=PICTURE[0], height=PICTURE[1], photos=tuple(path.name for path in sources)
    )
    made = photos.provide(folder / f"jpeg-{different}", recipe, sources, lambda text: print(text, file=sys.stderr))
    return _linked(made, folder / f"jpeg-{count}-{different}", count), origin


def _linked(files: list[Path], folder: Path, count: int) -> Path:
    """A folder with so many names for these files."""
    if folder.is_dir() and len(os.listdir(folder)) == count:  # noqa: PTH208  # as quick as can be
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number in range(count):
        file = files[number % len(files)]
        (folder / f"{number:07d}{file.suffix}").hardlink_to(file)
    return folder


def _photographs(folder: Path, given: Path | None) -> tuple[list[Path], str]:
    """Photographs, or drawings where there are none."""
    try:
        return photos.sources(given), "photographs"
    except UsageError:
        if given is not None:
            raise
    drawn = folder / "drawn"
    drawn.mkdir(exist_ok=True)
    for number in range(_DRAWN):
        if not (path := drawn / f"{number}.png").exists():
            _drawing(number).save(path)
    return photos.sources(drawn), "drawings"


def _drawing(seed: int) -> Image.Image:
    """Soft and sharp shapes in many colours, over a gradient, with some grain."""
    rng = np.random.default_rng(seed)
    width, height = 1000, 750
    corners = Image.fromarray(rng.integers(0, 256, (2, 3, 3), dtype=np.uint8))
    image = corners.resize((width, height), Image.Resampling.BICUBIC)
    for turn in range(4):
        draw = ImageDraw.Draw(image)
        for _ in range(60):
            x, y = int(rng.integers(width)), int(rng.integers(height))
            w, h = (int(size) for size in rng.integers(10, 160 // (turn + 1), 2))
            colour = (int(rng.integers(256)), int(rng.integers(256)), int(rng.integers(256)))
            (draw.ellipse if rng.random() < 0.5 else draw.rectangle)((x, y, x + w, y + h), fill=colour)
        image = image.filter(ImageFilter.GaussianBlur(2.0 - turn * 0.5))
    grain = rng.normal(0, 4, (height, width, 1))
    return Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))
