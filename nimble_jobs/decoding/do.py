"""Does one piece of work in a process or a thread: decodes a few pictures from files or bytes into shared memory."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, BytesIO
from typing import BinaryIO, TypeVar

import numpy as np

from nimble_jobs.decoding import jpeg, jpeg_scan
from nimble_jobs.decoding.picture import Undecodable, pixels
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.decoding.work import BAD, CHANGED, GOOD, VANISHED, Answer, Row, Work, signed
from nimble_jobs.regular import open_regular

T = TypeVar("T")


def do(work: Work, memory: np.ndarray, blobs: Sequence[bytes | memoryview] = ()) -> Answer:
    """Do a piece of work. `memory` is uint8 [*]. `blobs` are the pictures' bytes, in order, if they are not files."""
    began = time.perf_counter()
    indexes = [0] * len(work) if work.indexes is None else work.indexes.tolist()
    spots = [
        _Spot(work=work, index=index, place=memory[offset : offset + room])
        for (offset, room), index in zip(work.places.tolist(), indexes, strict=True)
    ]
    if work.files is None:
        rows = [_tried(_from_bytes, blob, spot) for blob, spot in zip(blobs, spots, strict=True)]
    else:
        listed = zip(work.files.paths, map(tuple, work.files.facts.tolist()), strict=True)
        rows = [_tried(_from_file, _File(path, facts), spot) for (path, facts), spot in zip(listed, spots, strict=True)]
    return Answer.of(rows, time.perf_counter() - began)


@dataclass(frozen=True)
class _Spot:
    """Where one picture comes from and where its result goes."""

    work: Work
    index: int  # position in the input
    place: np.ndarray  # uint8 [room]


@dataclass(frozen=True)
class _File:
    path: str
    facts: tuple[int, int, int]  # size, time of change in ns, inode; size < 0: nobody could look at it

    def is_still(self, found: os.stat_result) -> bool:
        return self.facts[0] < 0 or (found.st_size, found.st_mtime_ns, signed(found.st_ino)) == self.facts


def _tried(read: Callable[[T, _Spot], Row], source: T, spot: _Spot) -> Row:
    try:
        return read(source, spot)
    except Undecodable as e:
        return Row(status=BAD, reason=str(e))


def _from_bytes(blob: bytes | memoryview, spot: _Spot) -> Row:
    fits = spot.work.encoded and len(blob) <= len(spot.place)
    if fits and (found := left_encoded(blob, spot.work.recipe)) is not None:
        spot.place[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
        return found
    return _pixels(BytesIO(blob), spot)


def _from_file(listed: _File, spot: _Spot) -> Row:
    try:
        file = open_regular(listed.path)
    except OSError as e:
        if (moved := _now(listed)) != GOOD:
            return Row(status=moved)
        dangling = isinstance(e, FileNotFoundError)
        raise Undecodable(f"cannot be decoded: {'it is a broken link' if dangling else e.strerror}") from e
    with file:
        row = _tried(_read, (file, listed.facts[0]), spot)
        return row if listed.is_still(os.fstat(file.fileno())) else Row(status=CHANGED)


def _read(source: tuple[BufferedReader, int], spot: _Spot) -> Row:
    file, size = source
    if spot.work.encoded and 0 <= size <= len(spot.place):
        try:
            count = file.readinto(spot.place[:size].data)
        except OSError as e:
            raise Undecodable(f"cannot be decoded: {e.strerror}") from e
        if (found := left_encoded(spot.place[:count].data, spot.work.recipe)) is not None:
            return found
        return _pixels(BytesIO(spot.place[:count].tobytes()), spot)
    return _pixels(file, spot)


def _now(listed: _File) -> int:
    """Whether a file that cannot be opened is bad, has changed or has vanished."""
    known = listed.facts[0] >= 0
    try:
        found = os.stat(listed.path)  # noqa: PTH116 - raises nothing but OSError
    except OSError:
        return VANISHED if known else GOOD
    if known and not stat.S_ISREG(found.st_mode):
        return VANISHED
    return GOOD if listed.is_still(found) else CHANGED


def left_encoded(data: bytes | bytearray | memoryview, recipe: Recipe) -> Row | None:
    """The row of a JPEG that is left for a device to decode; None if it must be decoded here.

    A device decodes baseline JPEGs in batches. It decodes others one by one, with much work for a core of the host. Nor
    does it get JPEGs that are visibly damaged: its engines could hang.
    """
    header = jpeg.parse(data)
    if header is None or not header.plain or header.kind != jpeg.BASELINE:
        return None
    if not recipe.fits(header.height, header.width):
        return None
    view = memoryview(data).cast("B")
    end = jpeg_scan.end_of(view, header)
    if end is None:
        return None
    alike = jpeg.alike(view, header)
    return Row(status=GOOD, length=end, height=header.height, width=header.width, alike=alike)


def _pixels(file: BinaryIO, spot: _Spot) -> Row:
    recipe, crops = spot.work.recipe, spot.work.crops
    found = pixels(file, recipe) if crops is None else pixels(file, recipe, partial(crops.rectangle, spot.index))
    spot.place[: recipe.nbytes].reshape(recipe.shape)[...] = found
    return Row(status=GOOD, length=recipe.nbytes, height=recipe.size[0], width=recipe.size[1])
