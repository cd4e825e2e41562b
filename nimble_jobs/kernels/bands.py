"""How the results of a dilated convolution are divided into tiles, so that few pixels of each tile's windows are
padding.

If a window is nearly as large as its picture, most pixels of most windows lie outside of the picture. Results whose
windows have the same columns inside of it form a band. A tile takes consecutive results of one band, so its windows
have some of their pixels outside together: these are not read at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

Band = tuple[int, int]  # its first column of the result, and its width
MOST_BANDS = 3


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction of a convolution."""

    size: int  # of the picture
    out: int  # of the result
    kernel: int
    stride: int
    padding: int
    dilation: int

    def taps(self, first: int, last: int) -> range:
        """The positions in the window that are inside of the picture for any result from `first` to `last`; those
        between two of them are counted too. As `dilated_triton` computes them.
        """
        low = max(0, self.padding - last * self.stride + self.dilation - 1) // self.dilation
        high = max(0, self.size - 1 + self.padding - first * self.stride + self.dilation) // self.dilation
        return range(low, min(self.kernel, high))


def bands(columns: Axis) -> tuple[Band, ...]:
    """The columns of the result in at most three bands, those of the most taps first. There are no empty ones."""
    runs = [list(run) for _, run in groupby(range(columns.out), lambda x: columns.taps(x, x))]
    if len(runs) > MOST_BANDS:
        runs = [runs[0], [x for run in runs[1:-1] for x in run], runs[-1]]
    return tuple(sorted(((run[0], len(run)) for run in runs), key=lambda band: -len(_across(columns, band))))


def tiles(images: int, rows: Axis, columns: Axis, divided: Sequence[Band], pixels: int) -> list[int]:
    """The number of pixels in the window that each tile of so many results reads, in the order of the grid."""
    found = []
    for band in divided:
        _, width = band
        count = images * rows.out * width
        for start in range(0, count, pixels):
            first, last = start // width, (min(start + pixels, count) - 1) // width
            if first // rows.out == last // rows.out:
                down = rows.taps(first % rows.out, last % rows.out)
            else:  # results of two images
                down = rows.taps(0, rows.out - 1)
            found.append(len(down) * len(_across(columns, band)))
    return found


def best(images: int, rows: Axis, columns: Axis, pixels: int) -> tuple[Band, ...]:
    """The bands, or one band of all columns if its tiles, which are fewer, read no more."""
    whole = ((0, columns.out),)
    divided = bands(columns)
    return min(whole, divided, key=lambda each: sum(tiles(images, rows, columns, each, pixels)))


def _across(columns: Axis, band: Band) -> range:
    first, width = band
    return columns.taps(first, first + width - 1)
