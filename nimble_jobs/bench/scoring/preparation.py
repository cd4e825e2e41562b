"""Weights that tell pictures apart, without a download: random ones, fitted to a few pictures.

Random weights alone give every picture the same class, so that top-1 compares nothing. Here the statistics of batch
normalisation are those of some pictures, and the classifier says which of a few pictures, far apart, another is most
like. So most answers are clear, and rounding of pixels changes few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from nimble_jobs.bench.loops.normal import MEAN, STD
from nimble_jobs.engine.private.modules import BatchNorm
from nimble_jobs.errors import UsageError
from nimble_jobs.models.build import build
from nimble_jobs.plural import count
from nimble_jobs.spec.model import ModelSpec

PICTURES = 64
_BATCH = 32
_CLASSES = 8  # one for each picture that others are compared with
_SHARP = 8.0  # logits a class loses for a picture as far away as pictures are on average
_NEVER = -100.0  # the logit of all other classes


def fitted(name: str, files: Sequence[Path], side: int) -> nn.Module:
    """A torchvision model on the CPU, in eval mode, fp32. The same files give the same weights. Raises ModelError, and
    UsageError if no file can be decoded.
    """
    model = build(ModelSpec(source=f"torchvision:{name}", seed=0))
    pictures = list(islice(_decoded(files, side), PICTURES))
    if not pictures:
        raise UsageError(f"--images: none of {count(len(files), 'file')} can be decoded; expected JPEGs")
    x = torch.stack(pictures)
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
            module.train()
    with torch.no_grad():
        for part in x.split(_BATCH):
            model(part)
        model.eval()
        last = next((m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)), None)
        if last is not None:
            _compare(last, _inputs(model, last, x))
    return model


def _inputs(model: nn.Module, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What the layer gets, [n, features], for x [n, 3, side, side]."""
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for part in x.split(_BATCH):
        model(part)
    handle.remove()
    return torch.cat(seen)


def _compare(layer: nn.Linear, features: torch.Tensor) -> None:
    """Set the layer's weights so that class k is likely if the features are near to those of the chosen picture k.

    The chosen pictures lie far apart. The logit of a class is minus the squared distance to its picture, without the
    term that all classes share; so it is linear in the features.
    """
    chosen = [0]
    while len(chosen) < min(_CLASSES, layer.out_features, len(features)):
        chosen.append(int(torch.cdist(features, features[chosen]).amin(1).argmax()))
    points = features[chosen]
    scale = _SHARP / features.var(0).sum().clamp_min(1e-12)
    layer.weight.zero_()
    layer.bias.fill_(_NEVER)
    layer.weight[: len(points)] = 2 * scale * points
    layer.bias[: len(points)] = -scale * points.square().sum(1)
    layer.bias[: len(points)] -= (features @ layer.weight.T + layer.bias)[:, : len(points)].mean()  # fits fp16


def _decoded(files: Sequence[Path], side: int) -> Iterator[torch.Tensor]:
    """Pixels of the files that can be decoded. What the others do to a system is for that system to say."""
    for file in files:
        with suppress(OSError, SyntaxError, ValueError):  # what Pillow raises on damaged files
            yield _pixels(file, side)


def _pixels(file: Path, side: int) -> torch.Tensor:
    """float32 [3, side, side], normalised."""
    with Image.open(file) as image:
        small = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    x = (np.asarray(small, dtype=np.float32) / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return torch.from_numpy(x).permute(2, 0, 1)
