"""The ways to run a convolution with its bias, addition and activation, and how long each takes on a device.

A plain convolution followed by a pointwise kernel; cuDNN's fused convolution (bias, addition, ReLU); for 1x1
convolutions a matrix product with cuBLAS's epilogue for bias and ReLU, and our own kernel (`pointwise`); and if a few
blocks would take long sums, our kernel that divides them (`split_k`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from nimble_jobs.engine import measure
from nimble_jobs.engine.fused_convolutions import CONVOLUTION_ADD_RELU, CONVOLUTION_RELU, MEMORY_FORMAT
from nimble_jobs.kernel_switches import NOTHING, Kernel, Without
from nimble_jobs.kernels import ahead, choices, pointwise, pointwise_pass, split_k, split_k_pass, split_k_shape
from nimble_jobs.task_times import TaskTimes

Way = str  # "library", "fused", "product", "pointwise" with a tile of `pointwise`, or one of `split_k`
Follows = Literal["nothing", "bias", "relu", "add", "add-relu"]

_aten = torch.ops.aten
_KERNELS = {"fused": Kernel.FUSED_CONVOLUTION, "product": Kernel.PRODUCT, "pointwise": Kernel.POINTWISE}
POINTWISE = "pointwise "  # before a tile
# What our kernel for pointwise convolutions computes then: the activation, and whether there is another operand.
_AS_POINTWISE: dict[Follows, tuple[str, bool]] = {
    "nothing": ("", False),
    "bias": ("", False),
    "relu": ("relu", False),
    "add-relu": ("relu", True),
}
_FOLLOWS = "what follows"
_GAIN = 0.97  # another way must take less than this share of the plain convolution's time


@dataclass(frozen=True, kw_only=True)
class Group:
    """A convolution and what follows it: everything that decides its time.

    `follows` says what a separate pointwise kernel would have to do. It is `nothing` if such a kernel runs in any case
    and can include this work at no cost.
    """

    dtype: torch.dtype
    x: tuple[int, ...]
    weight: tuple[int, ...]
    out: tuple[int, ...]
    bias: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    follows: Follows

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        size = "x".join(map(str, self.weight[2:]))
        then = "" if self.follows == "nothing" else f", then {self.follows}"
        shapes = f"{'x'.join(map(str, self.x))} to {'x'.join(map(str, self.out))}"
        return f"convolution {size}, {str(self.dtype).removeprefix('torch.')}, {shapes}{then}"

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways that there are to run it."""
        fused: tuple[Way, ...] = ("fused",) if self.follows in ("relu", "add-relu") else ()
        ours = (f"{POINTWISE}{tile}" for tile in self.tiles)
        return ("library", *fused, *(("product",) if self.is_product else ()), *ours, *self.split.ways)

    def allowed(self, without: Without) -> tuple[Way, ...]:
        """The ways that are not in `without`; the library's always is one."""
        return tuple(way for way in self.ways if way == "library" or _kernel_of(way) not in without)

    @property
    def is_product(self) -> bool:
        """Whether the convolution is a matrix product of the pixels with the weight."""
        return self._of_single_pixels and self.stride == self.dilation == (1, 1)

    @property
    def _of_single_pixels(self) -> bool:
        return self.weight[2:] == (1, 1) and self.groups == 1 and not any(self.padding)

    @property
    def tiles(self) -> tuple[str, ...]:
        """Those of our kernel for pointwise convolutions that are worth trying beside as many copies as tasks are timed
        with now (`measure.copies_at_once`); none if it cannot compute this.
        """
        possible = self._of_single_pixels and len(set(self.stride)) == 1 and self.follows in _AS_POINTWISE
        return self.pointwise.tiles_beside(measure.copies_at_once()) if possible else ()

    @property
    def pointwise(self) -> pointwise.Shape:
        """As `pointwise` calls it, if it has `tiles`."""
        activation, added = _AS_POINTWISE[self.follows]
        return pointwise.Shape(
            dtype=str(self.dtype).removeprefix("torch."),
            pixels=self.out[0] * self.out[2] * self.out[3],
            inputs=self.x[1],
            features=self.weight[0],
            added=added,
            activation=activation,
            biased=self.bias,
            stride=self.stride[0],
            picture=(self.x[2], self.x[3]) if self.stride[0] > 1 else (0, 0),
        )

    @property
    def split(self) -> split_k_shape.Shape:
        """As `split_k` calls it. It has no ways if that cannot compute it."""
        images, channels, height, width = self.x
        return split_k_shape.Shape(
            dtype=str(self.dtype).removeprefix("torch.") if self.groups == 1 else "",
            images=images,
            channels=channels,
            height=height,
            width=width,
            features=self.weight[0],
            kernel=(self.weight[2], self.weight[3]),
            stride=(self.stride[0], self.stride[1]),
            padding=(self.padding[0], self.padding[1]),
            dilation=(self.dilation[0], self.dilation[1]),
        )


def fastest(group: Group, device: torch.device, without: Without = NOTHING) -> Way:
    """The fastest way that is not in `without`, by measurement on `device`, now or earlier, with the process's current
    precision switches.
    """

    def measured() -> TaskTimes:
        times = times_us(group, device, without)
        failed = dict.fromkeys(set(ways) - set(times), "does not compile, or differs from the library's result")
        return choices.fastest_of(group.words, times, _GAIN, failed)

    ways = group.allowed(without)
    if ways == (choices.LIBRARY,):
        return choices.LIBRARY  # cuDNN takes up to 0.7 s for the first call of a depthwise convolution's shape
    parts = {each.name: str(getattr(group, each.name)) for each in fields(group)}
    parts |= {"task": "convolution", "memory_format": str(MEMORY_FORMAT)} | choices.parts_here(device)
    parts |= {"split": split_k.code_digest()} if set(ways) & set(group.split.ways) else {}
    parts |= {"pointwise": pointwise.code_digest()} if any(way.startswith(POINTWISE) for way in ways) else {}

    def ahead_of(ways: Collection[Way]) -> None:
        tiles = [way.removeprefix(POINTWISE) for way in ways if way.startswith(POINTWISE)]
        if tiles:
            ahead.each(pointwise.compiled, group.pointwise, device, tiles)
        ahead.each(split_k.compiled, group.split, device, [way for way in ways if way in group.split.ways])

    return choices.current().choose(parts, ways, measured, ahead_of)


def times_us(group: Group, device: torch.device, without: Without = NOTHING) -> dict[Way, float]:
    """Microseconds that each way not in `without` takes in a replay, with warm caches and random values."""
    allowed = group.allowed(without)
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's random state alone

    def random(sizes: Sequence[int]) -> torch.Tensor:
        made = torch.randn(*sizes, generator=generator, device=device, dtype=group.dtype)
        return made.contiguous(memory_format=MEMORY_FORMAT) if len(sizes) == 4 else made

    x, weight, other, out = random(group.x), random(group.weight), random(group.out), random(group.out)
    bias = random(group.weight[:1]) if group.bias else None
    settings = (list(group.stride), list(group.padding), list(group.dilation), group.groups)
    plain = (*settings[:3], False, [0, 0], group.groups)
    ways: dict[Way, Callable[[], object]] = {}

    def after(result: torch.Tensor) -> torch.Tensor:
        """What a pointwise kernel does to the convolution's result."""
        match group.follows:
            case "relu":
                return torch.relu(result)
            case "add" | "add-relu":
                return torch.add(result, other)
            case "bias":
                return torch.relu(result)  # stands for the bias too: it takes as long
            case "nothing":
                return result

    ways["library"] = lambda: after(_aten.convolution(x, weight, None, *plain))
    if "fused" in allowed and group.follows == "relu":
        ways["fused"] = lambda: CONVOLUTION_RELU(x, weight, bias, *settings)
    elif "fused" in allowed:
        ways["fused"] = lambda: CONVOLUTION_ADD_RELU(x, weight, other, bias, *settings)
    if "product" in allowed:
        ways["product"] = _product(group, x, weight, bias, out, after)
    if any(way.startswith(POINTWISE) for way in allowed):
        shape = group.pointwise
        ours = pointwise_pass.ways_of(shape, x, weight, bias, other if shape.added else None, device)
        ways |= {f"{POINTWISE}{tile}": call for tile, call in ours.calls.items()}
    split = {} if Kernel.SPLIT_K in without else split_k_pass.calls(group.split, x, weight, device)
    if split and group.follows == "nothing":  # the kernel that follows in any case adds the parts up
        ways[_FOLLOWS] = lambda: torch.relu(out)
    times = dict(zip([*ways, *split], measure.kernel_times_us([*ways.values(), *split.values()], device), strict=True))
    follows_us = times.pop(_FOLLOWS, 0.0)
    return {way: max(0.0, us - follows_us) if way in split else us for way, us in times.items()}


def _kernel_of(way: Way) -> Kernel:
    return _KERNELS.get(way.partition(" ")[0], Kernel.SPLIT_K)


def _product(
    group: Group, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, after: Any
) -> Callable[[], object]:
    """A call of a 1x1 convolution as a product. `after` does what a pointwise kernel does to its result."""
    rows = x.permute(0, 2, 3, 1).reshape(-1, group.x[1])
    columns = weight.reshape(group.weight[:2]).t()
    flat = out.permute(0, 2, 3, 1).reshape(-1, group.out[1])
    if bias is not None and group.follows == "relu":
        return lambda: _aten._addmm_activation.out(bias, rows, columns, out=flat)
    if group.follows == "bias":
        return lambda: _aten.addmm.out(bias, rows, columns, out=flat)
    return lambda: (torch.mm(rows, columns, out=flat), after(out))
