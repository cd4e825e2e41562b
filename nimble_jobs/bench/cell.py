"""One model with one dtype and batch size on the device: the module, its inputs, and what eager says about them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nimble_jobs.bench import zoo
from nimble_jobs.bench.request import CHANNELS_LAST, CONTIGUOUS
from nimble_jobs.bench.runners import Runner, Tensors
from nimble_jobs.engine.compact import compact
from nimble_jobs.engine.device import synchronize
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import CheckFailed, ModelError
from nimble_jobs.models.build import DTYPES, build
from nimble_jobs.spec.model import ModelSpec

ROTATED = 8  # inputs that take turns while a system is timed
CHECKED = 3  # others, with which its outputs are compared
_SIDE = 224
_SCHEME = "torchvision:"

# Largest accepted relative norm against eager. Sums in another order round otherwise, layer after layer, while a wrong
# result is of the order of one. fp32 means TF32 on a GPU, whose products have ten bits.
TOLERANCE = {"fp32": 1e-2, "fp16": 2e-2, "bf16": 1e-1}


def model_of(name: str) -> nn.Module:
    """The model on the CPU in fp32, with random weights from seed 0. Raises ModelError."""
    if not name.startswith(_SCHEME):
        return zoo.create(name)
    return build(ModelSpec(source=name.partition("@")[0], seed=0))


def example_of(name: str, batch: int, seed: int) -> torch.Tensor:
    """A random input on the CPU in fp32 or integers. Raises ModelError for a side that is no number."""
    if not name.startswith(_SCHEME):
        return zoo.example(name, batch, seed)
    side = name.partition("@")[2] or str(_SIDE)
    if not side.isdecimal() or int(side) < 1:
        raise ModelError(f"{name}: expected the side of the images after the @, in pixels")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((batch, 3, int(side), int(side)), generator=generator)


class Batches(ABC):
    """What is timed alike: batches that take turns, in each memory format, and what a right result is."""

    def __init__(self, on_host: list[dict[str, torch.Tensor]], batch: int, device: torch.device) -> None:
        self.batch = batch
        self.device = device
        self._on_host = on_host
        self._on_device: dict[str, list[dict[str, torch.Tensor]]] = {}
        self._pinned: dict[str, list[dict[str, torch.Tensor]]] = {}

    def inputs(self, layout: str) -> list[dict[str, torch.Tensor]]:
        """The batches on the device."""
        if layout not in self._on_device:
            self._on_device[layout] = [laid_out(moved(tensors, self.device), layout) for tensors in self._on_host]
        return self._on_device[layout]

    def inputs_on_host(self, layout: str) -> list[dict[str, torch.Tensor]]:
        """The same, pinned where there is a GPU."""
        if layout not in self._pinned:
            pin = self.device.type == "cuda"
            here = [laid_out(tensors, layout) for tensors in self._on_host]
            self._pinned[layout] = [{n: t.pin_memory() if pin else t for n, t in i.items()} for i in here]
        return self._pinned[layout]

    def ready(self, layout: str) -> None:
        """Make the batches in a layout, before anybody's memory is measured."""
        self.inputs(layout)
        self.inputs_on_host(layout)

    @abstractmethod
    def check(self, runner: Any, layout: str) -> float:
        """How far a system's results are from eager's. Raises CheckFailed above the tolerance."""


class Cell(Batches):
    """Weights and inputs that every system shares."""

    def __init__(
        self, name: str, model: nn.Module, dtype: str, batch: int, device: torch.device, tolerance: float | None
    ) -> None:
        self.dtype = dtype
        super().__init__([self._input(example_of(name, batch, seed)) for seed in range(ROTATED)], batch, device)
        self.tolerance = tolerance if tolerance is not None else TOLERANCE[dtype]
        self._modules = {CONTIGUOUS: copy.deepcopy(model).to(DTYPES[dtype]).to(device)}
        fresh = [self._input(example_of(name, batch, 1000 + seed)) for seed in range(CHECKED)]
        self._fresh = [moved(tensors, device) for tensors in fresh]
        self._expected: list[dict[str, torch.Tensor]] = []
        with torch.no_grad():
            for inputs in self._fresh:
                result = flatten_outputs(self._modules[CONTIGUOUS](*inputs.values()))
                self._expected.append({n: t.cpu() for n, t in result.items()})
        synchronize(device)

    def module(self, layout: str) -> nn.Module:
        """The module with its weights in a layout: the same values, and one copy a layout."""
        if layout not in self._modules and layout == CHANNELS_LAST:
            plain = copy.deepcopy(self._modules[CONTIGUOUS])
            self._modules[layout] = plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self._modules.get(layout, self._modules[CONTIGUOUS])

    def own_module(self) -> nn.Module:
        """A copy for those who rearrange the weights, in memory of its own, which they can give back."""
        found = copy.deepcopy(self._modules[CONTIGUOUS])
        compact(found, self.device)
        return found

    def ready(self, layout: str) -> None:
        """Make the module and its inputs in a layout, before anybody's memory is measured."""
        self.module(layout)
        super().ready(layout)

    def check(self, runner: Runner, layout: str) -> float:
        """Largest relative norm of the outputs against eager. Raises CheckFailed above the tolerance."""
        return self._compare([self._run(runner, laid_out(inputs, layout)) for inputs in self._fresh])

    def _run(self, runner: Runner, inputs: Tensors) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            runner.load(inputs)
            runner.run()
            found = {n: t.detach().clone() for n, t in runner.outputs().items()}
        synchronize(self.device)
        return found

    def _compare(self, found: Sequence[dict[str, torch.Tensor]]) -> float:
        worst = 0.0
        for outputs, expected in zip(found, self._expected, strict=True):
            if len(outputs) != len(expected):
                raise CheckFailed(f"wrong outputs: {len(outputs)} of them, eager has {len(expected)}")
            for (name, wanted), output in zip(expected.items(), outputs.values(), strict=True):
                norm = relative_norm(output.cpu(), wanted)
                if not norm <= self.tolerance:
                    raise CheckFailed(
                        f"wrong output {name!r}: it differs from eager by a relative norm of {norm:.3g}, "
                        f"the tolerance is {self.tolerance:.3g}"
                    )
                worst = max(worst, norm)
        return worst

    def _input(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": tensor.to(DTYPES[self.dtype]) if tensor.is_floating_point() else tensor}


def moved(tensors: Tensors, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors on a device."""
    return {n: t.to(device) for n, t in tensors.items()}


def laid_out(tensors: Tensors, layout: str) -> dict[str, torch.Tensor]:
    """The tensors, images in a memory format."""
    if layout != CHANNELS_LAST:
        return dict(tensors)
    return {n: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for n, t in tensors.items()}
