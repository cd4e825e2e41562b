"""The training tasks of the benchmark: a network with its head, random batches with random labels, an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from nimble_jobs.bench import zoo
from nimble_jobs.bench.zoo import ZOO
from nimble_jobs.errors import ModelError
from nimble_jobs.planner.step.request import OptimizerRecipe

_SMALL = 64  # images of at most so many pixels get a head of ten classes, as CIFAR-10 has
_FEATURES = 768  # of BERT-base


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained."""

    make: Callable[[], nn.Module]  # on the CPU, in training mode, always with the same weights
    input_shape: tuple[int, ...]  # of one record
    below: int | None  # integer inputs are from 0 up to this, exclusive
    classes: int
    recipe: OptimizerRecipe
    lr: float

    def batch(self, size: int, seed: int) -> dict[str, torch.Tensor]:
        """A random batch on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        shape = (size, *self.input_shape)
        if self.below is None:
            x = torch.randn(shape, generator=generator)
        else:
            x = torch.randint(self.below, shape, generator=generator)
        return {"x": x, "y": torch.randint(self.classes, (size,), generator=generator)}


class Classifier(nn.Module):
    """BERT with a linear head over the pooled features."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(_FEATURES, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(x)["pooler_output"])
        return logits


def case_of(name: str) -> Case:
    """The case of a network of the zoo, NAME or NAME@SIDE. Raises ModelError."""
    network, _, side = name.partition("@")
    if network not in ZOO:
        raise ModelError(f"{name}: the zoo has no such network")
    entry = ZOO[network]
    if entry.below is not None:
        return Case(
            make=lambda: _seeded(lambda: Classifier(zoo.create(network), 2)),
            input_shape=entry.input_shape,
            below=entry.below,
            classes=2,
            recipe=OptimizerRecipe(name="adamw", weight_decay=0.01),
            lr=5e-5,
        )
    pixels = int(side) if side else entry.input_shape[-1]
    classes = 10 if pixels <= _SMALL else 1000
    return Case(
        make=lambda: _seeded(lambda: _images(network, pixels, classes)),
        input_shape=(3, pixels, pixels),
        below=None,
        classes=classes,
        recipe=OptimizerRecipe(name="sgd", momentum=0.9, weight_decay=5e-4),
        lr=1e-3,  # larger ones make rounding errors grow too fast for losses to be compared
    )


def _images(network: str, pixels: int, classes: int) -> nn.Module:
    if pixels == ZOO[network].input_shape[-1]:
        return zoo.create(network)
    from nimble_jobs.bench.zoo.classics import classic  # torchvision takes a second to import

    return classic(network, pixels, num_classes=classes)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return make().train()
