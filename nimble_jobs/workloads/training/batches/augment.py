"""Random crops and flips of training images: which pixels go where, and moving them on the host or on the device.

What happens to a record depends on the seed, the epoch and its position in the input alone (`nimble_jobs.chance`).
Pixels are moved, never mixed. A device first does the host's arithmetic: the same operations in the same order, each
rounded once. So both give the same bits, unless the device resizes stored images.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from nimble_jobs.chance import RandomCrops, below, draws
from nimble_jobs.data import Signature
from nimble_jobs.errors import DataError
from nimble_jobs.models.preprocessed import Preprocessed
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.spec import AugmentSpec, TransformSpec

_DRAWS = 3  # random words for each record: rows, columns, flips


class Augment:
    """Draws crops and flips of images. Raises DataError if the records are not images."""

    def __init__(self, spec: AugmentSpec, signature: Signature, *, seed: int, decodes: bool = True) -> None:
        """`decodes` says that the records are encoded pictures."""
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
        """Whether pixels of images that were read are moved."""
        return bool(self.padding or self._flip)

    def crops(self, epoch: int) -> RandomCrops | None:
        """Which random parts of pictures an epoch trains on; None means whole pictures."""
        if self._part is None:
            return None
        return RandomCrops(seed=self._seed, epoch=epoch, scale=self._part.scale, ratio=self._part.ratio)

    def places(self, indexes: np.ndarray, epoch: int) -> np.ndarray:
        """For each record, the source row of each of its rows, followed by the source column of each of its columns.

        `indexes` int64 [n] are positions in the input. The result is int64 [n, H + W] and counts rows and columns of
        the padded image.
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


class Pixels:
    """Moves the pixels of a batch on the host.

    The padding that a crop can show is black: the value that a raw zero has after the transform's arithmetic.
    """

    def __init__(self, transform: TransformSpec, *, padding: int = 0) -> None:
        """`padding` is the number of black pixels at each side of an image."""
        self._padding = padding
        self._black = np.zeros((1, 1, 1), dtype=np.float32)
        for given, apply in ((transform.mean, np.subtract), (transform.std, np.divide)):
            if given is not None:
                self._black = apply(self._black, np.asarray(given, dtype=np.float32).reshape(-1, 1, 1))

    def __call__(self, x: np.ndarray, places: np.ndarray | None) -> np.ndarray:
        """What the model takes, from images float32 [n, C, H, W] and the result of `Augment.places`.

        If `places` is None, pixels stay where they are. The result may be `x` itself.
        """
        if places is None:
            return x
        n, channels, height, width = x.shape
        pad = self._padding
        wide = np.empty((n, channels, height + 2 * pad, width + 2 * pad), dtype=x.dtype)
        wide[:] = self._black
        wide[:, :, pad : pad + height, pad : pad + width] = x
        moved = np.empty_like(x)
        ends = places[:, [0, height - 1, height, height + width - 1]].tolist()
        for i, (top, bottom, left, right) in enumerate(ends):
            moved[i] = wide[i, :, _run(top, bottom), _run(left, right)]
        return moved

    def on(self, device: torch.device) -> DevicePixels:
        """The same for batches on a device."""
        return DevicePixels(self._padding, torch.from_numpy(self._black).to(device))


class DevicePixels:
    """`Pixels` on a device: a few kernels for a whole batch. It also takes records as they are stored."""

    def __init__(self, padding: int, black: torch.Tensor) -> None:
        self._padding, self._black = padding, black
        self._steps: dict[Preprocess, Preprocessed] = {}

    def __call__(
        self, x: torch.Tensor, places: torch.Tensor | None, preprocess: Preprocess | None = None
    ) -> torch.Tensor:
        """What the model takes; it may be `x` itself. `preprocess` is the arithmetic still to be done, if any."""
        if preprocess is not None:
            if preprocess not in self._steps:
                self._steps[preprocess] = Preprocessed(nn.Identity(), preprocess, torch.float32, x.device)
            with torch.no_grad():
                x = self._steps[preprocess](x)
        return x if places is None else self._moved(x, places)

    def _moved(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        n, channels, height, width = x.shape
        pad = self._padding
        if pad:
            wide = self._black.expand(n, channels, height + 2 * pad, width + 2 * pad).contiguous()
            wide[:, :, pad : pad + height, pad : pad + width] = x
            x = wide
        rows, columns = places.split([height, width], dim=1)
        flat = (rows[:, :, None] * x.shape[3] + columns[:, None, :]).view(n, 1, height * width)
        moved = x.reshape(n, channels, -1).gather(2, flat.expand(n, channels, height * width))
        return moved.view(n, channels, height, width)


def _run(first: int, last: int) -> slice:
    """The positions from the first to the last, forward or backward."""
    return slice(first, last + 1) if last >= first else slice(first, last - 1 if last else None, -1)
