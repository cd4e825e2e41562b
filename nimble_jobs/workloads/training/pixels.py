"""From images as they were read to what the model takes: on the host for a training there, else on its device.

Pixels are moved, never mixed, and the arithmetic is that of the reader's transform, one rounding for each operation, in
the same order. So both ways give the same bits.
"""

from __future__ import annotations

import numpy as np
import torch

from nimble_jobs.data.transform import Arithmetic
from nimble_jobs.spec import TransformSpec


class Pixels:
    """Moves the pixels of a batch, and does the arithmetic that a raw reading, which gives uint8, left out.

    `places` is what `Augment.places` gives, for images with `padding` at each side; None: they stay where they are.
    What comes in at the side is black: the value that a raw zero has after the arithmetic.
    """

    def __init__(self, arithmetic: Arithmetic | None, transform: TransformSpec, *, padding: int = 0) -> None:
        """`arithmetic` is that of the reader, or of any of them, if they have one."""
        self._arithmetic = arithmetic
        self._padding = padding
        self._black = np.zeros((1, 1, 1), dtype=np.float32)
        for given, apply in ((transform.mean, np.subtract), (transform.std, np.divide)):
            if given is not None:
                self._black = apply(self._black, np.asarray(given, dtype=np.float32).reshape(-1, 1, 1))

    def __call__(self, x: np.ndarray, places: np.ndarray | None) -> np.ndarray:
        """What the model takes, of a batch as it was read."""
        if places is not None:
            x = self._moved(x, places)
        if x.dtype != np.uint8:
            return x
        assert self._arithmetic is not None
        return self._arithmetic.apply(x.astype(np.float32))

    def on(self, device: torch.device) -> DevicePixels:
        """The same for batches on a device."""
        steps = []
        found = self._arithmetic
        if found is not None:
            scale = None if found.scale == 1 else np.full((1, 1, 1), found.scale, dtype=np.float32)
            for name, values in (("mul_", scale), ("sub_", found.mean), ("div_", found.std)):
                if values is not None:  # as a tensor there: a division by a number would multiply with its inverse
                    steps.append((name, torch.from_numpy(values).to(device)))
        return DevicePixels(self._padding, torch.from_numpy(self._black).to(device), steps)

    def _moved(self, x: np.ndarray, places: np.ndarray) -> np.ndarray:
        n, channels, height, width = x.shape
        pad = self._padding
        wide = np.empty((n, channels, height + 2 * pad, width + 2 * pad), dtype=x.dtype)
        wide[:] = 0 if x.dtype == np.uint8 else self._black
        wide[:, :, pad : pad + height, pad : pad + width] = x
        moved = np.empty_like(x)
        ends = places[:, [0, height - 1, height, height + width - 1]].tolist()
        for i, (top, bottom, left, right) in enumerate(ends):
            moved[i] = wide[i, :, _run(top, bottom), _run(left, right)]
        return moved


class DevicePixels:
    """`Pixels` on a device, in a few kernels for a whole batch."""

    def __init__(self, padding: int, black: torch.Tensor, steps: list[tuple[str, torch.Tensor]]) -> None:
        self._padding, self._black, self._steps = padding, black, steps

    def __call__(self, x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """What the model takes; it may be x itself."""
        if places is not None:
            x = self._moved(x, places)
        if x.dtype == torch.uint8:
            x = x.float()
            for name, values in self._steps:
                getattr(x, name)(values)
        return x

    def _moved(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        n, channels, height, width = x.shape
        pad = self._padding
        if pad:
            wide = x.new_zeros(n, channels, height + 2 * pad, width + 2 * pad)
            if x.dtype != torch.uint8:
                wide.copy_(self._black)
            wide[:, :, pad : pad + height, pad : pad + width] = x
            x = wide
        rows, columns = places.split([height, width], dim=1)
        flat = (rows[:, :, None] * x.shape[3] + columns[:, None, :]).view(n, 1, height * width)
        moved = x.reshape(n, channels, -1).gather(2, flat.expand(n, channels, height * width))
        return moved.view(n, channels, height, width)


def _run(first: int, last: int) -> slice:
    """From the first to the last, forward or backward."""
    return slice(first, last + 1) if last >= first else slice(first, last - 1 if last else None, -1)
