"""Decodes one picture, from any format that Pillow knows, upright, as RGB or grey pixels. Plain JPEGs go a faster way.

A JPEG at least four times as large as the result is decoded at a half, a quarter or an eighth of its size: the inverse
transform can average blocks of pixels directly. The decoded picture stays at least twice as large as the result in both
directions, so the resize that follows still sees every frequency that the result can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from nimble_jobs.decoding import plain
from nimble_jobs.decoding.plain import Flat
from nimble_jobs.decoding.recipe import MAX_PIXELS, Recipe
from nimble_jobs.decoding.resize import Box, resized, resizer
from nimble_jobs.plural import by

Part = Callable[[int, int], tuple[int, int, int, int]]  # height, width -> top, left, height, width

# Not all that Pillow knows: it would start Ghostscript for any file that begins like EPS.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "AVIF", "JPEG2000")
_ORIENTATION = 0x0112  # EXIF tag: 2 to 8 mean mirrored or turned; 5 to 8 also swap width and height
_CHANGED, _TURNED = range(2, 9), range(5, 9)  # other values are ignored


class Undecodable(Exception):
    """The reason why one picture cannot be used."""


def decoder() -> str:
    """Names and versions of the libraries that decode and resize on the CPU."""
    known = (plain.decoder(), f"Pillow {version('pillow')}", resizer())
    return ", ".join(dict.fromkeys(name for name in known if name is not None))


def pixels(file: BinaryIO, recipe: Recipe, part: Part | None = None) -> np.ndarray:
    """uint8 [height, width, channels] of one picture. Raises Undecodable.

    With `part`, only that part of the upright picture is resized to the recipe's size.
    """
    smaller = part is None and not recipe.of_whole
    try:
        flat = plain.decoded(file, recipe, smaller=smaller)
        if flat is None:
            flat = _by_pillow(file, recipe, smaller=smaller)
        found = flat.pixels
        if part is not None:
            top, left, height, width = part(*found.shape[:2])
            found = resized(found[top : top + height, left : left + width], recipe.size, None, recipe.interpolation)
            return found[..., None] if found.ndim == 2 else found
        if flat.resize is not None:
            _check_result(flat.resize)
            found = resized(found, flat.resize, flat.box, recipe.interpolation)
    except Undecodable:
        raise
    except Exception as e:  # Pillow's plugins raise almost any exception on damaged bytes
        raise _because(e) from e
    if recipe.center_crop is not None:
        found = _crop(found, recipe.center_crop)
    if found.shape[:2] != recipe.size:
        raise Undecodable(f"image is {by(found.shape)} pixels; expected {by(recipe.size)}")
    return found[..., None] if found.ndim == 2 else found


def _by_pillow(file: BinaryIO, recipe: Recipe, *, smaller: bool) -> Flat:
    with Image.open(file, formats=FORMATS) as image:
        _check_pixels(image)
        orientation = image.getexif().get(_ORIENTATION, 1)
        resize = recipe.resized(*_upright(image, orientation))
        box = _reduce(image, resize, orientation) if smaller else None
        upright = ImageOps.exif_transpose(image) if orientation in _CHANGED else image
        return Flat(np.asarray(_in_mode(upright, "L" if recipe.channels == 1 else "RGB")), resize, box)


def header_size(file: BinaryIO) -> tuple[int, int]:
    """Height and width of the upright picture, from its header. Raises Undecodable."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            return _upright(image, image.getexif().get(_ORIENTATION, 1))
    except Exception as e:  # as above
        raise _because(e) from e


def _because(error: Exception) -> Undecodable:
    """The reason, in the same words each time. Pillow's own message may hold an address or a descriptor."""
    if isinstance(error, UnidentifiedImageError):
        return Undecodable("cannot be decoded: cannot identify image file")
    return Undecodable(f"cannot be decoded: {error}")


def _upright(image: Image.Image, orientation: int) -> tuple[int, int]:
    """Height and width once the picture is upright."""
    return image.size if orientation in _TURNED else (image.height, image.width)


def _reduce(image: Image.Image, resize: tuple[int, int] | None, orientation: int) -> Box | None:
    """Ask for a JPEG to be decoded smaller; returns the box that the picture then fills. None: decode it in full."""
    if resize is None or image.format not in ("JPEG", "MPO") or image.mode not in ("L", "RGB", "CMYK"):
        return None
    height, width = resize[::-1] if orientation in _TURNED else resize
    if plain.scale_of(image.height, image.width, (height, width)) == 1:
        return None
    if orientation in _CHANGED and (image.width % 8 or image.height % 8):
        return None  # turning the picture would move its partial blocks to the other edge
    drafted = image.draft(None, (2 * width, 2 * height))
    return None if drafted is None or orientation in _CHANGED else drafted[1]


def _check_pixels(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise Undecodable(f"image is {image.height}x{image.width} pixels; expected at most {MAX_PIXELS} in all")


def _check_result(size: tuple[int, int]) -> None:
    if size[0] * size[1] > MAX_PIXELS:  # a narrow picture that is made larger
        raise Undecodable(f"image becomes {by(size)} pixels; expected at most {MAX_PIXELS} in all")


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would clip 16 bits at 255
        image = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Undecodable(f"image has mode {image.mode} (32 bits a pixel); expected 8 or 16 bits a channel")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _crop(found: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if found.shape[0] < size[0] or found.shape[1] < size[1]:
        raise Undecodable(f"image is {by(found.shape)} pixels; expected at least {by(size)} for transform.center_crop")
    top, left = (found.shape[0] - size[0]) // 2, (found.shape[1] - size[1]) // 2
    return found[top : top + size[0], left : left + size[1]]
