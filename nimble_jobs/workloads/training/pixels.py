"""Pixels of training images moved to where a crop or a flip puts them, on the host or on a device.

Pixels are moved, never mixed. Before that a batch on a device goes through the arithmetic that the host would have
done, one rounding for each operation, in the same order. So both ways give the same bits, unless stored images are
resized on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from nimble_jobs.models.preprocessed import Preprocessed
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.spec import TransformSpec


class Pixels:
    """Moves the pixels of a batch of values, float32 [n, C, H, W].

    `places` is what `Augment.places` gives, for images with `padding` at each side; None: they stay where they are.
    What comes in at the side is black: the value that a raw zero has after the arithmetic.
    """

    def __init__(self, transform: TransformSpec, *, padding: int = 0) -> None:
        self._padding = padding
        self._black = np.zeros((1, 1, 1), dtype=np.float32)
        for given, apply in ((transform.mean, np.subtract), (transform.std, np.divide)):
            if given is not None:
                self._black = apply(self._black, np.asarray(given, dtype=np.float32).reshape(-1, 1, 1))

    def __call__(self, x: np.ndarray, places: np.ndarray | None) -> np.ndarray:
        """What the model takes; it may be x itself."""
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
    """`Pixels` on a device, in a few kernels for a whole batch, of values or of records as they are stored."""

    def __init__(self, padding: int, black: torch.Tensor) -> None:
        self._padding, self._black = padding, black
        self._steps: dict[Preprocess, Preprocessed] = {}

    def __call__(
        self, x: torch.Tensor, places: torch.Tensor | None, preprocess: Preprocess | None = None
    ) -> torch.Tensor:
        """What the model takes; it may be x itself. `preprocess` is what is left to do to `x`; None: nothing."""
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
    """From the first to the last, forward or backward."""
    return slice(first, last + 1) if last >= first else slice(first, last - 1 if last else None, -1)
