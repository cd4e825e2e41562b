"""Small networks with parallel branches, each with what makes its schedule hard, and how they are recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nimble_jobs.bench.zoo.cells import Cell
from nimble_jobs.bench.zoo.nasnet import NORMAL
from nimble_jobs.engine.bind import Bound, bind
from nimble_jobs.engine.encode import operator
from nimble_jobs.engine.record import Recording, record, state_of
from nimble_jobs.schedule import Arg, Plan, Task, View

SHAPE = (2, 4, 6, 6)  # of the one input of each


class Inception(nn.Module):
    """Branches of one to three convolutions and a pool over one tensor, joined, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = InceptionCell(4), InceptionCell(16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).relu())
        return result


class InceptionCell(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 5, padding=2), nn.ReLU())
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(channels, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


class Nas(nn.Module):
    """A normal cell of NASNet-A: sums of branches that read the outputs of two earlier cells."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 3, padding=1)
        self.cell = Cell(NORMAL, (4, 4), 2, reduction=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.cell(x, self.stem(x)).mean((2, 3)))
        return result


class Residual(nn.Module):
    """Two blocks whose branch is added in place to what it came from."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        for left, right in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            a, b = left(y), right(y)
            y += a
            y = y.mul(b).relu_()
        return y


class InPlace(nn.Module):
    """Branches that fill the halves of one tensor, which others then change in part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.empty(x.shape[0], 8, *x.shape[2:])
        both[:, :4] = self.a(x).tanh()
        both[:, 4:] = self.b(x).sigmoid()
        low, high = both.chunk(2, dim=1)
        early = low.exp()  # must come before the next line
        low.mul_(3.0)
        high.add_(x)
        high[:, 1].zero_()
        return early + both.flip(1)[:, :4] - high.cos()


class Aliases(nn.Module):
    """Outputs that are views of one another, an input, a parameter; views that branches start from."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> dict[str, Any]:
        first, second = x.sin(), x.cos().transpose(2, 3)
        parts = [part.exp() * self.scale for part in first.chunk(2, dim=1)]
        joined = torch.cat(parts, dim=1) + second
        return {"joined": joined, "tail": joined[:, 1:].flatten(1), "again": joined, "given": x, "scale": self.scale}


class Dropouts(nn.Module):
    """Branches that draw masks from one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        drop = nn.functional.dropout
        return drop(self.a(x).relu(), 0.4) + drop(self.b(x).relu(), 0.3) * drop(x, 0.5)


NETS: dict[str, Callable[[], nn.Module]] = {
    "inception": Inception,
    "nas": Nas,
    "residual": Residual,
    "in-place": InPlace,
    "aliases": Aliases,
    "dropouts": Dropouts,
}


def net(name: str, device: str | torch.device = "cpu") -> nn.Module:
    """One of the networks in eval mode, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return NETS[name]().eval().to(device)


def recorded(module: nn.Module, x: Tensor) -> Recording:
    """What one call of a module with one tensor launches."""
    return record(module, {"x": x}, state_of(module), x.device, module)


def bound_to(module: nn.Module, recording: Recording, plan: Plan, device: str | torch.device = "cpu") -> Bound:
    """A plan over the module's state and buffers of its own."""
    return bind(
        recording.program,
        plan,
        state=state_of(module),
        constants=recording.constants,
        kernels=recording.kernels,
        device=torch.device(device),
    )


class Filling:
    """An operator as a kernel that fills tensors which it is given, as compilers' kernels do."""

    def __init__(self, task: Task, paths: list[tuple[int, ...]]) -> None:
        self.name = f"filling.{task.index}.{task.op}"
        self.write_only = {0}
        self.updated: set[int] = set()
        self._call = operator(task.op)
        self._paths = paths

    def __call__(self, given: list[Tensor], *args: Any, **kwargs: Any) -> None:
        result = self._call(*args, **kwargs)
        for path, tensor in zip(self._paths, given, strict=True):
            value = result
            for position in path:
                value = value[position]
            tensor.copy_(value)


def filling(recording: Recording) -> Recording:
    """The same program, in which no operator allocates what it returns: all intermediates are then in the arena."""
    tasks, kernels = [], {}
    for task in recording.program.tasks:
        existing = {v.buffer for v in (*task.reads, *task.mutates)}
        fresh = [(path, view) for path, view in _places(task.outputs) if view.buffer not in existing]
        if fresh:
            kernel = Filling(task, [path for path, _ in fresh])
            kernels[kernel.name] = kernel
            task = replace(
                task,
                op=kernel.name,
                args=(tuple(view for _, view in fresh), *task.args),
                outputs=None,
                mutates=tuple(dict.fromkeys((*task.mutates, *(view for _, view in fresh)))),
            )
        tasks.append(task)
    return replace(recording, program=replace(recording.program, tasks=tuple(tasks)), kernels=kernels)


def _places(outputs: Arg, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], View]]:
    """Every view in what a task returns, with where it stands there."""
    if isinstance(outputs, View):
        return [(path, outputs)]
    if isinstance(outputs, tuple):
        return [found for i, item in enumerate(outputs) for found in _places(item, (*path, i))]
    return []
