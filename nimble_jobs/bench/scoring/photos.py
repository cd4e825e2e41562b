"""Makes JPEGs of realistic size from a few real photographs. The seed decides every file; processes share the work.

A folder made here holds `photos.json`, which says how its files were made and what they weigh. A later run uses the
folder again if that still holds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from nimble_jobs.errors import UsageError

MANIFEST = "photos.json"
NAMES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "china.jpg", "flower.jpg")
_VERSION = 1  # of the recipe below
_BYTES_A_PIXEL = (45_000 / (500 * 375), 60_000 / (500 * 375))  # aimed at; files get up to a sixth smaller
_NOISE = 4.0  # levels of grey, the standard deviation that the size of a noisier file is measured at
_BLUR_STEP = 0.35  # pixels
_MOST_BLURS = 4
_ALONE = 512  # fewer files do not pay for processes
_CHUNK = 64  # files


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the files."""

    count: int
    width: int
    height: int
    quality: int = 90
    seed: int = 0
    photos: tuple[str, ...] = ()  # names of the photographs
    version: int = _VERSION

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


def sources(folder: Path | None = None) -> list[Path]:
    """The photographs: in a folder, else those that scikit-image and scikit-learn ship, as far as they are installed.

    Raises UsageError where there is none.
    """
    if folder is not None:
        found = sorted(p for p in folder.iterdir() if p.suffix in (".png", ".jpg")) if folder.is_dir() else []
        if not found:
            raise UsageError(f"--photos: {folder} holds no .png or .jpg; expected a folder of photographs")
        return found
    places = [_packaged("skimage", "data"), _packaged("sklearn", "datasets/images")]
    found = [place / name for name in NAMES for place in places if place is not None and (place / name).is_file()]
    found.sort(key=lambda path: path.name)  # as in a folder, so that the same photographs give the same JPEGs
    if not found:
        raise UsageError(
            "there are no photographs to make JPEGs from; expected scikit-image or scikit-learn "
            "(pip install 'nimble-jobs[quickstart]'), or --photos DIR"
        )
    return found


def _packaged(package: str, folder: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent / folder if spec is not None and spec.origin else None


def provide(folder: Path, recipe: Recipe, photos: Sequence[Path], told: Callable[[str], None]) -> list[Path]:
    """The JPEGs of a recipe in `folder`, made where they are not there yet; in order.

    Raises UsageError for a folder that holds something else.
    """
    manifest = folder / MANIFEST
    files = [folder / f"{i:06d}.jpg" for i in range(recipe.count)]
    if manifest.exists():
        kept = json.loads(manifest.read_text())
        if kept["recipe"] != _plain(recipe):
            raise UsageError(f"--images: {folder} holds other JPEGs than these settings give; name another folder")
        if kept["digest"] == _digest(files):
            return files
        told(f"{folder} was changed: its JPEGs are made again")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"--images: {folder} holds no pictures, and this command did not make it; "
            "expected a folder of JPEGs, possibly in subfolders, or one to make them in"
        )
    folder.mkdir(parents=True, exist_ok=True)
    told(f"making {recipe.count} JPEGs of {recipe.width}x{recipe.height} in {folder}")
    ranges = [range(i, min(i + _CHUNK, recipe.count)) for i in range(0, recipe.count, _CHUNK)]
    if recipe.count < _ALONE:
        for part in ranges:
            _make(folder, recipe, photos, part)
    else:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            for done in [pool.submit(_make, folder, recipe, tuple(photos), part) for part in ranges]:
                done.result()
    about = {"recipe": _plain(recipe), "digest": _digest(files), "bytes": sum(f.stat().st_size for f in files)}
    manifest.write_text(json.dumps(about, indent=1) + "\n")
    return files


def _plain(recipe: Recipe) -> object:
    return json.loads(json.dumps(asdict(recipe)))


def _digest(files: Sequence[Path]) -> str | None:
    """SHA-256 over the files' SHA-256; None where one is missing."""
    if not all(file.is_file() for file in files):
        return None
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        parts = pool.map(lambda file: hashlib.sha256(file.read_bytes()).digest(), files)
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _make(folder: Path, recipe: Recipe, photos: Sequence[Path], numbers: range) -> None:
    for number in numbers:
        (folder / f"{number:06d}.jpg").write_bytes(encoded(recipe, photos, number))


def encoded(recipe: Recipe, photos: Sequence[Path], number: int) -> bytes:
    """One JPEG: a random part of a random photograph, perhaps mirrored, in other light, with blur or noise such that
    its size lies between 40 and 60 KB for 500x375 pixels, and in proportion for others.
    """
    rng = np.random.default_rng([recipe.seed, number])
    photo = _opened(photos[int(rng.integers(len(photos)))])
    zoom = min(photo.width / recipe.width, photo.height / recipe.height) * float(rng.uniform(0.5, 1.0))
    width, height = zoom * recipe.width, zoom * recipe.height
    left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
    box = (left, top, left + width, top + height)
    image = photo.resize((recipe.width, recipe.height), Image.Resampling.BICUBIC, box=box)
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    gain, offset = rng.uniform(0.8, 1.2, 3), rng.uniform(-20, 20)
    curves = np.arange(256) * gain[:, None] + offset
    image = image.point(curves.clip(0, 255).round().astype(int).ravel().tolist())
    wanted = float(rng.uniform(*_BYTES_A_PIXEL)) * recipe.width * recipe.height
    noise = rng.standard_normal((recipe.height, recipe.width, 1), dtype=np.float32)
    return _of_size(image, wanted, noise, recipe.quality)


def _of_size(image: Image.Image, wanted: float, noise: np.ndarray, quality: int) -> bytes:
    """Blurred until it is no larger than `wanted` bytes, or with about as much noise as makes it so large."""
    data = _jpeg(image, quality)
    if len(data) > wanted:
        for step in range(1, _MOST_BLURS + 1):
            data = _jpeg(image.filter(ImageFilter.GaussianBlur(step * _BLUR_STEP)), quality)
            if len(data) <= wanted:
                break
        return data
    noisy = _jpeg(_with_noise(image, _NOISE * noise), quality)
    if len(noisy) <= len(data):
        return data
    return _jpeg(_with_noise(image, _NOISE * (wanted - len(data)) / (len(noisy) - len(data)) * noise), quality)


def _with_noise(image: Image.Image, noise: np.ndarray) -> Image.Image:
    return Image.fromarray((np.asarray(image, dtype=np.float32) + noise).clip(0, 255).astype(np.uint8))


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


@lru_cache(maxsize=32)
def _opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")
