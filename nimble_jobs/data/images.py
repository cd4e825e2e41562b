"""The images format, and the decoding of encoded images wherever they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from nimble_jobs.data.batches import default_threads
from nimble_jobs.data.blocks import Give
from nimble_jobs.data.ids import Ids
from nimble_jobs.data.listing import list_images
from nimble_jobs.data.records import Signature
from nimble_jobs.data.source import Loaded, Unblocked, placed
from nimble_jobs.data.stamps import Names, Stamp, Stamps
from nimble_jobs.data.transform import arithmetic, crossing
from nimble_jobs.errors import DataError
from nimble_jobs.pipeline import mapped
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.regular import open_regular
from nimble_jobs.seen import FileList
from nimble_jobs.spec.model import InputSpec, TransformSpec

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
MAX_PIXELS = 89_478_485  # Pillow's own limit (256 MiB as RGB), where it merely warns; more is taken for an attack
HEADERS = 10_000  # images whose sizes are compared before the first one is read
_ORIENTATION = 0x0112  # EXIF tag; 5 to 8 swap width and height


class Undecodable(Exception):
    """The reason why one image cannot be used."""


class ImageDecoder:
    """Encoded images to float32 CHW.

    Needs `size` (height, width) of the result, from the transform or from `set_size`.
    """

    def __init__(self, spec: TransformSpec, where: str) -> None:
        self._spec = spec
        self._channels = spec.channels or 3
        self.size = spec.center_crop or spec.resize
        self._arithmetic = arithmetic(spec, eight_bit=True, channels=self._channels, trailing=2, where=where)
        self.pixels = self._arithmetic if self._arithmetic.finite else None

    def set_size(self, size: tuple[int, int]) -> None:
        self.size = size

    @property
    def signature(self) -> Signature:
        assert self.size is not None
        return Signature(shape=(self._channels, *self.size), dtype="float32")

    @property
    def preprocess(self) -> Preprocess | None:
        """What is left to be done to the pixels [height, width, channels] that `load` gives as `stored`."""
        assert self.size is not None
        left = self._spec.model_copy(update={"resize": None, "center_crop": None, "channels": None})
        return crossing(left, (*self.size, self._channels), "uint8", "hwc", self._arithmetic)

    def load(self, images: Sequence[Callable[[], BinaryIO]], *, raw: bool = False, stored: bool = False) -> Loaded:
        """Decodes what each callable gives; with `raw` uint8, before the arithmetic, and as `stored` also [H, W, C].

        Undecodable images are bad records, as is one of another size than the rest.
        """
        assert self.size is not None
        shape = (*self.size, self._channels) if stored else self.signature.shape
        x = np.empty((len(images), *shape), dtype=np.uint8 if raw or stored else np.float32)
        bad: dict[int, str] = {}
        for i, give in enumerate(images):
            try:
                pixels = self._pixels(give())
                x[i - len(bad)] = pixels if stored else pixels.transpose(2, 0, 1)
            except Undecodable as e:
                bad[i] = str(e)
        good = x[: len(images) - len(bad)]
        return Loaded(x=good if raw or stored else self._arithmetic.apply(good), bad=bad)

    def _pixels(self, file: BinaryIO) -> np.ndarray:
        """uint8 [H, W, C] of one image. Closes the file."""
        try:
            with file, Image.open(file) as image:
                _check_pixels(image)
                upright = ImageOps.exif_transpose(image)
                flat = _in_mode(upright, "L" if self._channels == 1 else "RGB")
                if self._spec.resize is not None:
                    height, width = self._spec.resize
                    flat = flat.resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(flat)
        except Undecodable:
            raise
        except Exception as e:  # Pillow's plugins raise nearly anything on broken bytes
            raise Undecodable(f"cannot be decoded: {e}") from e
        if self._spec.center_crop is not None:
            pixels = _crop(pixels, self._spec.center_crop)
        if pixels.shape[:2] != self.size:
            assert self.size is not None
            raise Undecodable(f"image is {_by(pixels.shape)} pixels; expected {_by(self.size)}")
        return pixels[:, :, None] if pixels.ndim == 2 else pixels


def header_size(file: BinaryIO) -> tuple[int, int]:
    """Height and width of the upright image, from its header. Closes the file. Raises Undecodable."""
    try:
        with file, Image.open(file) as image:
            width, height = image.size
            return (width, height) if image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8) else (height, width)
    except Exception as e:  # as above
        raise Undecodable(f"cannot be decoded: {e}") from e


def _check_pixels(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise Undecodable(f"image is {image.height}x{image.width} pixels; expected at most {MAX_PIXELS} in all")


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would clip 16 bits at 255
        image = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Undecodable(f"image has mode {image.mode} (32 bits a pixel); expected 8 or 16 bits a channel")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _crop(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if pixels.shape[0] < size[0] or pixels.shape[1] < size[1]:
        raise Undecodable(
            f"image is {_by(pixels.shape)} pixels; expected at least {_by(size)} for transform.center_crop"
        )
    top, left = (pixels.shape[0] - size[0]) // 2, (pixels.shape[1] - size[1]) // 2
    return pixels[top : top + size[0], left : left + size[1]]


def _by(size: Sequence[int]) -> str:
    return f"{size[0]}x{size[1]}"


class ImageSource(Unblocked):
    """Image files. Ids are their paths below the folder, or below the part of a glob that has no wildcard.

    With `stamps` they were listed earlier: one that is not as it was then is a bad record, and no reason to fail.
    """

    piece = 4

    def __init__(self, spec: InputSpec, root: Path, ids: Sequence[str], stamps: Stamps | None = None) -> None:
        self._root = root
        self.total = len(ids)
        self._listed = stamps is not None
        self.stamps = Stamps.of(root, Names(ids)) if stamps is None else stamps
        self.ids: Ids | None = self.stamps.names
        self.labels: np.ndarray | None = None
        if spec.fields.label is not None:
            if spec.fields.label != "parent":
                raise DataError(
                    f"{root}: input.fields.label: no {spec.fields.label!r}; expected 'parent', the folder of each image"
                )
            self.labels = self.stamps.folders()
        self._decoder = ImageDecoder(spec.transform, str(root))
        if self._decoder.size is None:
            self._decoder.set_size(self._common_size())
        self.signature = self._decoder.signature
        self.pixels = self._decoder.pixels
        self.preprocess = self._decoder.preprocess

    lines = False

    def place(self, index: int) -> str:
        return self.stamps[index].path

    def load(
        self,
        indexes: np.ndarray,
        *,
        raw: bool = False,
        stored: bool = False,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        stamps = [self.stamps[i] for i in indexes.tolist()]
        if not self._listed:
            loaded = self._decoder.load([partial(_unchanged, stamp) for stamp in stamps], raw=raw, stored=stored)
        else:
            loaded = self._decoder.load([partial(_opened, stamp.path) for stamp in stamps], raw=raw, stored=stored)
            moved = {i: why for i, stamp in enumerate(stamps) if (why := stamp.trouble()) is not None}
            loaded = _without(loaded, moved)
        return Loaded(x=placed(loaded.x, into), bad=loaded.bad)

    def check(self, indexes: np.ndarray) -> None:
        """Each file is compared when it is opened."""

    def _common_size(self) -> tuple[int, int]:
        first: tuple[str, tuple[int, int]] | None = None
        reason = ""

        def size(path: str) -> tuple[int, int] | str:
            try:
                return header_size(_opened(path))
            except Undecodable as e:
                return str(e)

        found = mapped(size, (s.path for s in self.stamps), threads=default_threads(), depth=64)
        for i, (name, this) in enumerate(zip(self.stamps.names, found, strict=True)):
            if first is not None and i >= HEADERS:  # the rest show it when they are read
                found.close()
                break
            if isinstance(this, str):
                reason = reason or f"{name}: {this}"
            elif first is None:
                first = (name, this)
            elif this != first[1]:
                raise DataError(
                    f"{self._root}: {first[0]} is {_by(first[1])} and {name} is {_by(this)} pixels (height x width); "
                    "expected one size, or input.transform.resize"
                )
        if first is None:
            raise DataError(f"{self._root}: none of {self.total} images can be decoded; the first: {reason}")
        return first[1]


def _unchanged(stamp: Stamp) -> BinaryIO:
    if stamp.size >= 0:
        stamp.check()
    return _opened(stamp.path)


def _without(loaded: Loaded, moved: dict[int, str]) -> Loaded:
    """Without what was not, or did not stay, as it was listed."""
    if not moved:
        return loaded
    read = [i for i in range(len(loaded.x) + len(loaded.bad)) if i not in loaded.bad]
    kept = np.array([i not in moved for i in read], dtype=bool)
    return Loaded(x=np.ascontiguousarray(loaded.x[kept]), bad=loaded.bad | moved)


def _opened(path: str) -> BinaryIO:
    """Raises Undecodable for what is not a regular file."""
    try:
        return open_regular(path)
    except FileNotFoundError as e:
        raise Undecodable("cannot be decoded: a link to no file") from e
    except OSError as e:
        raise Undecodable(f"cannot be decoded: {e.strerror}") from e


def open_images(spec: InputSpec, files: FileList | None = None) -> ImageSource:
    """Every image file below a folder, or matched by a glob, sorted by path; with `files` only these.

    Hidden files and other suffixes are not records. Links to nothing, pipes and the like are bad ones.
    """
    if spec.fields.id not in (None, "path"):
        raise DataError(
            f"{spec.source}: input.fields.id: no {spec.fields.id!r}; expected none: an image's id is its path"
        )
    if files is not None:
        root = Path(files.root)
        stamps = Stamps.listed(root, files.files)
        return ImageSource(spec, root, stamps.names, stamps)
    root, ids, others = list_images(spec.source, SUFFIXES)
    if not ids:
        raise DataError(f"{spec.source}: no images among {others} files; expected {', '.join(SUFFIXES)}")
    return ImageSource(spec, root, ids)
