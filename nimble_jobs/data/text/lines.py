"""Texts in files of lines: plain text with a record a line, and JSON lines with an object a line.

Only LF ends a line; a CR before it is dropped. Other characters that Unicode calls line ends stay in the text. A byte
order mark at the beginning is skipped. The last line needs no LF. Files that end in .gz are decompressed.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nimble_jobs import moves
from nimble_jobs.data.blocks import Layout
from nimble_jobs.data.ids import Ids
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.table import column_ids
from nimble_jobs.data.text.values import Rows, TextSource, Unreadable, decoded, kind_of, paired, text_of
from nimble_jobs.errors import DataError, NoRecords
from nimble_jobs.spec.model import InputSpec

_BLOCK_BYTES = 4 << 20  # of text; a longer line is a block of its own
_BOM = b"\xef\xbb\xbf"
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A range of whole lines."""

    offset: int  # bytes, of the decompressed file
    nbytes: int
    first: int  # number of its first line, from 0
    lines: int


class LineFile:
    """A file of lines, cut into blocks. Several threads may read."""

    def __init__(self, stamp: Stamp) -> None:
        self.stamp = stamp
        self.cuts: list[_Cut] = []
        self._packed = stamp.path.lower().endswith(".gz")
        self._lock = threading.Lock()
        self._open: gzip.GzipFile | None = None  # kept, because going back means to decompress from the beginning

    def scan(self) -> Iterator[list[bytes]]:
        """Cut the file, and yield the lines of each block. Raises DataError for a damaged .gz file."""
        offset = first = 0
        with self.stamp.open() as raw:
            for data in self._blocks(raw):
                begin = len(_BOM) if not offset and data.startswith(_BOM) else 0
                lines = split(data[begin:])
                cut = _Cut(offset=offset + begin, nbytes=len(data) - begin, first=first, lines=len(lines))
                if lines:
                    self.cuts.append(cut)
                    yield lines
                offset, first = offset + len(data), first + len(lines)
                moves.made()

    def lines(self, number: int) -> list[bytes]:
        """The lines of a block. Raises DataError if the file has changed."""
        cut = self.cuts[number]
        data = self._inflated(cut) if self._packed else self._plain(cut)
        if len(data) != cut.nbytes:
            raise self.stamp.changed()
        return split(data)

    def _plain(self, cut: _Cut) -> bytes:
        with self.stamp.open() as file:
            parts, offset, left = [], cut.offset, cut.nbytes
            while left and (part := os.pread(file.fileno(), left, offset)):
                parts.append(part)
                offset, left = offset + len(part), left - len(part)
            return b"".join(parts)

    def _inflated(self, cut: _Cut) -> bytes:
        with self._lock, self._reported():
            if self._open is None:
                raw = self.stamp.open()
                weakref.finalize(self, raw.close)
                self._open = gzip.GzipFile(fileobj=raw)
            self._open.seek(cut.offset)
            return self._open.read(cut.nbytes)

    def _blocks(self, raw: BufferedReader) -> Iterator[bytes]:
        """The bytes of the file in blocks that end with a line."""
        with self._reported():
            file = gzip.GzipFile(fileobj=raw) if self._packed else raw
            rest: list[bytes] = []
            while data := file.read(_BLOCK_BYTES):
                end = data.rfind(b"\n") + 1
                if not end:
                    rest.append(data)
                    continue
                yield b"".join([*rest, data[:end]])
                rest = [data[end:]] if end < len(data) else []
            if rest:
                yield b"".join(rest)

    def _reported(self) -> _Reported:
        return _Reported(self.stamp.path)


class _Reported:
    """Turns errors of decompression into DataError."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, gzip.BadGzipFile | EOFError | zlib.error):
            raise DataError(f"{self._path}: cannot be decompressed ({error}); expected a whole gzip file") from error


def split(data: bytes) -> list[bytes]:
    """The lines in these bytes, without their ends."""
    lines = data.split(b"\n")
    if not lines[-1]:  # behind the last LF
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines] if b"\r\n" in data else lines


class LineTexts(TextSource):
    """The records of a file of lines. `parse` makes the texts of one line, as many as `width`."""

    def __init__(
        self,
        file: LineFile,
        parse: Callable[[bytes], Sequence[str]],
        *,
        width: int = 1,
        ids: Ids | None = None,
        labels: np.ndarray | None = None,
    ) -> None:
        starts = np.array([*(cut.first for cut in file.cuts), file.cuts[-1].first + file.cuts[-1].lines])
        packed = file.stamp.path.lower().endswith(".gz")
        layout = Layout(
            starts=starts.astype(np.int64),
            chains=np.zeros(len(file.cuts), dtype=np.int64) if packed else np.arange(len(file.cuts)),
            block_bytes=2 * max(cut.nbytes for cut in file.cuts),
        )
        super().__init__(file.stamp, layout, ids=ids, labels=labels)
        self._file, self._parse, self._width = file, parse, width

    def place(self, index: int) -> str:
        return f"{self.stamps[0].path}:{index + 1}"

    def rows(self, number: int) -> Rows:
        lines = self._file.lines(number)
        texts: list[Sequence[str | None]] = []
        bad: dict[int, str] = {}
        for row, line in enumerate(lines):
            try:
                texts.append(self._parse(line))
            except Unreadable as e:
                bad[row] = str(e)
                texts.append((None,) * self._width)
        columns = list(zip(*texts, strict=True)) if texts else [()] * self._width
        return Rows(texts=paired(columns, bad), bad=bad, nbytes=2 * sum(map(len, lines)))


def open_plain_lines(spec: InputSpec, path: Path) -> LineTexts:
    """A text file with a record a line. Raises DataError."""
    file = LineFile(Stamp.of(path))
    for _ in file.scan():
        pass
    _refuse_empty(file)
    return LineTexts(file, _plain)


def open_json_lines(spec: InputSpec, path: Path) -> LineTexts:
    """JSON lines, an object a line; dotted names reach into nested objects. Raises DataError."""
    file = LineFile(Stamp.of(path))
    names, label = spec.fields.columns, spec.fields.label
    held = _Held(spec.fields.id, label)
    for lines in file.scan():
        held.add(lines)
    _refuse_empty(file)
    ids = labels = None
    if spec.fields.id is not None:
        where = f"{path}: input.fields.id: {spec.fields.id!r}"
        ids = column_ids(held.column(spec.fields.id), where, lambda row: f"{path}:{row + 1}", held.odd)
    if label is not None:
        labels = np.array(held.column(label).to_pylist(), dtype=object)
    return LineTexts(file, lambda line: _fields(line, names, label), width=len(names), ids=ids, labels=labels)


class _Held:
    """The id and label of every record, as text; null if it has none."""

    def __init__(self, id_name: str | None, label: str | None) -> None:
        self._chunks: dict[str, list[pa.Array]] = {name: [] for name in (id_name, label) if name is not None}
        self._label = label
        self._rows = 0
        self.odd: set[int] = set()  # records that are no objects

    def add(self, lines: Sequence[bytes]) -> None:
        if not self._chunks:
            return
        values: dict[str, list[str | None]] = {name: [] for name in self._chunks}
        for row, line in enumerate(lines, start=self._rows):
            try:
                found = _object(line)
            except Unreadable:
                self.odd.add(row)
                found = {}
            for name, column in values.items():
                value = _reach(found, name)
                text = _label_text(value) if name == self._label else _text_of(value)
                column.append(_valid(text) if text else None)
        for name, column in values.items():
            self._chunks[name].append(pa.array(column, type=pa.large_string()))
        self._rows += len(lines)

    def column(self, name: str) -> pa.ChunkedArray:
        return pa.chunked_array(self._chunks[name], type=pa.large_string())


def _text_of(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def _label_text(value: Any) -> str | None:
    """The text of a label: of a truth value as JSON writes it, of a number with fractions as Python does."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, float) and value == value else _text_of(value)


def _plain(line: bytes) -> Sequence[str]:
    return (decoded(line),)


def _fields(line: bytes, names: Sequence[str], label: str | None = None) -> Sequence[str]:
    found = _object(line)
    if label is not None and isinstance(value := _reach(found, label), list | dict):
        raise Unreadable(f"field {label!r} {kind_of(value)}; expected a name or a whole number")
    texts = []
    for name in names:
        value = _reach(found, name)
        if value is _MISSING:
            raise Unreadable(f"field {name!r} is missing; expected text")
        try:
            texts.append(text_of(value))
        except Unreadable as e:
            raise Unreadable(f"field {name!r} {e}") from e
    return texts


def _object(line: bytes) -> dict[str, Any]:
    """The object on a line. Raises Unreadable."""
    text = decoded(line)
    if not text.strip():
        raise Unreadable("the line is empty; expected a JSON object")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise Unreadable(f"the line is not JSON ({e}); expected a JSON object") from e
    if not isinstance(found, dict):
        raise Unreadable(f"the line {kind_of(found)}; expected a JSON object")
    return found


def _reach(found: Any, name: str) -> Any:
    """The value of a field. A name with dots that is not a field itself reaches into nested objects."""
    if name in found:
        return found[name]
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _valid(text: str) -> str:
    """The text, in which halves of surrogate pairs, which no file can hold, are written as `\\ud800` and the like."""
    return text.encode("utf-8", "backslashreplace").decode()


def _refuse_empty(file: LineFile) -> None:
    if not file.cuts:
        raise NoRecords(f"{file.stamp.path}: no records; expected at least one")
