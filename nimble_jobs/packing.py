"""The layout of records with several inputs: one row of bytes a record, which crosses to the device as one tensor.

The host fills the rows through a structured numpy type. On the device `models.packed.Packed` takes them apart again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from nimble_jobs.argument_paths import PATH, check_paths
from nimble_jobs.preprocess import BITS, FLOATS, Preprocess, of_words

Gives = Literal["float", "integer", "bool"]
Make = Literal["value", "mask_right", "mask_left"]

LENGTHS = "int32"  # the stored type of a mask's length
ROW_BYTES = 8  # a row is a multiple of this, so that every part of every row is aligned

_WORDS = re.compile(r"(\w+)\[([\d, ]*)\] (float|integer|bool)(?: below (\d+))?(?:: (.+))?")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One argument of the model, and how a row stores it.

    A mask is stored as one length. The device makes `shape` flags of it, of which the first ones (`mask_right`: the
    padding is on the right) or the last ones (`mask_left`) are set. Raises ValueError for what no device could unpack.
    """

    path: str  # the argument's name, or its position; dotted for an entry of a nested argument: x.pixels, 0.a
    shape: tuple[int, ...]  # of one record: as it is stored, or of the flags of a mask
    dtype: str = LENGTHS  # numpy's name of the stored type
    gives: Gives = "integer"  # what the model gets: its own floating dtype, int64, or booleans
    make: Make = "value"
    preprocess: Preprocess | None = None  # what the device does to the stored values
    below: int | None = None  # exclusive upper bound of whole numbers from 0 up; None: unknown

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not PATH.fullmatch(self.path):
            raise ValueError(f"{self.path!r:.60} names no argument")
        if self.dtype not in BITS and self.dtype not in FLOATS:
            raise ValueError(f"{self.path}: no type in which records cross: {self.dtype!r:.60}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"{self.path}: records have shape {list(self.shape)}; expected at least one value")
        if self.make != "value" and (len(self.shape) != 1 or self.dtype != LENGTHS or self.gives == "float"):
            raise ValueError(f"{self.path}: a mask is one row of flags, stored as a length of type {LENGTHS}")
        if self.gives == "bool" and self.make == "value" and self.dtype != "bool":
            raise ValueError(f"{self.path}: booleans are stored as booleans, not as {self.dtype}")
        if self.gives == "integer" and self.dtype not in BITS:
            raise ValueError(f"{self.path}: whole numbers cannot be stored as {self.dtype}")
        steps = self.preprocess
        if steps is None and self.gives == "float" and self.dtype not in FLOATS:
            raise ValueError(f"{self.path}: {self.dtype} becomes fractions only through a preprocessing")
        if steps is not None and (steps.shape, steps.dtype) != (self.shape, self.dtype):
            raise ValueError(f"{self.path}: its preprocessing takes {steps.dtype} {list(steps.shape)}")
        if steps is not None and self.gives != ("integer" if steps.whole else "float"):
            raise ValueError(f"{self.path}: its preprocessing does not give {self.gives}")
        if self.below is not None and (self.below < 1 or self.gives != "integer" or self.is_made):
            raise ValueError(f"{self.path}: only whole numbers have a bound, of at least 1")

    @property
    def is_made(self) -> bool:
        """Whether the argument is made of something shorter than itself."""
        return self.make != "value"

    @property
    def is_flags(self) -> bool:
        """Whether checks give it flags: its name ends in `mask`, as the names of masks do."""
        return self.gives != "float" and self.path.endswith("mask") and bool(self.shape)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of one record as the row holds it."""
        return () if self.is_made else self.shape

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of one record as the model gets it."""
        return self.shape if self.preprocess is None else self.preprocess.result

    @property
    def words(self) -> str:
        """All but the path, readable: `int32[128] integer below 30522`. See `part_of_words`."""
        what = self.make if self.is_made else self.dtype
        bound = "" if self.below is None else f" below {self.below}"
        steps = "" if self.preprocess is None else f": {self.preprocess.words}"
        return f"{what}{list(self.shape)} {self.gives}{bound}{steps}"


@dataclass(frozen=True)
class Layout:
    """The parts of a row, in the order of their paths. Raises ValueError if they cannot be arguments of one call."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        """Sort the parts, so that equal parts make equal layouts. Raises ValueError."""
        object.__setattr__(self, "parts", tuple(sorted(self.parts, key=lambda part: part.path)))
        if not self.parts:
            raise ValueError("no argument is given")
        check_paths([part.path for part in self.parts])

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The structured type of a row. Each field has the name of its path and is aligned."""
        offsets, end = [], 0
        for part in self.parts:
            kind = np.dtype(part.dtype)
            offsets.append(-(-end // kind.itemsize) * kind.itemsize)
            end = offsets[-1] + kind.itemsize * math.prod(part.stored)
        return np.dtype(
            {
                "names": [part.path for part in self.parts],
                "formats": [(part.dtype, part.stored) for part in self.parts],
                "offsets": offsets,
                "itemsize": -(-end // ROW_BYTES) * ROW_BYTES,
            }
        )

    @property
    def nbytes(self) -> int:
        """Bytes of one row, a multiple of ROW_BYTES."""
        return self.dtype.itemsize

    @property
    def words(self) -> dict[str, str]:
        """For each path, everything that a program and its checks depend on. See `layout_of_words`."""
        return {part.path: part.words for part in self.parts}

    @property
    def text(self) -> str:
        """For people: `attention_mask, input_ids int32[128]`."""
        return ", ".join(p.path if p.is_made else f"{p.path} {p.dtype}{list(p.shape) or ''}" for p in self.parts)

    @property
    def holds_integers(self) -> bool:
        """Whether the model gets whole numbers that could be out of the range of a table."""
        return any(part.gives == "integer" and not part.is_made for part in self.parts)

    def offset(self, path: str) -> int:
        """Where a part begins in a row, in bytes."""
        fields = self.dtype.fields
        assert fields is not None
        return fields[path][1]

    def part(self, path: str) -> Part:
        """The part of this path. Raises KeyError."""
        return next(part for part in self.parts if part.path == path) if path in self.words else self._no_part(path)

    def empty(self, count: int) -> np.ndarray:
        """Rows of zeros, uint8 [count, nbytes]. The bytes between two parts stay zero."""
        return np.zeros((count, self.nbytes), dtype=np.uint8)

    def fields(self, rows: np.ndarray) -> np.ndarray:
        """Rows uint8 [n, nbytes] as a structured array [n] of the same memory: `fields(rows)[path]` can be written."""
        return rows.view(self.dtype)[:, 0]

    def pack(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Rows uint8 [n, nbytes] of the values of each part, [n, *stored]; of masks these are the lengths."""
        rows = self.empty(len(next(iter(values.values()))))
        fields = self.fields(rows)
        for part in self.parts:
            fields[part.path] = values[part.path]
        return rows

    def unpack(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Inverse of `pack`: views of the rows."""
        fields = self.fields(rows)
        return {part.path: fields[part.path] for part in self.parts}

    def bounded(self, below: int) -> Layout:
        """The same, with whole numbers below `below` if nothing tighter is known and their type holds as many."""
        return Layout(tuple(_bounded(part, below) for part in self.parts))

    def _no_part(self, path: str) -> Part:
        raise KeyError(path)


def _bounded(part: Part, below: int) -> Part:
    if part.gives != "integer" or part.is_made or part.below is not None:
        return part
    return replace(part, below=min(below, BITS[part.dtype][1] + 1))


def text_layout(
    length: int,
    *,
    vocabulary: int | None = None,
    token_types: bool = False,
    mask: Literal["mask_right", "mask_left"] = "mask_right",
    ids_path: str = "input_ids",
    mask_path: str = "attention_mask",
    types_path: str = "token_type_ids",
) -> Layout:
    """Tokens of texts of up to `length` tokens: ids int32 [length], a mask made of one length, and types uint8."""
    ids = Part(path=ids_path, dtype="int32", shape=(length,), below=vocabulary)
    parts = [ids, Part(path=mask_path, shape=(length,), make=mask)]
    if token_types:
        parts.append(Part(path=types_path, dtype="uint8", shape=(length,), below=2))
    return Layout(tuple(parts))


def part_of_words(path: str, words: str) -> Part:
    """Inverse of `Part.words`. Raises ValueError for any other text."""
    found = _WORDS.fullmatch(words)
    if not found:
        raise ValueError(f"no part of a row: {words!r:.80}")
    what, sizes, gives, below, steps = found.groups()
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    made = what in get_args(Make)[1:]
    dtype = LENGTHS if made else what
    preprocess = None if steps is None else of_words(shape, dtype, steps)
    given: Any = {"gives": gives, "make": what if made else "value", "below": None if below is None else int(below)}
    return Part(path=path, shape=shape, dtype=dtype, preprocess=preprocess, **given)


def layout_of_words(words: Mapping[str, str]) -> Layout:
    """Inverse of `Layout.words`. Raises ValueError for any other text."""
    return Layout(tuple(part_of_words(path, said) for path, said in words.items()))
