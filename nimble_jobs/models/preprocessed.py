"""A model together with the preprocessing of its records on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from nimble_jobs.preprocess import SIGNED, Preprocess

_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601-2, as on the host
MASKS = {"uint16": (torch.int32, 0xFFFF), "uint32": (torch.int64, 0xFFFFFFFF)}  # undo the sign, in a wider type


def crossing_name(dtype: str) -> str:
    """torch's name for the type in which values of a stored type are sent to the device."""
    return SIGNED.get(dtype, dtype)


def crossing_dtype(preprocess: Preprocess) -> torch.dtype:
    """The dtype in which records are sent to the device: `preprocess.dtype`, or a signed one with the same bits."""
    found = getattr(torch, crossing_name(preprocess.dtype))
    assert isinstance(found, torch.dtype)
    return found


class Preprocessed(nn.Module):
    """Takes batches [n, *preprocess.shape] as they are stored, preprocesses them and calls the model.

    The arithmetic is the same as on the host, in the same order, in float32. Each operation rounds once, unless a
    compiler fuses some. Images reach the model in the memory format of its weights.
    """

    mean: torch.Tensor | None  # float32, of one value or one for each channel
    std: torch.Tensor | None

    def __init__(self, model: nn.Module, preprocess: Preprocess, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is the type of the model's input. Whole numbers always become int64."""
        super().__init__()
        self.model = model
        self.preprocess = preprocess
        self._dtype = dtype
        self._scale = 1.0 if preprocess.scale is None else float(np.float32(preprocess.scale))
        trailing = 2 if preprocess.layout is not None else 0
        for name in ("mean", "std"):
            values = getattr(preprocess, name)
            held = None
            if values is not None:  # on the device: torch multiplies by the inverse of a divisor on the host
                held = torch.tensor(values, dtype=torch.float32).reshape(-1, *[1] * trailing).to(device)
            self.register_buffer(name, held, persistent=False)
        self._laid_out = shown_layout(model)
        self.training = model.training  # and nothing of the model's

    def forward(self, x: torch.Tensor) -> Any:
        """The model's own outputs."""
        if self.preprocess.dtype in MASKS:
            wide, mask = MASKS[self.preprocess.dtype]
            x = x.to(wide) & mask
        if self.preprocess.whole:
            return self.model(x.to(torch.int64))
        if self.preprocess.layout is not None:
            x = self._image(x)
        x = x.to(torch.float32)
        if self._scale != 1.0:
            x = x * self._scale
        if self.mean is not None:
            x = x - self.mean
        if self.std is not None:
            x = x / self.std
        return self.model(x.to(self._dtype))

    def _image(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [n, C, H, W] before the arithmetic."""
        steps = self.preprocess
        if steps.layout == "hw":
            x = x.unsqueeze(1)
        elif steps.layout == "hwc":
            x = x.permute(0, 3, 1, 2)
        layout = memory_format(self.model, self._laid_out)
        if steps.resize is not None:
            x = x.to(torch.float32, memory_format=torch.contiguous_format)
            x = F.interpolate(x, size=steps.resize, mode="bilinear", antialias=True)
        if steps.center_crop is not None:
            height, width = steps.center_crop
            top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
            x = x[..., top : top + height, left : left + width]
        if steps.channels is not None:
            x = _to_channels(x, steps.channels)
        return x.to(torch.float32, memory_format=layout)


def memory_format(model: nn.Module, shown: tuple[str, ...]) -> torch.memory_format:
    """The memory format of the weight that `shown_layout` found; contiguous if it found none."""
    if shown:
        weight: Any = model
        for name in shown:
            weight = getattr(weight, name)
        if weight.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
    return torch.contiguous_format


def inner(module: nn.Module) -> nn.Module:
    """The model itself, which takes preprocessed records."""
    return module.model if isinstance(module, Preprocessed) else module


def shown_layout(model: nn.Module) -> tuple[str, ...]:
    """The path to a weight whose strides are either contiguous or channels-last, never both; empty if there is none."""
    for name, weight in model.named_parameters():
        if weight.dim() == 4 and weight.shape[1] > 1 and weight.shape[2] * weight.shape[3] > 1:
            return tuple(name.split("."))
    return ()


def _to_channels(x: torch.Tensor, channels: int) -> torch.Tensor:
    """As `data.transform.to_channels`."""
    if x.shape[1] == 1:
        return x.expand(-1, channels, -1, -1)
    x = x[:, :3]
    if channels == 3:
        return x
    red, green, blue = (x[:, i : i + 1].to(torch.float32) * _LUMA[i] for i in range(3))
    return red + green + blue
