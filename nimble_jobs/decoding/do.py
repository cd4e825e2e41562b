"""What one process, or one thread, does at a time: a few pictures from their files or bytes into shared memory."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from functools import partial
from io import BufferedReader, BytesIO
from typing import BinaryIO

import numpy as np

from nimble_jobs.decoding import jpeg
from nimble_jobs.decoding.picture import Undecodable, pixels
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.decoding.work import BAD, CHANGED, GOOD, VANISHED, Answer, Item, Row, Work
from nimble_jobs.regular import open_regular


def do(work: Work, memory: np.ndarray, blobs: Sequence[bytes | memoryview] = ()) -> Answer:
    """Do all of it. `memory` is uint8 [*]; `blobs` are the bytes of those items that have no path, in their order."""
    began = time.perf_counter()
    left = iter(blobs)
    rows = tuple(_one(item, work, memory, None if item.path is not None else next(left)) for item in work.items)
    return Answer(rows=rows, busy_s=time.perf_counter() - began)


def _one(item: Item, work: Work, memory: np.ndarray, blob: bytes | memoryview | None) -> Row:
    place = memory[item.offset : item.offset + item.room]
    try:
        if blob is not None:
            return _from_bytes(blob, item, work, place)
        return _from_file(item, work, place)
    except Undecodable as e:
        return Row(status=BAD, reason=str(e))


def _from_bytes(blob: bytes | memoryview, item: Item, work: Work, place: np.ndarray) -> Row:
    if work.encoded and len(blob) <= len(place) and (found := left_encoded(blob, work.recipe)) is not None:
        place[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
        return found
    return _pixels(BytesIO(blob), item, work, place)


def _from_file(item: Item, work: Work, place: np.ndarray) -> Row:
    assert item.path is not None
    try:
        file = open_regular(item.path)
    except OSError as e:
        if (moved := _now(item)) != GOOD:
            return Row(status=moved)
        dangling = isinstance(e, FileNotFoundError)
        raise Undecodable(f"cannot be decoded: {'a link to no file' if dangling else e.strerror}") from e
    with file:
        try:
            row = _read(file, item, work, place)
        except Undecodable as e:
            row = Row(status=BAD, reason=str(e))
        return row if _same(item, os.fstat(file.fileno())) else Row(status=CHANGED)


def _read(file: BufferedReader, item: Item, work: Work, place: np.ndarray) -> Row:
    size = item.size
    if work.encoded and 0 <= size <= len(place):
        try:
            count = file.readinto(place[:size].data)
        except OSError as e:
            raise Undecodable(f"cannot be decoded: {e.strerror}") from e
        if (found := left_encoded(place[:count].data, work.recipe)) is not None:
            return found
        return _pixels(BytesIO(place[:count].tobytes()), item, work, place)
    return _pixels(file, item, work, place)


def _now(item: Item) -> int:
    """What became of a file that cannot be opened."""
    try:
        found = os.stat(item.path or "")  # noqa: PTH116 - raises nothing but OSError
    except OSError:
        return VANISHED if item.size >= 0 else GOOD
    if item.size >= 0 and not stat.S_ISREG(found.st_mode):
        return VANISHED
    return GOOD if _same(item, found) else CHANGED


def _same(item: Item, found: os.stat_result) -> bool:
    return item.size < 0 or (found.st_size, found.st_mtime_ns, found.st_ino) == (item.size, item.mtime_ns, item.inode)


def left_encoded(data: bytes | bytearray | memoryview, recipe: Recipe) -> Row | None:
    """The row of a JPEG that a device may decode; None: it goes another way.

    A device takes baseline ones in batches, but others one by one, with much work for a single core of the host.
    """
    header = jpeg.parse(data)
    if header is None or not header.plain or header.kind != jpeg.BASELINE:
        return None
    if not recipe.fits(header.height, header.width):
        return None
    return Row(status=GOOD, length=len(data), height=header.height, width=header.width, decoded=False)


def _pixels(file: BinaryIO, item: Item, work: Work, place: np.ndarray) -> Row:
    recipe, crops = work.recipe, work.crops
    found = pixels(file, recipe) if crops is None else pixels(file, recipe, partial(crops.rectangle, item.index))
    place[: recipe.nbytes].reshape(recipe.shape)[...] = found
    return Row(status=GOOD, length=recipe.nbytes, height=recipe.size[0], width=recipe.size[1])
