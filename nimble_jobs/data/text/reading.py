"""Texts of any ranges of records, from blocks that threads read ahead."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from nimble_jobs.data.blocks import Window
from nimble_jobs.data.source import Source
from nimble_jobs.data.text.values import Text
from nimble_jobs.pipeline import Meter, usable_cores

_THREADS = 4  # parsing mostly holds the interpreter's lock


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """The texts of the records at positions [start, stop). Bad ones are None."""

    start: int
    stop: int
    values: list[Text | None]
    bad: dict[int, str]  # reasons, by position in the input


def read_texts(source: Source, ranges: Sequence[tuple[int, int]], *, meter: Meter | None = None) -> Generator[Texts]:
    """The texts of each range, in order; ranges ascend. Closing the generator ends its threads. Raises DataError."""
    if not ranges:
        return
    layout = source.layout
    assert layout is not None
    if meter is not None:
        meter.workers = _THREADS

    def make(number: int) -> object:
        if meter is None:
            return source.block(number)
        with meter.busy():
            return source.block(number)

    window = Window(make, layout, ranges[-1][1], threads=min(_THREADS, usable_cores()))  # type: ignore[arg-type]
    with closing(window):
        for start, stop in ranges:
            window.want(start, stop)
            values: list[Text | None] = []
            bad: dict[int, str] = {}
            for number in range(layout.of_row(start), layout.of_row(stop - 1) + 1):
                block, first = window(number), int(layout.starts[number])
                a, b = max(0, start - first), min(stop, int(layout.starts[number + 1])) - first
                values += block.values[a:b]
                bad.update({first + row: why for row, why in block.bad.items() if a <= row < b})
            window.done(start, stop)
            yield Texts(start=start, stop=stop, values=values, bad=bad)


def spread(total: int, count: int, pieces: int) -> list[tuple[int, int]]:
    """Ranges of about `count` positions in all, in `pieces` places spread evenly over [0, total)."""
    if total <= count:
        return [(0, total)]
    each = max(1, count // pieces)
    starts = np.linspace(0, total - each, pieces).astype(np.int64).tolist()
    found: list[tuple[int, int]] = []
    for start in starts:
        begin = max(start, found[-1][1]) if found else start
        if begin < start + each:
            found.append((begin, start + each))
    return found
