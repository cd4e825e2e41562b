"""Ids of records, held as compactly as they are stored, and returned as text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import overload

import numpy as np

from nimble_jobs.errors import DataError

STEP = 1 << 16  # ids that are converted to text at a time


class Ids(Sequence[str]):
    """One id per record. Subclasses hold them more compactly than in a list."""

    def __init__(self, values: Sequence[str] | np.ndarray, made_up: Collection[int] = ()) -> None:
        self._values = values  # an array of whole numbers, text or bytes, or text
        self.made_up = made_up  # positions of what is no record, and so has no id of its own

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        at = range(len(self))[index]
        if isinstance(at, int):
            return self._one(at)
        return self._several(at) if at.step > 0 else self._several(at[::-1])[::-1]

    def _one(self, at: int) -> str:
        return self._several(range(at, at + 1))[0]

    def _several(self, at: range) -> list[str]:
        """The ids at these positions, which ascend. What subclasses define, besides the length."""
        return _texts(self._values[at.start : at.stop : at.step])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other))  # noqa: B905  # just compared

    __hash__ = None  # type: ignore[assignment]  # as a list

    def take(self, indexes: np.ndarray) -> list[str]:
        """The ids at these positions."""
        if (
            len(indexes)
            and int(indexes[-1]) - int(indexes[0]) == len(indexes) - 1
            and bool((np.diff(indexes) == 1).all())
        ):
            return self[int(indexes[0]) : int(indexes[-1]) + 1]
        if isinstance(self._values, np.ndarray):
            return _texts(self._values[indexes])
        return [self[i] for i in indexes.tolist()]

    def keys(self, first: int, last: int) -> np.ndarray:
        """int64 [last - first], hashes of the ids: equal for equal ids, and rarely equal for different ones."""
        if isinstance(self._values, np.ndarray) and self._values.dtype.kind in "iu":
            return self._values[first:last].astype(np.int64)
        return np.fromiter(map(hash, self[first:last]), dtype=np.int64, count=last - first)


class Numbered(Ids):
    """NAME:NUMBER for each record, from `first`; without a name, the number alone."""

    def __init__(self, name: str, total: int, *, first: int = 0) -> None:
        super().__init__(())
        self._before, self._total, self._first = f"{name}:" if name else "", total, first

    def __len__(self) -> int:
        return self._total

    def _several(self, at: range) -> list[str]:
        return [f"{self._before}{self._first + i}" for i in at]


class JoinedIds(Ids):
    """The ids of several sources in a row."""

    def __init__(self, parts: Sequence[Ids]) -> None:
        super().__init__(())
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])
        self.made_up = {int(a) + i for part, a in zip(parts, self._starts, strict=False) for i in part.made_up}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _several(self, at: range) -> list[str]:
        return [text for part, a, b in self._spans(at.start, min(at.stop, len(self))) for text in part[a:b]][:: at.step]

    def _spans(self, first: int, last: int) -> Iterator[tuple[Ids, int, int]]:
        part = int(np.searchsorted(self._starts, first, side="right")) - 1
        while first < last:
            begin, end = int(self._starts[part]), min(last, int(self._starts[part + 1]))
            if first < end:
                yield self._parts[part], first - begin, end - begin
            first, part = max(first, end), part + 1


class Renamed(Ids):
    """Ids of which some, by position, have other names."""

    def __init__(self, ids: Ids, names: Mapping[int, str]) -> None:
        super().__init__((), ids.made_up)
        self._ids, self._names, self._places = ids, names, sorted(names)

    def __len__(self) -> int:
        return len(self._ids)

    def _several(self, at: range) -> list[str]:
        texts = self._ids[at.start : at.stop : at.step]
        for i in self._places[bisect_left(self._places, at.start) : bisect_left(self._places, at.stop)]:
            if i in at:
                texts[at.index(i)] = self._names[i]
        return texts


def as_ids(raw: np.ndarray, total: int, where: str, line: Callable[[int], str] | None = None) -> Ids:
    """Ids from whole numbers or text. Raises DataError for anything else."""
    if raw.shape != (total,):
        raise DataError(f"{where}: has shape {raw.shape}; expected ({total},), one id for each record")
    if raw.dtype.kind not in "iuUOS":
        raise DataError(f"{where}: holds {raw.dtype}; expected whole numbers or text")
    missing = [i for i, v in enumerate(raw) if v in (None, "")] if raw.dtype.kind == "O" else _empty(raw)
    if len(missing):
        raise no_id(int(missing[0]), where, line)
    return Ids(raw)


def _empty(raw: np.ndarray) -> np.ndarray:
    """Positions of empty text."""
    return np.flatnonzero(np.char.str_len(raw) == 0) if raw.dtype.kind in "US" else np.empty(0, dtype=np.int64)


def no_id(index: int, where: str, line: Callable[[int], str] | None = None) -> DataError:
    """The error for a record without an id."""
    return DataError(f"{where}: no id at {line(index) if line else f'record {index}'}; expected one for each record")


def check_ids(ids: Ids, where: str, line: Callable[[int], str] | None) -> Ids:
    """The ids, with other made-up ones where these are not the only ones of their name.

    Raises DataError if two records share an id, because their results could not be distinguished. It takes 8 bytes per
    record: ids are compared only if their hashes are equal.
    """
    total = len(ids)
    keys = np.empty(total, dtype=np.int64)
    for a in range(0, total, STEP):
        keys[a : a + STEP] = ids.keys(a, min(a + STEP, total))
    keys.sort()
    twice = keys[1:][keys[1:] == keys[:-1]]
    del keys
    seen: dict[str, int] = {}
    again: list[int] = []  # made-up ones that need another name
    for i in _with_keys(ids, twice) if len(twice) else ():
        name = ids[i]
        first = seen.setdefault(name, i)
        if first == i:
            continue
        if i in ids.made_up:
            again.append(i)
        elif first in ids.made_up:
            again.append(first)
            seen[name] = i
        else:
            at = f"records {first} and {i}" + (f" ({line(first)} and {line(i)})" if line else "")
            raise DataError(f"{where}: id {name!r} at {at}; expected a different id for each record")
    return Renamed(ids, _names(ids, sorted(again))) if again else ids


def _names(ids: Ids, positions: Sequence[int]) -> dict[int, str]:
    """Another name for each of these ids, which no record has: NAME-2 and so on."""
    before = {i: ids[i] for i in positions}
    further = {name: count(2) for name in before.values()}
    known = {text for a in range(0, len(ids), STEP) for text in ids[a : a + STEP] if text.rpartition("-")[0] in further}
    names: dict[int, str] = {}
    for i, name in before.items():
        names[i] = next(other for n in further[name] if (other := f"{name}-{n}") not in known)
        known.add(names[i])
    return names


def _with_keys(ids: Ids, wanted: np.ndarray) -> Iterator[int]:
    """Positions of ids with these hashes, in order."""
    for a in range(0, len(ids), STEP):
        matching = np.isin(ids.keys(a, min(a + STEP, len(ids))), wanted)
        yield from (a + np.flatnonzero(matching)).tolist()


def _texts(values: Sequence[str] | np.ndarray) -> list[str]:
    if not isinstance(values, np.ndarray):
        return list(values)
    if values.dtype.kind == "S":
        return [b.decode("utf-8", "replace") for b in values.tolist()]
    return [str(v) for v in values.tolist()]
