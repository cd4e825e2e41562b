"""Cuts a CSV file between records, without parsing the cells.

A quote opens a quoted cell only at the cell's beginning. Two quotes in a quoted cell stand for one. Line breaks in
quoted cells do not end a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from nimble_jobs.errors import DataError

CUT_BYTES = 8 << 20  # bytes of text in a block, approximately
RECORD_BYTES = 256 << 20  # a longer record must have an unclosed quote

_QUOTE, _COMMA, _LF, _CR = b'",\n\r'
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A range of whole records."""

    offset: int  # bytes
    nbytes: int
    line: int  # line at which the first one begins


def cuts(file: BinaryIO, path: str) -> Iterator[tuple[Cut, bytes]]:
    """All records after the header line, in blocks. Raises DataError for a record without an end."""
    data = file.read(len(_BOM))
    begin = _mark(data)
    offset, line, data, header = begin, 1, data[begin:], True
    while True:
        more = file.read(CUT_BYTES)
        data += more
        ends = record_ends(data)
        if header and len(ends):
            first = int(ends[0])
            offset, line, data = begin + first, 1 + lines_in(data[:first]), data[first:]
            ends, header = ends[1:] - first, False
        end = int(ends[-1]) if len(ends) else 0
        if not more:
            check_closed(data, path, line)
            if data and not header:
                yield Cut(offset=offset, nbytes=len(data), line=line), data
            return
        if end:
            block, data = data[:end], data[end:]
            yield Cut(offset=offset, nbytes=end, line=line), block
            offset, line = offset + end, line + lines_in(block)
        elif len(data) > RECORD_BYTES:
            raise DataError(
                f"{path}:{line}: a record is longer than {RECORD_BYTES >> 20} MiB; expected a closing quote"
            )


def after_header(data: bytes) -> int:
    """The start of the first record after the header line; the end of the file if there is none."""
    begin = _mark(data)
    for size in (1 << 16, len(data)):
        ends = record_ends(data[begin : begin + size])
        if len(ends):
            return begin + int(ends[0])
    return len(data)


def check_closed(data: bytes, path: str, line: int = 1) -> None:
    """Raises DataError for an unclosed quote, since all records after it would be part of its cell.

    `data` begins with the record at `line` and ends with the file.
    """
    if b'"' not in data:
        return
    begin = _mark(data)
    toggles = begin + _toggles(np.frombuffer(data, dtype=np.uint8)[begin:])
    if len(toggles) % 2:
        at = line + lines_in(data[: int(toggles[-1])])
        raise DataError(f"{path}:{at}: a cell begins with a quote that is never closed; expected a closing quote")


def _mark(data: bytes) -> int:
    """The length of the byte order mark, if there is one."""
    return len(_BOM) if data.startswith(_BOM) else 0


def lines_in(data: bytes) -> int:
    """The number of line ends (LF, CR or CRLF) in these bytes."""
    count = data.count(b"\n")
    return count + data.count(b"\r") - data.count(b"\r\n") if b"\r" in data else count


def record_ends(data: bytes) -> np.ndarray:
    """Positions, int64, just after each line break that ends a record; `data` begins with a record.

    A CR at the very end is left for later, because an LF may follow.
    """
    held = np.frombuffer(data, dtype=np.uint8)
    breaks = np.flatnonzero(held == _LF)
    if b"\r" in data:
        alone = np.flatnonzero(held[:-1] == _CR)
        breaks = np.union1d(breaks, alone[held[alone + 1] != _LF])
    if b'"' in data:
        breaks = breaks[np.searchsorted(_toggles(held), breaks) % 2 == 0]
    return breaks + 1


def _toggles(held: np.ndarray) -> np.ndarray:
    """Positions of quotes, chosen so that a byte is in a quoted cell if an odd number of them comes before it."""
    quotes = np.flatnonzero(held == _QUOTE)
    before = np.where(quotes > 0, held[quotes - 1], _LF)
    after = np.where(quotes + 1 < len(held), held[np.minimum(quotes + 1, len(held) - 1)], _LF)
    begins = np.isin(before, (_COMMA, _LF, _CR))
    ends = np.isin(after, (_COMMA, _LF, _CR))
    second, first = before == _QUOTE, after == _QUOTE
    if bool((begins | second)[::2].all()) and bool((ends | first)[1::2].all()):
        return quotes  # each one opens, closes, or belongs to a pair
    found: list[int] = []
    at, close = quotes.tolist(), first.tolist()
    i = 0
    while i < len(at):  # some are in the middle of a plain cell
        if begins[i]:
            found.append(at[i])
            i += 1
            while i < len(at) and close[i]:
                i += 2
            if i < len(at):
                found.append(at[i])
        i += 1
    return np.array(found, dtype=np.int64)
