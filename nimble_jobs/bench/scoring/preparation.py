"""Weights that tell pictures apart, without a download: random ones, fitted to a few pictures.

Random weights alone give every picture the same class, so that top-1 compares nothing. Here the statistics of batch
normalisation are those of some pictures, and the classifier is shifted and scaled so that each class has mean 0 and
the same spread over them. Only a few classes compete: among a thousand, the rounding of pixels alone would decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from nimble_jobs.bench.loops.normal import MEAN, STD
from nimble_jobs.engine.private.modules import BatchNorm
from nimble_jobs.models.build import build
from nimble_jobs.spec.model import ModelSpec

PICTURES = 64
_BATCH = 32
_SPREAD = 3.0  # standard deviation of a class's logits
_CLASSES = 8  # that compete
_NEVER = -100.0  # the logit of all others


def fitted(name: str, files: Sequence[Path], side: int) -> nn.Module:
    """A torchvision model on the CPU, in eval mode, fp32. The same files give the same weights. Raises ModelError."""
    model = build(ModelSpec(source=f"torchvision:{name}", seed=0))
    x = torch.stack([_pixels(file, side) for file in files[:PICTURES]])
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
            module.train()
    with torch.no_grad():
        for part in x.split(_BATCH):
            model(part)
        model.eval()
        logits = torch.cat([model(part) for part in x.split(_BATCH)])
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
        for linear in last:
            factor = _SPREAD / logits.std(0).clamp_min(1e-6)
            linear.bias.copy_((linear.bias - logits.mean(0)) * factor)
            linear.weight.mul_(factor[:, None])
            linear.weight[_CLASSES:], linear.bias[_CLASSES:] = 0.0, _NEVER
    return model


def _pixels(file: Path, side: int) -> torch.Tensor:
    """float32 [3, side, side], normalised."""
    with Image.open(file) as image:
        small = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    x = (np.asarray(small, dtype=np.float32) / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return torch.from_numpy(x).permute(2, 0, 1)
