"""Photographs that the test libraries ship, encoded anew, and batches of them."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import skimage
import sklearn
from PIL import Image

from nimble_jobs.pictures import Pictures

_FILES = {
    "china": Path(sklearn.__file__).parent / "datasets/images/china.jpg",
    "flower": Path(sklearn.__file__).parent / "datasets/images/flower.jpg",
    **{
        name: Path(skimage.__file__).parent / f"data/{name}.png"
        for name in ("astronaut", "chelsea", "coffee", "motorcycle_left", "ihc")
    },
}


@functools.cache
def photographs() -> dict[str, Image.Image]:
    """RGB photographs by name, 300 to 1,000 pixels wide."""
    return {name: Image.open(path).convert("RGB") for name, path in _FILES.items()}


def jpeg(image: Image.Image | np.ndarray, *, quality: int = 90, subsampling: str = "4:2:0", **options: object) -> bytes:
    """Encoded by Pillow."""
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling=-1 if image.mode == "L" else subsampling, **options)
    return file.getvalue()


def batch(encoded: Sequence[bytes | np.ndarray], sizes: Sequence[tuple[int, int]] | None = None) -> Pictures:
    """JPEGs, and final pixels as arrays, one after another. `sizes` are read from the JPEGs if not given."""
    pieces = [one if isinstance(one, bytes) else one.tobytes() for one in encoded]
    ends = np.cumsum([len(piece) for piece in pieces])
    spans = np.array([(end - len(piece), len(piece)) for end, piece in zip(ends, pieces, strict=True)], dtype=np.int64)
    if sizes is None:
        sizes = [
            one.shape[:2] if isinstance(one, np.ndarray) else Image.open(io.BytesIO(one)).size[::-1] for one in encoded
        ]
    return Pictures(
        data=np.frombuffer(bytearray(b"".join(pieces)), dtype=np.uint8),
        spans=spans.reshape(-1, 2),
        sizes=np.array(sizes, dtype=np.int32).reshape(-1, 2),
        alike=np.array([0 if isinstance(one, np.ndarray) else -1 for one in encoded], dtype=np.int64),
    )


def by_pillow(
    encoded: bytes,
    channels: int,
    resize: tuple[int, int] | int | None,
    center_crop: tuple[int, int] | None = None,
    kind: Image.Resampling = Image.Resampling.BILINEAR,
) -> np.ndarray:
    """uint8 [height, width, channels] of one JPEG, decoded, resized and cropped by Pillow alone. `resize` is the size,
    or that of the shorter edge.
    """
    image = Image.open(io.BytesIO(encoded)).convert("L" if channels == 1 else "RGB")
    if isinstance(resize, int):
        shorter = min(image.size)
        resize = resize * image.height // shorter, resize * image.width // shorter
    if resize is not None:
        image = image.resize(resize[::-1], kind)
    if center_crop is not None:
        left, top = (image.width - center_crop[1]) // 2, (image.height - center_crop[0]) // 2
        image = image.crop((left, top, left + center_crop[1], top + center_crop[0]))
    return np.asarray(image).reshape(image.height, image.width, channels)


def damaged(encoded: bytes, seed: int) -> bytes:
    """A JPEG that was cut, or in which a few bytes after its first were changed."""
    rng = np.random.default_rng(seed)
    if rng.random() < 0.5:
        return encoded[: int(rng.integers(3, len(encoded) - 2))]
    broken = bytearray(encoded)
    first = 2 if rng.random() < 0.5 else len(encoded) // 3  # headers are at the front
    last = min(len(encoded), 700) if first == 2 else len(encoded)
    for place in rng.integers(first, last, size=int(rng.integers(1, 20))):
        broken[place] = int(rng.integers(0, 256))
    return bytes(broken)
