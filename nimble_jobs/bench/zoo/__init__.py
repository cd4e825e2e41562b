"""The networks of the benchmarks, by name. Names and input shapes are known without torch; `create` builds.

NASNet-A, DARTS and AmoebaNet are written here from their papers; torchvision builds the classics, transformers BERT.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nimble_jobs.errors import ModelError
from nimble_jobs.models.source import similar

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ZOO", "ZooEntry", "create", "example"]


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """How a network is built, and what it takes."""

    factory: Callable[..., nn.Module]
    input_shape: tuple[int, ...]  # of one record
    dtype: str = "float32"  # of the input
    below: int | None = None  # integer inputs are from 0 up to this, exclusive


def create(name: str, seed: int = 0) -> nn.Module:
    """The network on the CPU, in fp32 and eval mode, with random weights that the seed decides.

    The global generator is left as it was found. Raises ModelError for an unknown name or a missing package.
    """
    entry = _entry(name)
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return entry.factory().eval()


def example(name: str, batch: int = 1, seed: int = 0) -> Tensor:
    """A random input on the CPU: noise of unit variance, or tokens. Raises ModelError for an unknown name."""
    entry = _entry(name)
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (batch, *entry.input_shape)
    if entry.below is not None:
        return torch.randint(entry.below, shape, generator=generator, dtype=getattr(torch, entry.dtype))
    return torch.randn(shape, generator=generator, dtype=getattr(torch, entry.dtype))


def _entry(name: str) -> ZooEntry:
    if name not in ZOO:
        raise ModelError(f"the zoo has no model {name!r}{similar(name, list(ZOO))}")
    return ZOO[name]


def _built(file: str, function: str, *args: Any, **kwargs: Any) -> nn.Module:
    factory: Callable[..., nn.Module] = getattr(importlib.import_module(f"{__name__}.{file}"), function)
    return factory(*args, **kwargs)


def _images(file: str, function: str, side: int) -> ZooEntry:
    return ZooEntry(factory=partial(_built, file, function), input_shape=(3, side, side))


def _classic(name: str, side: int) -> ZooEntry:
    return ZooEntry(factory=partial(_built, "classics", "classic", name, side), input_shape=(3, side, side))


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
