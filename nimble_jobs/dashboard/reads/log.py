"""A part of a log, by bytes. It never ends within a character, so that parts can be put together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nimble_jobs.regular import open_regular

_LONGEST = 4  # bytes of a character in UTF-8


@dataclass(frozen=True, kw_only=True)
class Part:
    """Text from `start` to `offset`, in bytes of the file; `end`: there is no more of it yet."""

    text: str
    start: int
    offset: int
    size: int
    end: bool


def read_part(path: Path, offset: int | None, limit: int) -> Part:
    """At most `limit` bytes from `offset` on; None: the last ones, from the beginning of a line.

    A file that has become shorter is read from its beginning. A missing one is empty.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            start = max(0, size - limit) if offset is None else offset if offset <= size else 0
            file.seek(start)
            data = file.read(limit)
    except OSError:
        return Part(text="", start=0, offset=0, size=0, end=True)
    if offset is None and start > 0:
        first = data.find(b"\n") + 1
        data, start = data[first:], start + first
    data = data[: len(data) - _cut(data)]
    after = start + len(data)
    return Part(text=data.decode(errors="replace"), start=start, offset=after, size=size, end=after >= size)


def _cut(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character whose rest has not been read."""
    for back in range(1, min(_LONGEST, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:  # within a character
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if back < length and back < len(data) else 0
    return 0
