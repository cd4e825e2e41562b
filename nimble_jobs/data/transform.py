"""Turns raw records into the model's input. Images become float32 CHW; other arrays keep their shape.

Stored arrays are images if a record is [H, W, C] or [C, H, W], or if it is [H, W] and either 8-bit or given an option
for images (resize, center_crop, channels, layout). Without `layout`, three axes are CHW if the first is 1, 3 or
4, else HWC if the last is, else CHW. Whole numbers that are not images stay whole (int64) unless scale, mean or std ask
for arithmetic; everything else becomes float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from nimble_jobs.data.records import Signature
from nimble_jobs.decoding.recipe import scaled
from nimble_jobs.errors import DataError
from nimble_jobs.plural import by
from nimble_jobs.preprocess import BITS, FLOATS, MOST_REDUCED, Layout, Preprocess, result_of
from nimble_jobs.resizing import weights
from nimble_jobs.spec.picture_model import OfModel
from nimble_jobs.spec.transform import TransformSpec

_COLOURS = (1, 3, 4)
_OF_IMAGES = ("resize", "shortest_edge", "interpolation", "center_crop", "channels", "layout")
_LARGEST = int(np.iinfo(np.int64).max)
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R 601-2, as Pillow's mode L


@dataclass(frozen=True, kw_only=True, eq=False)
class Arithmetic:
    """(x * scale - mean) / std. `mean` and `std` broadcast against a batch."""

    scale: float
    mean: np.ndarray | None
    std: np.ndarray | None

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Apply it in place to a float32 batch."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if self.scale != 1.0:
                x *= np.float32(self.scale)
            if self.mean is not None:
                x -= self.mean
            if self.std is not None:
                x /= self.std
        return x


class OfImages(TransformSpec):
    """The transform of one of several inputs: only images take it, and only uint8 arrays are taken for images."""

    arrays: bool = True  # whether arrays may be images at all
    of_model: OfModel | None = None  # what encoded pictures take instead


def of_pictures(spec: TransformSpec) -> TransformSpec:
    """The transform of encoded pictures. Raises DataError if it is the model's own and is not understood."""
    chosen = _chosen(spec)
    if isinstance(chosen, OfModel) and chosen.problem is not None:
        raise DataError(f"{chosen.problem}; expected input.transform in the spec")
    return chosen


def one_size(spec: TransformSpec) -> bool:
    """Whether encoded pictures of any size get the same one, so that none must be looked at to learn it."""
    chosen = _chosen(spec)
    return (chosen.center_crop or chosen.resize) is not None


def _chosen(spec: TransformSpec) -> TransformSpec:
    return spec.of_model if isinstance(spec, OfImages) and spec.of_model is not None else spec


def notes_of(spec: TransformSpec) -> tuple[str, ...]:
    """A note for users if the model's folder says how pictures are prepared."""
    return (f"pictures are prepared as {spec.said_by} says: {spec.words}",) if isinstance(spec, OfModel) else ()


def arithmetic(spec: TransformSpec, *, eight_bit: bool, channels: int, trailing: int, where: str) -> Arithmetic:
    """Raises DataError unless mean and std have 1 value or `channels` values. `trailing` axes follow the channels."""

    def values(name: str, given: tuple[float, ...] | None) -> np.ndarray | None:
        if given is None:
            return None
        if len(given) not in (1, channels):
            raise DataError(f"{where}: transform.{name} has {len(given)} values; expected 1 or {channels}")
        return np.asarray(given, dtype=np.float32).reshape(-1, *([1] * trailing))

    scale = spec.scale if spec.scale is not None else (1 / 255 if eight_bit else 1.0)
    return Arithmetic(scale=scale, mean=values("mean", spec.mean), std=values("std", spec.std))


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrayTransform:
    """The transform of a batch [n, *shape] of stored arrays. Made by `bind`."""

    spec: TransformSpec
    signature: Signature
    layout: Layout | None  # None: not images
    arithmetic: Arithmetic | None  # None: whole numbers stay whole
    where: str = "input.fields.x"
    preprocess: Preprocess | None = None  # steps that the device can do instead; None: only the host can

    def __call__(self, raw: np.ndarray) -> np.ndarray:
        """A new C-contiguous batch of `signature`."""
        if self.arithmetic is None:
            if raw.dtype == np.uint64 and raw.size and int(raw.max()) > _LARGEST:
                raise DataError(f"{self.where}: holds {raw.max()}; expected whole numbers up to {_LARGEST}")
            return np.array(raw, dtype=np.int64, order="C")
        if self.layout == "hw":
            raw = raw[:, None]
        elif self.layout == "hwc":
            raw = raw.transpose(0, 3, 1, 2)
        with np.errstate(over="ignore", invalid="ignore"):
            x = np.array(raw, dtype=np.float32, order="C")
        if self.layout is not None:
            if self.spec.resize is not None:
                x = resize(x, *self.spec.resize)
            if self.spec.center_crop is not None:
                x = center_crop(x, *self.spec.center_crop)
            x = np.ascontiguousarray(to_channels(x, self.spec.channels))
        return self.arithmetic.apply(x)


def bind(spec: TransformSpec, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> ArrayTransform:
    """The transform for records of one stored shape and type; `where` names them in errors.

    Raises DataError if it cannot be applied.
    """
    bound = _bind(spec, shape, dtype, where)
    by_255 = bound.arithmetic is not None and dtype == np.uint8 and bound.spec.scale is None
    signature = replace(bound.signature, stored=dtype.name, by_255=by_255)
    return replace(bound, signature=signature, preprocess=_on_device(bound, shape, dtype))


def _on_device(bound: ArrayTransform, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Preprocess | None:
    """The same transform for the device; None for records that cannot be sent as stored."""
    if not dtype.isnative:
        return None
    return crossing(bound.spec, shape, dtype.name, bound.layout, bound.arithmetic)


def crossing(
    spec: TransformSpec, shape: tuple[int, ...], dtype: str, layout: Layout | None, done: Arithmetic | None
) -> Preprocess | None:
    """The steps for records of one shape and type on the device; None if only the host can do them.

    Steps without effect are left out, so that equal work has equal descriptions.
    """
    if dtype not in BITS and dtype not in FLOATS:
        return None
    resized, cropped, channels = (spec.resize, spec.center_crop, spec.channels) if layout is not None else [None] * 3
    if layout is not None:
        have, *size = result_of(shape, layout, None, None, None)
        resized = None if resized == tuple(size) else resized
        cropped = None if cropped == (resized or tuple(size)) else cropped
        channels = None if channels == have else channels
        if resized is not None and any(o > MOST_REDUCED * n for o, n in zip(size, resized, strict=True)):
            return None
    steps = Preprocess(
        shape=shape,
        dtype=dtype,
        result=result_of(shape, layout, resized, cropped, channels),
        layout=layout,
        resize=resized,
        center_crop=cropped,
        channels=channels,
        scale=None if done is None else done.scale,
        mean=None if done is None else spec.mean,
        std=None if done is None else spec.std,
    )
    return steps if steps.always_finite or (dtype in FLOATS and steps.largest > 0) else None


def on_host(preprocess: Preprocess, stored: np.ndarray) -> np.ndarray:
    """The device's steps on a batch [n, *preprocess.shape], done on the host: float32, or int64 for whole numbers."""
    steps = preprocess
    spec = TransformSpec(
        resize=steps.resize,
        center_crop=steps.center_crop,
        channels=cast(Literal[1, 3] | None, steps.channels),
        scale=steps.scale,
        mean=steps.mean,
        std=steps.std,
    )
    done = None
    if not steps.whole:
        axis, trailing = (0, 2) if steps.layout is not None else (-1, 0)
        channels = steps.result[axis] if steps.result else 1
        done = arithmetic(spec, eight_bit=False, channels=channels, trailing=trailing, where="input.transform")
    signature = Signature(shape=steps.result, dtype="int64" if steps.whole else "float32")
    return ArrayTransform(spec=spec, signature=signature, layout=steps.layout, arithmetic=done)(stored)


def _bind(spec: TransformSpec, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> ArrayTransform:
    if dtype.kind not in "biuf":
        raise DataError(f"{where}: holds {_kind(dtype)}; expected numbers")
    if 0 in shape:
        raise DataError(f"{where}: records have shape {shape}; expected at least one value")
    if isinstance(spec, OfModel):
        spec = TransformSpec()
    if isinstance(spec, OfImages) and not (spec.arrays and dtype == np.uint8 and len(shape) in (2, 3)):
        spec = TransformSpec()
        done = arithmetic(spec, eight_bit=False, channels=1, trailing=0, where=where) if dtype.kind == "f" else None
        signature = Signature(shape=shape, dtype="int64" if done is None else "float32")
        return ArrayTransform(spec=spec, signature=signature, layout=None, arithmetic=done, where=where)
    for_images = [k for k in _OF_IMAGES if getattr(spec, k) is not None]
    eight_bit = dtype == np.uint8
    image = (len(shape) == 2 and (eight_bit or bool(for_images))) or (
        len(shape) == 3 and (eight_bit or dtype.kind == "f" or bool(for_images))
    )
    if for_images and not image:
        raise DataError(
            f"{where}: records have shape {shape}; transform.{for_images[0]} expects [H, W], [H, W, C] or [C, H, W]"
        )
    if not image:
        wants_arithmetic = not (spec.scale is None and spec.mean is None and spec.std is None)
        if dtype.kind != "f" and not wants_arithmetic:
            return ArrayTransform(
                spec=spec,
                signature=Signature(shape=shape, dtype="int64"),
                layout=None,
                arithmetic=None,
                where=where,
            )
        last = shape[-1] if shape else 1
        plain = arithmetic(spec, eight_bit=eight_bit, channels=last, trailing=0, where=where)
        return ArrayTransform(
            spec=spec, signature=Signature(shape=shape, dtype="float32"), layout=None, arithmetic=plain
        )
    if spec.interpolation == "bicubic":
        raise DataError(f"{where}: transform.interpolation: found bicubic; expected bilinear for stored arrays")
    layout = _layout(spec, shape)
    c, h, w = {"hw": (1, *shape[:2]), "chw": shape[:3], "hwc": (shape[-1], *shape[:2])}[layout]
    if spec.shortest_edge is not None:  # all have one shape, so this is a resize to one size
        spec = spec.model_copy(update={"resize": scaled(spec.shortest_edge, h, w), "shortest_edge": None})
    h, w = spec.resize or (h, w)
    if spec.center_crop is not None:
        if h < spec.center_crop[0] or w < spec.center_crop[1]:
            raise DataError(f"{where}: images of {h}x{w} are smaller than transform.center_crop {by(spec.center_crop)}")
        h, w = spec.center_crop
    c = _channels(c, spec.channels, where)
    found = arithmetic(spec, eight_bit=eight_bit, channels=c, trailing=2, where=where)
    return ArrayTransform(
        spec=spec,
        signature=Signature(shape=(c, h, w), dtype="float32"),
        layout=layout,
        arithmetic=found,
    )


def _kind(dtype: np.dtype[Any]) -> str:
    if dtype.hasobject:
        return "Python objects"
    if dtype.kind in "US":
        return "text"
    return "complex numbers" if dtype.kind == "c" else str(dtype)


def _layout(spec: TransformSpec, shape: tuple[int, ...]) -> Layout:
    if len(shape) == 2:
        return "hw"
    if spec.layout is not None:
        return spec.layout
    return "hwc" if shape[0] not in _COLOURS and shape[2] in _COLOURS else "chw"


def _channels(have: int, want: int | None, where: str) -> int:
    if want is None:
        return have
    if (have, want) not in {(1, 1), (1, 3), (3, 3), (3, 1), (4, 3), (4, 1)}:
        raise DataError(f"{where}: images have {have} channels; transform.channels {want} expects 1, 3 or 4")
    return want


def to_channels(x: np.ndarray, want: int | None) -> np.ndarray:
    """[n, C, H, W] with 1 channel repeated to 3, 3 weighted to 1, and a fourth (alpha) dropped."""
    have = x.shape[1]
    if want is None or want == have:
        return x
    if have == 1:
        return np.repeat(x, 3, axis=1)
    x = x[:, :3]
    return x if want == 3 else np.einsum("c,nchw->nhw", _LUMA, x)[:, None]


def center_crop(x: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle `height` x `width` of [..., H, W]."""
    top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
    return x[..., top : top + height, left : left + width]


def resize(x: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear with antialiasing on float32 [n, C, H, W], as `resizing` defines it; the aspect ratio is not kept."""
    if x.shape[-2] != height:
        x = np.matmul(weights(x.shape[-2], height), x)
    if x.shape[-1] != width:
        x = np.matmul(x, weights(x.shape[-1], width).T)
    return x
