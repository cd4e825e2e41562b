"""JSON objects of a file with one a line; what is no such object, such as a line that is being written, is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nimble_jobs.regular import open_regular

_LONGEST = 1 << 20  # bytes of a line


def objects(path: Path, *, first: int = 0, most_bytes: int) -> Iterator[dict[str, Any]]:
    """The objects that begin at byte `first` or later, within `most_bytes` of it. None for a missing file."""
    try:
        file = open_regular(path)
    except OSError:
        return
    with file:
        file.seek(first)
        left = most_bytes
        while left > 0 and (line := file.readline(_LONGEST)):
            left -= len(line)
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value
