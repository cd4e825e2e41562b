"""The steps that the device applies to a batch of stored records, as a value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast

import numpy as np

from nimble_jobs.plural import by

Layout = Literal["hw", "chw", "hwc"]

# Types in which records may be sent to the device. torch computes with few unsigned types, so the device gets the bits
# of the wider ones as signed numbers and masks them.
BITS = {
    "bool": (0, 1),
    "uint8": (0, 2**8 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "uint16": (0, 2**16 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "uint32": (0, 2**32 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}
SIGNED = {"uint16": "int16", "uint32": "int32"}
FLOATS = {"float16": 65504.0, "float32": 3.4028234e38, "float64": 1.7976931348623157e308}  # their largest numbers
MOST_REDUCED = 64  # the device shrinks images at most so many times, since its kernel holds all weights at once

_EIGHT = {"bool", "uint8", "int8"}
_USUAL = 16.0  # if the arithmetic brings all of a type's values below this, checks draw from the whole type
_BY_255 = 1 / 255


@dataclass(frozen=True, kw_only=True)
class Usual:
    """Stored values that records are likely to hold. Whole numbers lie in [low, high].

    They are spread evenly if there is no `centre`, else normally by `width` around it, one value for all or one for
    each place along `axis`.
    """

    low: int = 0
    high: int = 0
    centre: tuple[float, ...] | None = None
    width: tuple[float, ...] = (1.0,)
    axis: int = -1  # counted from the end


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Records cross to the device as `dtype` and `shape`; the device makes `result` of them, in the model's dtype.

    In this order: images are brought to CHW, resized (bilinear with antialiasing), cropped around the centre and
    given their channels; then `(x * scale - mean) / std` in float32.
    """

    shape: tuple[int, ...]  # of one record as it crosses
    dtype: str  # numpy's name
    result: tuple[int, ...]  # shape of one record as the model takes it
    layout: Layout | None = None  # None: no image
    resize: tuple[int, int] | None = None  # height, width
    center_crop: tuple[int, int] | None = None  # height, width
    channels: int | None = None  # 1 or 3; None: as they are
    scale: float | None = None  # None: whole numbers stay whole, and there is no arithmetic
    mean: tuple[float, ...] | None = None  # one for all channels or one each
    std: tuple[float, ...] | None = None

    @property
    def whole(self) -> bool:
        """Whether the model gets whole numbers (int64)."""
        return self.scale is None

    @property
    def words(self) -> str:
        """All but `shape` and `dtype`, readable: `hwc, resize 224x224, /255, mean 0.5, std 0.5`. See `of_words`."""
        said: list[str] = [self.layout] if self.layout is not None else []
        said += [f"resize {by(self.resize)}"] if self.resize is not None else []
        said += [f"crop {by(self.center_crop)}"] if self.center_crop is not None else []
        said += [f"{self.channels} channels"] if self.channels is not None else []
        if self.scale is None:
            said.append("whole numbers")
        elif self.scale != 1.0:
            said.append("/255" if self.scale == _BY_255 else f"*{self.scale!r}")
        for name in ("mean", "std"):
            values = getattr(self, name)
            said += [f"{name} {' '.join(map(repr, values))}"] if values is not None else []
        return ", ".join(said) or "as stored"

    @property
    def largest(self) -> float:
        """The largest stored number for which nothing becomes NaN or infinite; negative if there is none."""
        if self.scale is None:
            return math.inf
        means, stds = [abs(m) for m in self.mean or (0.0,)], [abs(s) for s in self.std or (1.0,)]
        scale, most = abs(self.scale), 0.99 * FLOATS["float32"]
        if not all(map(math.isfinite, (scale, *means, *stds))) or max(scale, *means) > most or min(stds) < 1e-30:
            return -1.0
        room = most * min(1.0, *stds) - max(means)
        if room <= 0:
            return -1.0
        return min(most, room / scale if scale > 0 else most)

    @property
    def always_finite(self) -> bool:
        """Whether no stored number can become NaN or infinite."""
        return self.dtype in BITS and max(map(abs, BITS[self.dtype])) <= self.largest

    @property
    def usual(self) -> Usual:
        """Stored values that the arithmetic turns into values as models usually get them.

        These are all values of types with eight bits, and of types that the arithmetic brings near zero. For other
        types they are the values that it turns into normally distributed numbers.
        """
        low, high = BITS.get(self.dtype, (0, 0))
        ends = [abs(value) for end in (low, high) for value in self._arithmetic(float(end))]
        if self.dtype in _EIGHT or (self.dtype in BITS and max(ends) <= _USUAL):
            return Usual(low=low, high=high)
        means, stds = self.mean or (0.0,), self.std or (1.0,)
        count = max(len(means), len(stds))
        axis = -3 if self.layout == "chw" else -1
        if count > 1 and (self.layout == "hw" or count != self.shape[axis]):
            means, stds, count = (sum(means) / len(means),), (sum(stds) / len(stds),), 1
        scale = self.scale or 1.0
        return Usual(
            low=max(low, -(2**52)),  # what float64 holds
            high=min(high, 2**52),
            centre=tuple(means[i % len(means)] / scale for i in range(count)),
            width=tuple(abs(stds[i % len(stds)] / scale) for i in range(count)),
            axis=axis,
        )

    def to_json(self) -> dict[str, Any]:
        """These steps as JSON-able values."""
        return asdict(self)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Preprocess:
        """Inverse of `to_json`, also after a round trip through JSON."""
        given: Any = {f.name: found[f.name] for f in fields(cls)}
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        return cls(**given)

    def _arithmetic(self, value: float) -> list[float]:
        means, stds = self.mean or (0.0,), self.std or (1.0,)
        count, scale = max(len(means), len(stds)), 1.0 if self.scale is None else self.scale
        return [(value * scale - means[i % len(means)]) / (stds[i % len(stds)] or 1e-30) for i in range(count)]


def bits(x: np.ndarray) -> np.ndarray:
    """The same memory in a type that torch computes with."""
    if x.dtype.kind != "u" or x.dtype.itemsize == 1:  # asked for each batch, and a dtype's name takes long to make
        return x
    return x.view(SIGNED[x.dtype.name]) if x.dtype.name in SIGNED else x


def result_of(
    shape: Sequence[int],
    layout: Layout | None,
    resize: tuple[int, int] | None,
    center_crop: tuple[int, int] | None,
    channels: int | None,
) -> tuple[int, ...]:
    """The shape of one record once it is an image [C, H, W]; of anything else `shape` itself."""
    if layout is None:
        return tuple(shape)
    c, h, w = {"hw": (1, *shape[:2]), "chw": tuple(shape[:3]), "hwc": (shape[-1], *shape[:2])}[layout]
    return (channels or c, *(center_crop or resize or (h, w)))


def of_words(shape: Sequence[int], dtype: str, words: str) -> Preprocess:
    """Inverse of `words`. Raises ValueError for any other text."""
    given: dict[str, Any] = {"scale": 1.0}
    for word in words.split(", "):
        if word in ("hw", "chw", "hwc"):
            given["layout"] = word
        elif found := re.fullmatch(r"(resize|crop) (\d+)x(\d+)", word):
            given["resize" if found[1] == "resize" else "center_crop"] = (int(found[2]), int(found[3]))
        elif found := re.fullmatch(r"(\d+) channels", word):
            given["channels"] = int(found[1])
        elif word == "whole numbers":
            given["scale"] = None
        elif word == "/255":
            given["scale"] = _BY_255
        elif word.startswith("*"):
            given["scale"] = float(word[1:])
        elif found := re.fullmatch(r"(mean|std) (.+)", word):
            given[found[1]] = tuple(map(float, found[2].split()))
        elif word != "as stored":
            raise ValueError(f"no step of a preprocessing: {word!r:.60}")
    if dtype not in BITS and dtype not in FLOATS:
        raise ValueError(f"no type in which records cross: {dtype!r:.60}")
    layout = cast(Layout | None, given.get("layout"))
    if layout is not None and len(shape) != len(layout):
        raise ValueError(f"records of shape {list(shape)} are no {layout}")
    images = (given.get(name) for name in ("resize", "center_crop", "channels"))
    return Preprocess(shape=tuple(shape), dtype=dtype, result=result_of(shape, layout, *images), **given)
