"""Decodes pictures, from files or tables, into records, with threads of this process or with other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nimble_jobs.data.crew import Crew
from nimble_jobs.data.records import Signature
from nimble_jobs.data.source import Loaded, Wanted, placed
from nimble_jobs.data.transform import arithmetic, crossing, notes_of, of_pictures
from nimble_jobs.decoding.do import do
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.decoding.work import BAD, GOOD, STATUS, Files, Work
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.spec.transform import TransformSpec

PIECE = 4  # pictures that one thread decodes at a time

Pictures = Files | Sequence[bytes | memoryview | str]  # or what a table holds, or why it holds nothing
# Called with position and CHANGED or VANISHED; returns a bad record's reason or raises.
Moved = Callable[[int, int], str]


def _never(position: int, status: int) -> str:
    raise AssertionError(f"picture {position} comes from no file")


class ImageDecoder:
    """Decodes pictures to float32 CHW, or to uint8 as stored or as sent to a device.

    Needs `size` (height, width) of the result, from the transform or from `set_size`.
    """

    def __init__(self, spec: TransformSpec, where: str) -> None:
        """Raises DataError if the transform is the model's own and is not understood, or does not fit the pictures."""
        spec = of_pictures(spec)
        self.notes = notes_of(spec)
        self._spec = spec
        self._channels = spec.channels or 3
        self.size = spec.center_crop or spec.resize
        self._arithmetic = arithmetic(spec, eight_bit=True, channels=self._channels, trailing=2, where=where)
        self.crew: Crew | None = None  # processes that decode; None: threads decode

    def set_size(self, size: tuple[int, int]) -> None:
        self.size = size

    @property
    def signature(self) -> Signature:
        shape = (self._channels, *self.recipe.size)
        return Signature(shape=shape, dtype="float32", stored="uint8", by_255=self._spec.scale is None)

    @property
    def recipe(self) -> Recipe:
        """How each picture is decoded and resized, before the arithmetic."""
        assert self.size is not None
        return Recipe(
            channels=self._channels,
            resize=self._spec.resize,
            center_crop=self._spec.center_crop,
            size=self.size,
            shortest_edge=self._spec.shortest_edge,
            interpolation=self._spec.interpolation or "bilinear",
        )

    @property
    def preprocess(self) -> Preprocess | None:
        """The steps that remain for pixels [height, width, channels] that `load` gives as `stored`."""
        left = self._spec.model_copy(update={"resize": None, "center_crop": None, "channels": None})
        return crossing(left, self.recipe.shape, "uint8", "hwc", self._arithmetic)

    def load(
        self,
        pictures: Pictures,
        indexes: np.ndarray,
        wanted: Wanted,
        *,
        into: np.ndarray | None,
        moved: Moved = _never,
    ) -> Loaded:
        """Decode the pictures at these positions of the input. As `stored`, they become uint8 [H, W, C], before the
        arithmetic. As `encoded`, plain JPEGs are left to a device. Each picture gets its row of `into`.

        Undecodable pictures, and pictures of another size than the rest, are bad records.
        """
        if wanted.encoded:
            assert into is not None
            rows, reasons, busy_s = self._done(pictures, indexes, wanted, into)
            return Loaded(x=into, bad=_bad(rows, reasons, moved), rows=rows, busy_s=busy_s)
        pixels = into if wanted.stored else None
        if pixels is None:
            pixels = np.empty((len(indexes), *self.recipe.shape), dtype=np.uint8)
        rows, reasons, busy_s = self._done(pictures, indexes, wanted, pixels.reshape(len(indexes), -1))
        bad = _bad(rows, reasons, moved)
        x = np.delete(pixels, list(bad), axis=0) if bad else pixels
        if not wanted.stored:
            x = x.transpose(0, 3, 1, 2)
            x = self._arithmetic.apply(np.array(x, dtype=np.float32, order="C"))
        return Loaded(x=x if x is into else placed(x, into), bad=bad, busy_s=busy_s)

    def _done(
        self, pictures: Pictures, indexes: np.ndarray, wanted: Wanted, into: np.ndarray
    ) -> tuple[np.ndarray, dict[int, str], float | None]:
        """What became of each picture, as in `Answer`; a good one lies in its row of `into`, uint8 [n, *]."""
        reasons: dict[int, str] = {}
        blobs: list[bytes | memoryview] = []
        files = pictures if isinstance(pictures, Files) else None
        if not isinstance(pictures, Files):
            reasons = {i: one for i, one in enumerate(pictures) if isinstance(one, str)}
            blobs = [one for one in pictures if not isinstance(one, str)]
        good = np.delete(np.arange(len(indexes)), list(reasons))
        room = into.shape[1]
        work = Work(
            recipe=self.recipe if wanted.crops is None else self.recipe.of_parts,
            places=np.stack([good * room, np.full(len(good), room)], axis=1),
            files=files,
            encoded=wanted.encoded,
            crops=wanted.crops,
            indexes=None if wanted.crops is None else indexes[good].astype(np.int64),
        )
        if self.crew is None:
            answer, busy_s = do(work, into.reshape(-1), blobs), None
        else:
            answer = self.crew.do(work, into, blobs)
            busy_s = answer.busy_s
        if not reasons:
            return answer.rows, answer.reasons, busy_s
        rows = np.zeros((len(indexes), answer.rows.shape[1]), dtype=np.int64)
        rows[:, STATUS] = BAD
        rows[good] = answer.rows
        return rows, reasons | {int(good[i]): why for i, why in answer.reasons.items()}, busy_s


def _bad(rows: np.ndarray, reasons: dict[int, str], moved: Moved) -> dict[int, str]:
    bad_rows = np.flatnonzero(rows[:, STATUS] != GOOD).tolist()
    return {i: reasons[i] if rows[i, STATUS] == BAD else moved(i, int(rows[i, STATUS])) for i in bad_rows}
