"""The networks of the benchmarks, by name. Names and input shapes are known without torch; `create` builds.

`ZOO` holds the twelve networks of the paper's evaluation. NASNet-A, DARTS and AmoebaNet are written here from their
papers; torchvision builds the classics, transformers BERT. `MORE` holds ten that the paper does not have, named as
in torchvision and timm.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nimble_jobs.errors import ModelError
from nimble_jobs.models.source import similar

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["MORE", "ZOO", "ZooEntry", "create", "entry", "example"]


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """How a network is built, and what it takes."""

    factory: Callable[..., nn.Module]
    input_shape: tuple[int, ...]  # of one record
    dtype: str = "float32"  # of the input
    below: int | None = None  # integer inputs are from 0 up to this, exclusive


def create(name: str, seed: int = 0, *, drawn: bool = True) -> nn.Module:
    """The network on the CPU, in fp32 and eval mode, with random weights that the seed decides. With
    `drawn=False` its parameters are uninitialised; load weights afterwards.

    The global generator is left as it was found. Raises ModelError for an unknown name or a missing package.
    """
    factory = entry(name).factory
    import torch

    from nimble_jobs.models.undrawn import Undrawn

    with torch.random.fork_rng(devices=[]), nullcontext() if drawn else Undrawn():
        torch.default_generator.manual_seed(seed)
        return factory().eval()


def example(name: str, batch: int = 1, seed: int = 0) -> Tensor:
    """A random input on the CPU: noise of unit variance, or tokens. Raises ModelError for an unknown name."""
    made = entry(name)
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (batch, *made.input_shape)
    if made.below is not None:
        return torch.randint(made.below, shape, generator=generator, dtype=getattr(torch, made.dtype))
    return torch.randn(shape, generator=generator, dtype=getattr(torch, made.dtype))


def entry(name: str) -> ZooEntry:
    """The entry of a network in `ZOO` or `MORE`. Raises ModelError for an unknown name."""
    found = ZOO.get(name) or MORE.get(name)
    if found is None:
        raise ModelError(f"the zoo has no model {name!r}{similar(name, [*ZOO, *MORE])}")
    return found


def _built(file: str, function: str, *args: Any, **kwargs: Any) -> nn.Module:
    factory: Callable[..., nn.Module] = getattr(importlib.import_module(f"{__name__}.{file}"), function)
    return factory(*args, **kwargs)


def _images(file: str, function: str, side: int) -> ZooEntry:
    return ZooEntry(factory=partial(_built, file, function), input_shape=(3, side, side))


def _classic(name: str, side: int) -> ZooEntry:
    return ZooEntry(factory=partial(_built, "classics", "classic", name, side), input_shape=(3, side, side))


def _timm(name: str, side: int) -> ZooEntry:
    return ZooEntry(factory=partial(_built, "classics", "of_timm", name, side), input_shape=(3, side, side))


ZOO: dict[str, ZooEntry] = {
    "resnet50": _classic("resnet50", 224),
    "resnet101": _classic("resnet101", 224),
    "inception_v3": _classic("inception_v3", 299),
    "mobilenet_v2": _classic("mobilenet_v2", 224),
    "efficientnet_b0": _classic("efficientnet_b0", 224),
    "efficientnet_b5": _classic("efficientnet_b5", 456),
    "nasnet_a_mobile": _images("nasnet", "nasnet_a_mobile", 224),
    "nasnet_a_large": _images("nasnet", "nasnet_a_large", 331),
    "darts": _images("darts", "darts", 224),
    "amoebanet": _images("amoebanet", "amoebanet", 224),
    "googlenet": _classic("googlenet", 224),
    "bert_base": ZooEntry(
        factory=partial(_built, "bert", "bert_base"), input_shape=(128,), dtype="int64", below=30_522
    ),
}

MORE: dict[str, ZooEntry] = {
    "hrnet_w18": _timm("hrnet_w18", 224),
    "pnasnet5large": _timm("pnasnet5large", 331),
    "coat_tiny": _timm("coat_tiny", 224),
    "mixnet_m": _timm("mixnet_m", 224),
    "inception_v4": _timm("inception_v4", 299),
    "vit_base_patch16_224": _timm("vit_base_patch16_224", 224),
    "densenet121": _classic("densenet121", 224),
    "shufflenet_v2_x1_0": _classic("shufflenet_v2_x1_0", 224),
    "squeezenet1_1": _classic("squeezenet1_1", 224),
    "deeplabv3_resnet50": _classic("deeplabv3_resnet50", 520),
}
