"""Labels as class numbers, or as target numbers of a regression.

Text becomes the position in the sorted names, or in the names that a training used. If any label in text is a whole
number, or all of them are numbers, all must be whole numbers; 1.0 is one, and nan is a missing one. Target numbers may
be written as text, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nimble_jobs.errors import DataError

Targets = Literal["classes", "numbers", "shares", "stored"]
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """One label per record; `bad` holds the records without one."""

    values: np.ndarray  # int64 [total], of numbers float32 [total] or [total, n]
    bad: dict[int, str]
    names: tuple[str, ...] | None  # names by class number, if labels are text

    def numbered_as(self, names: Sequence[str]) -> Labels:
        """The same labels with the numbers of these names; the records with others are bad."""
        assert self.names is not None
        number = {name: i for i, name in enumerate(names)}
        bad = dict(self.bad)
        for strange in set(self.names) - number.keys():
            for i in np.flatnonzero(self.values == self.names.index(strange)).tolist():
                bad.setdefault(i, f"label is {strange!r}; expected one of the {len(number)} known names")
        table = np.array([number.get(name, 0) for name in self.names], dtype=np.int64)
        return Labels(values=table[self.values], bad=bad, names=tuple(names))


def read(
    raw: np.ndarray, total: int, targets: Targets, names: Sequence[str] | None, *, where: str, why: str | None = None
) -> Labels:
    """Converts stored labels to `targets`: numbers, shares from 0 to 1, or classes; `stored` ones are numbers if they
    are fractions. `why` says why a class may be missing. Raises DataError as `normalise` and `numbers` do.
    """
    if targets in ("numbers", "shares") or (targets == "stored" and fractional(raw)):
        return numbers(raw, total, where=where, shares=targets == "shares")
    labels = normalise(raw, total, names=names, where=where)
    if why is not None:  # says more than `label is missing`
        labels.bad.update({i: why for i in labels.bad if raw[i] is None})
    return labels


def normalise(raw: np.ndarray, total: int, *, names: Sequence[str] | None, where: str) -> Labels:
    """Checks and converts stored labels to classes.

    `names` fixes the meaning of text labels, unless these are numbers and none is such a name. Raises DataError for a
    column that holds no labels at all.
    """
    if raw.shape == (total, 1):
        raw = raw[:, 0]
    if raw.shape != (total,):
        raise DataError(f"{where}: has shape {raw.shape}; expected ({total},), one label for each record")
    if raw.dtype.kind == "S":
        raw = np.char.decode(raw, "utf-8", "replace")
    if raw.dtype.kind in "UO":
        return _text(raw.tolist(), names)
    if raw.dtype.kind not in "biuf":
        raise DataError(f"{where}: holds {raw.dtype}; expected whole numbers or names")
    bad: dict[int, str] = {}
    if raw.dtype.kind == "f":
        whole = np.isfinite(raw) & (np.abs(raw) < 2**53)
        whole &= np.where(whole, raw, 0.0) % 1 == 0
        for i in np.flatnonzero(~whole).tolist():
            bad[i] = "label is missing" if np.isnan(raw[i]) else f"label is {raw[i]}; expected a whole number"
        raw = np.where(whole, raw, 0.0)
    values = raw.astype(np.int64)
    for i in np.flatnonzero(values < 0).tolist():
        bad[i] = f"label is {values[i]}; expected 0 or more"
    return Labels(values=values, bad=bad, names=None)


def numbers(raw: np.ndarray, total: int, *, where: str, shares: bool = False) -> Labels:
    """Checks and converts stored labels to numbers, one or several per record, as float32; `shares` must be from 0 to
    1.

    Numbers may be written as text, as in CSV. Raises DataError for a column that holds no numbers.
    """
    if raw.ndim not in (1, 2) or len(raw) != total:
        raise DataError(f"{where}: has shape {raw.shape}; expected ({total},) or ({total}, N), numbers for each record")
    words: dict[int, str] = {}
    if raw.dtype.kind in "UO":
        raw, words = _read(raw, where)
    if raw.dtype.kind not in "biuf":
        raise DataError(f"{where}: holds {raw.dtype}; expected numbers")
    with np.errstate(over="ignore"):
        values = raw.astype(np.float32)
    rows = values.reshape(total, -1)
    wrong = ~np.isfinite(rows).all(axis=1)
    bad = dict.fromkeys(np.flatnonzero(wrong).tolist(), "label is missing or not finite; expected a number") | words
    if shares:
        outside = np.asarray((rows < 0) | (rows > 1))
        for i in np.flatnonzero(outside.any(axis=1) & ~wrong).tolist():
            bad[i] = f"label is {rows[i][outside[i]][0]:g}; expected a number from 0 to 1"
    values[list(bad)] = 0.0
    return Labels(values=values[:, 0] if values.shape == (total, 1) else values, bad=bad, names=None)


def fractional(raw: np.ndarray) -> bool:
    """Whether stored labels are fractions. In text, a number with a point or an exponent is one."""
    if raw.dtype.kind not in "UO":
        return raw.dtype.kind == "f"
    texts = {str(v).strip() for v in set(raw.ravel().tolist()) if v is not None}
    return any(_NUMBER.fullmatch(text) and not text.lstrip("+-").isdigit() for text in texts)


def _read(raw: np.ndarray, where: str) -> tuple[np.ndarray, dict[int, str]]:
    """Numbers in text as float64, NaN where there is none, and what else the records hold.

    Raises DataError if there is no number at all.
    """
    cells = raw.ravel().tolist()
    held = {v: str(v).strip() for v in set(cells) if v is not None}
    read = {v: float(text) for v, text in held.items() if _NUMBER.fullmatch(text)}
    other = next((v for v in cells if held.get(v) and v not in read), None)
    if other is not None and not read:
        raise DataError(f"{where}: holds text such as {str(other)[:40]!r}; expected numbers")
    width = len(cells) // max(1, len(raw))
    bad = {
        i // width: f"label is {str(v)[:40]!r}; expected a number"
        for i, v in enumerate(cells if other is not None else ())
        if held.get(v) and v not in read
    }
    return np.array([read.get(v, np.nan) for v in cells], dtype=np.float64).reshape(raw.shape), bad


def _text(raw: list[Any], names: Sequence[str] | None) -> Labels:
    given = {v for v in set(raw) if not _missing(v)}  # a million records may share a few different labels
    whole = {v: int(v) for v in given if _whole(v)}
    gaps = {v for v in given if str(v).strip().lower() == "nan"}  # in a column of numbers; elsewhere it is a name
    numeric = given > gaps and all(_NUMBER.fullmatch(str(v).strip()) for v in given - gaps)
    if numeric:  # a column of numbers that once had a gap is written as 0.0, 1.0 and so on
        rest = given - whole.keys() - gaps
        whole |= {v: int(float(v)) for v in rest if 0 <= float(v) < 2**53 and float(v) % 1 == 0}
    if (whole or numeric) and (names is None or given.isdisjoint(names)):
        wrong = {i: f"label is {v!r}; expected a whole number, 0 or more" for i, v in enumerate(raw) if v not in whole}
        wrong.update({i: "label is missing" for i, v in enumerate(raw) if _missing(v) or v in gaps})
        numbers = [0 if i in wrong else whole[v] for i, v in enumerate(raw)]
        return Labels(values=np.array(numbers, dtype=np.int64), bad=wrong, names=None)
    known = tuple(names) if names is not None else tuple(sorted({str(v) for v in given}))
    number = {name: i for i, name in enumerate(known)}
    bad: dict[int, str] = {}
    values = np.zeros(len(raw), dtype=np.int64)
    for i, value in enumerate(raw):
        if _missing(value):
            bad[i] = "label is missing"
        elif str(value) in number:
            values[i] = number[str(value)]
        else:
            bad[i] = f"label is {value!r}; expected one of the {len(known)} known names"
    return Labels(values=values, bad=bad, names=known)


def _missing(value: Any) -> bool:
    return value is None or value == "" or value != value


def _whole(value: Any) -> bool:
    text = str(value).strip()
    return text.isascii() and text.isdigit() and len(text) < 19
