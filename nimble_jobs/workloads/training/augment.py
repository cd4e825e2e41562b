"""Random changes to training images: where each of their pixels comes from.

Each record's draws are a function of seed, epoch and the record's position in the input (`nimble_jobs.chance`).
"""

from __future__ import annotations

import numpy as np

from nimble_jobs.chance import RandomCrops, below, draws
from nimble_jobs.data import Signature
from nimble_jobs.errors import DataError
from nimble_jobs.spec import AugmentSpec

_DRAWS = 3  # rows, columns, flips


class Augment:
    """Crops and flips of images. Raises DataError where records are no images."""

    def __init__(self, spec: AugmentSpec, signature: Signature, *, seed: int, decodes: bool = True) -> None:
        """`decodes`: records are encoded pictures."""
        self._part = spec.random_resized_crop
        if self._part is not None and not decodes:
            raise DataError(
                "train.augment.random_resized_crop: the input holds arrays; expected encoded pictures, or crop_padding"
            )
        self.padding, self._flip, self._seed = spec.crop_padding, spec.flip, seed
        self._shape = signature.shape
        if self and (len(signature.shape) != 3 or signature.dtype != "float32"):
            raise DataError(
                f"train.augment: records are {signature.dtype} {list(signature.shape)}; expected images, [C, H, W]"
            )

    def __bool__(self) -> bool:
        """Whether pixels of what was read are moved."""
        return bool(self.padding or self._flip)

    def crops(self, epoch: int) -> RandomCrops | None:
        """The random parts of pictures that an epoch trains on; None: whole ones."""
        if self._part is None:
            return None
        return RandomCrops(seed=self._seed, epoch=epoch, scale=self._part.scale, ratio=self._part.ratio)

    def places(self, indexes: np.ndarray, epoch: int) -> np.ndarray:
        """For each record the row that each of its rows comes from, then the same for columns: int64 [n, H + W].

        They are counted in the image with its padding; `indexes` int64 [n] are positions in the input.
        """
        words = draws(self._seed, epoch, indexes, _DRAWS)
        _, height, width = self._shape
        flips = words[:, 2] >> np.uint64(62)
        rows = self._axis(height, words[:, 0], flips & np.uint64(1), flipped=self._flip in ("vertical", "both"))
        columns = self._axis(width, words[:, 1], flips >> np.uint64(1), flipped=self._flip in ("horizontal", "both"))
        return np.concatenate([rows, columns], axis=1)

    def _axis(self, length: int, words: np.ndarray, flips: np.ndarray, *, flipped: bool) -> np.ndarray:
        starts = below(words, 2 * self.padding + 1)
        forward = np.arange(length)
        if not flipped:
            return starts[:, None] + forward
        return starts[:, None] + np.where(flips.astype(bool)[:, None], forward[::-1], forward)
