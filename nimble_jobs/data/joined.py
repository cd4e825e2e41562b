"""Several files of one input in a row. Files without records are left out if others have some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from nimble_jobs.data.blocks import Block, Give, join_layouts
from nimble_jobs.data.ids import Ids, JoinedIds
from nimble_jobs.data.source import READY, Loaded, Source, Wanted, form_of, packing_of, placed
from nimble_jobs.decoding.work import COLUMNS
from nimble_jobs.errors import DataError, NoRecords
from nimble_jobs.packing import Layout as Packing

S = TypeVar("S")

_NAMED = 3  # files named in a note


def open_all(paths: Iterable[Path], open_one: Callable[[Path], S]) -> tuple[dict[Path, S], list[str]]:
    """The sources of these files, and the names of files without records.

    Raises NoRecords if no file has any, and what `open_one` raises.
    """
    sources: dict[Path, S] = {}
    empty: dict[str, NoRecords] = {}
    for path in paths:
        try:
            sources[path] = open_one(path)
        except NoRecords as e:
            empty[str(path)] = e
    if not sources:
        raise next(iter(empty.values()))
    return sources, list(empty)


class Joined:
    """Several sources in a row, all with the signature of `first`."""

    def __init__(self, parts: Sequence[Source], first: Source | None = None, *, empty: Sequence[str] = ()) -> None:
        """`empty`: the names of files that were left out because they hold no records."""
        first = first or parts[0]
        self.packing = packing_of(first)
        for part in parts:
            _check_packing(packing_of(part), self.packing, part, first)
            if unlike := part.signature.scaled_unlike(first.signature):
                mends = "transform.scale sets one scale for both"
                raise DataError(f"{part.stamps[0].path}: {unlike}, as in {first.stamps[0].path}; {mends}")
            if part.signature != first.signature:
                mends = ", or transform.scale: 1 for float32" if part.signature.shape == first.signature.shape else ""
                raise DataError(
                    f"{part.stamps[0].path}: records are {part.signature.dtype} {part.signature.shape}; "
                    f"expected {first.signature.dtype} {first.signature.shape}, as in {first.stamps[0].path}{mends}"
                )
            _check_named(part, first)
        self.parts = parts
        self.lines = first.lines
        self._starts = np.cumsum([0, *(p.total for p in parts)])
        self.total = int(self._starts[-1])
        self.signature = first.signature
        self.ids: Ids | None = None
        if first.ids is not None:
            self.ids = JoinedIds([p.ids for p in parts if p.ids is not None])
        self.labels: np.ndarray | None = None
        if first.labels is not None:
            stored = [p.labels for p in parts if p.labels is not None]
            kinds = {s.dtype.kind for s in stored}
            same = len(kinds) == 1 or kinds <= set("biuf")  # whole numbers are fractions where one is missing
            self.labels = np.concatenate(stored if same else [s.astype(object) for s in stored])
        self.stamps = tuple(s for p in parts for s in p.stamps)
        self.piece = first.piece
        self.preprocess = first.preprocess if all(p.preprocess == first.preprocess for p in parts) else None

        layouts = [p.layout for p in parts]
        blocked = [one for one in layouts if one is not None]
        self.layout = join_layouts(blocked) if len(blocked) == len(parts) else None
        self.notes = tuple(note for part in parts for note in part.notes)
        if empty:
            more = f" and {len(empty) - _NAMED:,} more" if len(empty) > _NAMED else ""
            self.notes += (f"files without records: {', '.join(empty[:_NAMED])}{more}",)
        self._blocks = np.cumsum([0, *(one.count for one in blocked)])

    def part_of(self, index: int) -> int:
        """Which part holds a record."""
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def place(self, index: int) -> str:
        part = self.part_of(index)
        return self.parts[part].place(index - int(self._starts[part]))

    def block(self, number: int) -> Block:
        part = int(np.searchsorted(self._blocks, number, side="right")) - 1
        return self.parts[part].block(number - int(self._blocks[part]))

    def load(
        self,
        indexes: np.ndarray,
        wanted: Wanted = READY,
        *,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        of = np.searchsorted(self._starts, indexes, side="right") - 1
        if len(of) and bool((of == of[0]).all()):
            return self._load(int(of[0]), indexes, wanted, into, give)
        if into is None:
            form = form_of(self, stored=wanted.stored)
            into = np.empty((len(indexes), *form.shape), dtype=form.dtype)
        x = into
        rows = np.zeros((len(indexes), COLUMNS), dtype=np.int64) if wanted.encoded else None
        good = np.ones(len(indexes), dtype=bool)
        bad: dict[int, str] = {}
        busy_s = 0.0
        for part in np.unique(of).tolist():
            places = np.flatnonzero(of == part)
            together = bool(places[-1] - places[0] == len(places) - 1)
            room = x[places[0] : places[-1] + 1] if together else None
            if wanted.encoded and room is None:
                room = np.empty((len(places), *x.shape[1:]), dtype=np.uint8)
            loaded = self._load(part, indexes[places], wanted, room, give)
            mine = {int(places[i]): reason for i, reason in loaded.bad.items()}
            good[list(mine)] = False
            if rows is not None and loaded.rows is not None:
                rows[places] = loaded.rows
            if not together or (mine and not wanted.encoded):
                x[places if wanted.encoded else places[good[places]]] = loaded.x
            bad.update(mine)
            busy_s += loaded.busy_s or 0.0
        if wanted.encoded:
            return Loaded(x=x, bad=bad, rows=rows, busy_s=busy_s or None)
        return Loaded(x=placed(x[good], x) if bad else x, bad=bad, busy_s=busy_s or None)

    def _load(
        self,
        part: int,
        indexes: np.ndarray,
        wanted: Wanted,
        into: np.ndarray | None,
        give: Give | None,
    ) -> Loaded:
        first = int(self._blocks[part]) if give is not None else 0
        mine = None if give is None else lambda number: give(number + first)
        some = indexes - self._starts[part]
        if wanted.crops is not None:
            wanted = replace(wanted, crops=wanted.crops.behind(int(self._starts[part])))
        return self.parts[part].load(some, wanted, into=into, give=mine)

    def check(self, indexes: np.ndarray) -> None:
        for part in np.unique(np.searchsorted(self._starts, indexes, side="right") - 1).tolist():
            self.parts[part].check(indexes)


def _check_named(part: Source, first: Source) -> None:
    """Raises DataError if only one of two files has ids or labels, such as a .jsonl and a .txt file."""
    for which, own, others in (("id", part.ids, first.ids), ("label", part.labels, first.labels)):
        if (own is None) != (others is None):
            without, named = (part, first) if own is None else (first, part)
            raise DataError(
                f"{without.stamps[0].path}: input.fields.{which}: its records have none, and those of "
                f"{named.stamps[0].path} have one; expected files of one kind"
            )


def _check_packing(found: Packing | None, expected: Packing | None, part: Source, first: Source) -> None:
    """Raises DataError if two files hold inputs of different types or shapes."""
    if found == expected or found is None or expected is None:
        return
    path, said = next((path, said) for path, said in found.words.items() if said != expected.words[path])
    raise DataError(
        f"{part.stamps[0].path}: records of {path} are {said}; "
        f"expected {expected.words[path]}, as in {first.stamps[0].path}"
    )
