"""Encoded pictures to records, wherever they are stored: by threads of this process, or by processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from nimble_jobs.data.crew import PIECE_AWAY, Crew
from nimble_jobs.data.records import Signature
from nimble_jobs.data.source import Loaded, placed
from nimble_jobs.data.transform import arithmetic, crossing
from nimble_jobs.decoding.do import do
from nimble_jobs.decoding.pool import Decoders
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.decoding.work import BAD, GOOD, Answer, Item, Work
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.spec.model import TransformSpec

PIECE = 4  # pictures that one thread of this process decodes at a time

Picture = Item | bytes | memoryview  # a file as it was listed, or what a table holds
Moved = Callable[[int, int], str]  # position, CHANGED or VANISHED: the reason of a bad record, or an error


def _never(position: int, status: int) -> str:
    raise AssertionError(f"picture {position} comes from no file")


class ImageDecoder:
    """Encoded pictures to float32 CHW, or to uint8 as they are stored or cross to a device.

    Needs `size` (height, width) of the result, from the transform or from `set_size`.
    """

    def __init__(self, spec: TransformSpec, where: str) -> None:
        self._spec = spec
        self._channels = spec.channels or 3
        self.size = spec.center_crop or spec.resize
        self._arithmetic = arithmetic(spec, eight_bit=True, channels=self._channels, trailing=2, where=where)
        self.pixels = self._arithmetic if self._arithmetic.finite else None
        self._crew: Crew | None = None

    def set_size(self, size: tuple[int, int]) -> None:
        self.size = size

    @property
    def signature(self) -> Signature:
        return Signature(shape=(self._channels, *self.recipe.size), dtype="float32")

    @property
    def recipe(self) -> Recipe:
        """What is made of each picture before the arithmetic."""
        assert self.size is not None
        return Recipe(
            channels=self._channels, resize=self._spec.resize, center_crop=self._spec.center_crop, size=self.size
        )

    @property
    def preprocess(self) -> Preprocess | None:
        """What is left to be done to the pixels [height, width, channels] that `load` gives as `stored`."""
        left = self._spec.model_copy(update={"resize": None, "center_crop": None, "channels": None})
        return crossing(left, self.recipe.shape, "uint8", "hwc", self._arithmetic)

    def hire(self, decoders: Decoders) -> None:
        """From now on processes decode, until `dismiss`."""
        self._crew = Crew(decoders, PIECE_AWAY * self.recipe.nbytes)

    def dismiss(self) -> None:
        """Threads decode again."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def load(
        self,
        pictures: Sequence[Picture],
        *,
        raw: bool = False,
        stored: bool = False,
        into: np.ndarray | None = None,
        moved: Moved = _never,
    ) -> Loaded:
        """Decode them; with `raw` as uint8 CHW, before the arithmetic, with `stored` as uint8 [H, W, C].

        Undecodable pictures are bad records, as is one of another size than the rest.
        """
        recipe, crew = self.recipe, self._crew
        answers: list[Answer] = []
        kept: list[np.ndarray] = []
        step = PIECE_AWAY if crew is not None else max(1, len(pictures))
        for first in range(0, len(pictures), step):
            some = pictures[first : first + step]
            work = Work(recipe=recipe, items=tuple(_items(some, recipe)))
            blobs = [p for p in some if not isinstance(p, Item)]
            if crew is None:
                memory = np.empty(len(some) * recipe.nbytes, dtype=np.uint8)
                answer = do(work, memory, blobs)
                kept.append(_good(memory, answer, recipe))
            else:
                with crew.slot() as slot:
                    answer = crew.decoders.submit(_at(work, slot.start), crew.shared, blobs).result()
                    kept.append(_good(slot.memory, answer, recipe).copy())
            answers.append(answer)
        rows = [row for answer in answers for row in answer.rows]
        bad = {
            i: row.reason if row.status == BAD else moved(i, row.status)
            for i, row in enumerate(rows)
            if row.status != GOOD
        }
        x = np.concatenate(kept) if kept else np.empty((0, *recipe.shape), dtype=np.uint8)
        if not stored:
            x = x.transpose(0, 3, 1, 2)
            x = np.ascontiguousarray(x) if raw else self._arithmetic.apply(np.array(x, dtype=np.float32, order="C"))
        busy_s = sum(a.busy_s for a in answers) if crew is not None else None
        return Loaded(x=placed(x, into), bad=bad, busy_s=busy_s)


def _items(pictures: Sequence[Picture], recipe: Recipe) -> Iterator[Item]:
    for i, picture in enumerate(pictures):
        offset = i * recipe.nbytes
        if isinstance(picture, Item):
            yield replace(picture, offset=offset, room=recipe.nbytes)
        else:
            yield Item(offset=offset, room=recipe.nbytes, size=len(picture))


def _at(work: Work, start: int) -> Work:
    return replace(work, items=tuple(replace(item, offset=item.offset + start) for item in work.items))


def _good(memory: np.ndarray, answer: Answer, recipe: Recipe) -> np.ndarray:
    """uint8 [n, H, W, C]: the good ones of the pictures that lie from the beginning of `memory` on."""
    x = memory[: len(answer.rows) * recipe.nbytes].reshape(len(answer.rows), *recipe.shape)
    good = np.array([row.status == GOOD for row in answer.rows], dtype=bool)
    return x if good.all() else x[good]
