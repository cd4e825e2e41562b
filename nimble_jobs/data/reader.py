"""One reader over every format: batches in order with read-ahead, any records by position, bad ones told apart."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np

from nimble_jobs.data import labels as label_values
from nimble_jobs.data.batches import default_threads
from nimble_jobs.data.listed import open_listed
from nimble_jobs.data.records import BadRecord, Batch, Signature
from nimble_jobs.data.source import Joined, Loaded, Source, check_ids, fingerprint, list_files
from nimble_jobs.data.transform import Arithmetic
from nimble_jobs.errors import DataError
from nimble_jobs.pipeline import Meter, mapped
from nimble_jobs.seen import FileList
from nimble_jobs.spec.model import InputSpec

Targets = Literal["classes", "numbers", "shares", "stored"]

_SUFFIXES = {"npy": (".npy",), "npz": (".npz",), "parquet": (".parquet", ".pq"), "csv": (".csv",)}


class Reader:
    """Records of one input. Its figures are known from headers; records are read when asked for.

    `signature` is that of one record after the transform, `label_names` the class names where labels are text, and
    `fingerprint` changes whenever a file of the input does. `pixels` makes values of raw images; None: there are none.
    """

    def __init__(
        self,
        source: Source,
        *,
        allow_nan: bool,
        label_names: Sequence[str] | None = None,
        targets: Targets = "classes",
    ) -> None:
        if source.total == 0:
            raise DataError(f"{source.stamps[0].path}: no records; expected at least one")
        where = source.stamps[0].path
        if source.ids is not None:
            check_ids(source.ids, f"{where}: input.fields.id", source.place if source.lines else None)
        self._labels: label_values.Labels | None = None
        if source.labels is not None:
            at = f"{where}: input.fields.label"
            if targets in ("numbers", "shares") or (targets == "stored" and source.labels.dtype.kind == "f"):
                shares = targets == "shares"
                self._labels = label_values.numbers(source.labels, source.total, where=at, shares=shares)
            else:
                self._labels = label_values.normalise(source.labels, source.total, names=label_names, where=at)
        self._source = source
        self._allow_nan = allow_nan
        self.total: int = source.total
        self.signature: Signature = source.signature
        self.pixels: Arithmetic | None = source.pixels
        self.left_out: dict[str, str] = getattr(source, "left_out", {})  # listed files that give no record, and why

    @property
    def has_labels(self) -> bool:
        return self._labels is not None

    @property
    def quick(self) -> bool:
        """Whether records are picked from arrays, and need not be decoded one by one."""
        return self._source.piece is None

    @property
    def label_names(self) -> tuple[str, ...] | None:
        return self._labels.names if self._labels is not None else None

    @property
    def fingerprint(self) -> str:
        return fingerprint(self._source.stamps)

    def id(self, index: int) -> str:
        """The stable id of the record at a position: its path, the id column's value, or the position itself."""
        return str(index) if self._source.ids is None else self._source.ids[index]

    def place(self, index: int) -> str:
        """Where a record is, for messages: FILE:LINE, FILE: record N, or the file that it is."""
        return self._source.place(int(index))

    def batches(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        batch_size: int,
        order: np.ndarray | None = None,
        bounds: Sequence[tuple[int, int]] | None = None,
        meter: Meter | None = None,
        raw: bool = False,
    ) -> Iterator[Batch]:
        """Batches over positions [start, stop), the last one possibly short; or exactly those of `bounds`.

        `meter` counts the work of those who read and decode.
        With `order`, positions in that array of record indexes. With `raw`, which needs `pixels`, images as uint8.

        Closing the generator ends its threads. Raises DataError when the input changed or vanished.
        """
        end = self.total if order is None else len(order)
        stop = end if stop is None else min(stop, end)
        piece = min(self._source.piece or batch_size, batch_size)
        if bounds is None:
            bounds = [(a, min(a + batch_size, stop)) for a in range(start, stop, batch_size)]
        pieces = ((p, min(p + piece, b)) for a, b in bounds for p in range(a, b, piece))

        def load(bound: tuple[int, int]) -> tuple[np.ndarray, Loaded]:
            indexes = (
                np.arange(*bound, dtype=np.int64) if order is None else np.asarray(order[slice(*bound)], dtype=np.int64)
            )
            return indexes, self._load(indexes, raw=raw)

        alone = len(bounds) <= 1 and self._source.piece is None  # a thread costs more than it would save
        threads = 1 if self._source.piece is None else default_threads()
        depth = 2 * max(threads, -(-batch_size // piece))  # two batches, or what keeps the threads busy
        loaded: Iterator[tuple[np.ndarray, Loaded]] = (
            map(load, pieces)
            if alone
            else mapped(load, pieces, threads=threads, depth=depth, meter=meter, name="nimble-read")
        )
        try:
            for a, b in bounds:
                yield self._batch(a, b, [next(loaded) for _ in range(a, b, piece)])
        finally:
            if isinstance(loaded, Generator):
                loaded.close()

    def take(self, indexes: np.ndarray) -> Batch:
        """The records at any positions, in the order given, as one batch."""
        found = np.asarray(indexes, dtype=np.int64)
        if found.size and (found.min() < 0 or found.max() >= self.total):
            raise IndexError(f"record indexes must lie in [0, {self.total})")
        for batch in self.batches(batch_size=max(1, found.size), order=found):
            return batch
        return self._batch(0, 0, [(found, self._source.load(found))])

    def _load(self, indexes: np.ndarray, *, raw: bool) -> Loaded:
        loaded = self._source.load(indexes, raw=raw)
        bad = dict(loaded.bad)
        if self._labels is not None and self._labels.bad:
            bad.update(
                {
                    i: self._labels.bad[n]
                    for i, n in enumerate(indexes.tolist())
                    if i not in bad and n in self._labels.bad
                }
            )
        x = loaded.x
        rows = np.array([i for i in range(len(indexes)) if i not in loaded.bad], dtype=np.int64) if bad else None
        if not self._allow_nan and x.dtype.kind == "f" and not (finite := np.isfinite(x)).all():
            per_row = x[0].size if len(x) else 0
            count = per_row - finite.reshape(len(x), -1).sum(axis=1)
            places = np.arange(len(indexes)) if rows is None else rows
            for row in np.flatnonzero(count).tolist():
                bad.setdefault(
                    int(places[row]), f"{count[row]} of {per_row} values are NaN or infinite; expected finite numbers"
                )
        if len(bad) > len(loaded.bad):
            places = np.arange(len(indexes)) if rows is None else rows
            x = np.ascontiguousarray(x[[int(p) not in bad for p in places]])
        return Loaded(x=x, bad=bad)

    def _batch(self, start: int, stop: int, parts: list[tuple[np.ndarray, Loaded]]) -> Batch:
        bad: list[BadRecord] = []
        good: list[np.ndarray] = []
        for indexes, loaded in parts:
            for i in sorted(loaded.bad):
                index = int(indexes[i])
                reason = f"{self.place(index)}: {loaded.bad[i]}" if self._source.lines else loaded.bad[i]
                bad.append(BadRecord(index=index, id=self.id(index), reason=reason))
            good.append(np.delete(indexes, list(loaded.bad)) if loaded.bad else indexes)
        kept = np.concatenate(good)
        x = parts[0][1].x if len(parts) == 1 else np.concatenate([p.x for _, p in parts])
        return Batch(
            start=start,
            stop=stop,
            indexes=kept,
            ids=[self.id(i) for i in kept.tolist()],
            x=x,
            labels=None if self._labels is None else self._labels.values[kept],
            bad=tuple(bad),
        )

    def close(self) -> None:
        """Lets go of the files."""
        del self._source

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_reader(
    spec: InputSpec,
    *,
    label_names: Sequence[str] | None = None,
    targets: Targets = "classes",
    files: FileList | None = None,
) -> Reader:
    """A reader for `input` of a spec. `label_names` gives text labels the numbers that a training gave them.

    `files`: only these, as they were listed. What became of one since, or what is wrong with it, makes bad records.
    `targets` says what labels are: classes, numbers (float32), shares (numbers from 0 to 1), or what the file holds:
    numbers if it holds fractions.
    Raises DataError, naming the file and the field, when the input is missing, empty or not what the spec says.
    """
    return Reader(_open(spec, files), allow_nan=spec.allow_nan, label_names=label_names, targets=targets)


def _open(spec: InputSpec, files: FileList | None) -> Source:
    # Formats are imported here because pyarrow and Pillow take longer to import than a small job takes to run.
    if spec.format == "images":
        from nimble_jobs.data.images import open_images

        return open_images(spec, files)
    open_one = _opener(spec)
    if files is not None:
        return open_listed(files, open_one)
    parts = [open_one(path) for path in list_files(spec.source, _SUFFIXES[spec.format])]
    return parts[0] if len(parts) == 1 else Joined(parts)


def _opener(spec: InputSpec) -> Callable[[Path], Source]:
    if spec.format in ("npy", "npz"):
        from nimble_jobs.data.arrays import open_arrays

        return lambda path: open_arrays(spec, path)
    if spec.format == "parquet":
        from nimble_jobs.data.parquet import open_parquet

        return lambda path: open_parquet(spec, path)
    from nimble_jobs.data.csv_file import open_csv

    return lambda path: open_csv(spec, path)
