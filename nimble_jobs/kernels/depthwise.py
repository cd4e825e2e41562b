"""Runs depthwise convolutions by our own kernels if these are faster than the library's.

With a batch of one, cuDNN takes about twice as long, and its first call for each shape costs a fresh process tenths of
a second. Our kernels are compiled once and stored as machine code, like Inductor's.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nimble_jobs.engine.device import able
from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import choices, static_triton
from nimble_jobs.kernels.activations import ACTIVATIONS
from nimble_jobs.kernels.ahead import Compiles, each, twice
from nimble_jobs.kernels.own_kernels import digest_of, tile_in
from nimble_jobs.kernels.static_triton import MOST, TYPES, Launch, aligned, capability_of, lies
from nimble_jobs.kernels.ways import Ways, ends
from nimble_jobs.schedule import Arg, Program, Task, View
from nimble_jobs.task_times import TaskTimes

PREFIX = "triton.depthwise"
_POSITIONS = {  # by operator: positions of stride, padding and dilation among its arguments
    "aten.cudnn_convolution.out": (3, 2, 4),
    "aten._conv_depthwise2d.out": (4, 5, 6),
}
_WORTH = 1.05  # ours may take this share of the library's time, since it saves the library's slow first call
KERNELS = (1, 2, 3, 4, 5, 7)  # side lengths; loops are unrolled, so larger kernels would make long programs


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What a block computes in the channels-last format, and by how many warps."""

    columns: int  # of a patch, which a thread computes
    patches: int
    channels: int
    warps: int
    unrolled: int  # up to this side length of a kernel without dilation, the loop over its rows is unrolled


_SMALL = "4x4x16"
TILES = {  # by name: columns, patches and channels. Tuned on an H200: the first for few places, the second for many
    _SMALL: Tile(columns=4, patches=4, channels=16, warps=1, unrolled=5),
    "8x8x32": Tile(columns=8, patches=8, channels=32, warps=2, unrolled=3),
}
_CONTIGUOUS = "128"  # the tile of the other format: places of a block
_CONTIGUOUS_WARPS = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A depthwise convolution: everything that decides its time."""

    dtype: str
    images: int
    channels: int
    height: int
    width: int
    out_height: int
    out_width: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    channels_last: bool

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        size, form = f"{self.kernel}x{self.kernel}", "channels-last" if self.channels_last else "contiguous"
        shapes = f"{self.images}x{self.channels}x{self.height}x{self.width} to {self.out_height}x{self.out_width}"
        return f"depthwise convolution {size}, {self.dtype}, {form}, {shapes}"

    @property
    def unit(self) -> int:
        """How many channels are read at once."""
        return math.gcd(self.channels, 4)

    @property
    def places(self) -> int:
        """How many places the output has: its elements, or in channels-last its pixels."""
        return self.images * self.out_height * self.out_width * (1 if self.channels_last else self.channels)

    @property
    def geometry(self) -> tuple[int, ...]:
        """Sizes and settings without channels."""
        sides = (self.height, self.width, self.out_height, self.out_width)
        return (*sides, self.places, self.stride, self.padding, self.dilation)

    @property
    def tiles(self) -> tuple[str, ...]:
        """The tiles that are worth trying."""
        if not self.channels_last:
            return (_CONTIGUOUS,)
        return tuple(TILES) if self.out_width > TILES[_SMALL].columns else (_SMALL,)

    def name(self, tile: str, activation: str | None = None) -> str:
        """The kernel's name, which tells binaries and grids apart."""
        form = "last" if self.channels_last else "first"
        sizes = "x".join(map(str, (self.channels, *self.geometry)))
        name = f"{PREFIX}{self.kernel}.{self.dtype}.{form}.{sizes}.{tile}"
        return name if activation is None else f"{name}.{activation}"

    def sizes(self, tile: str) -> tuple[int, ...]:
        """The kernel's arguments after its tensors."""
        units = self.channels // self.unit
        if not self.channels_last:
            return units, *self.geometry
        return units, *self.geometry[:4], self._patches(tile), self.padding

    def grid(self, tile: str) -> tuple[int, int, int]:
        """Number of blocks in each dimension."""
        if not self.channels_last:
            return -(-self.places // int(tile)), 1, 1
        size = TILES[tile]
        return -(-self._patches(tile) // size.patches), -(-self.channels // size.channels), 1

    def _patches(self, tile: str) -> int:
        return self.images * self.out_height * -(-self.out_width // TILES[tile].columns)


def with_own_depthwise(recording: Recording, device: torch.device, *, like: Program | None = None) -> Recording:
    """The recording with our kernel for each depthwise convolution, unless it is slower on this device.

    `like` is an earlier recording of the same program. With it, the choice is the same as there, since a new
    measurement could choose otherwise.
    """
    if not able(device).kernels:
        return recording
    kernels = dict(recording.kernels)
    tasks = []
    if like is None:
        chosen = twice(lambda: [_chosen(task, device) for task in recording.program.tasks])
    else:
        chosen = [_chosen_as_in(like, i, task, device) for i, task in enumerate(recording.program.tasks)]
    for task, (shape, tile) in zip(recording.program.tasks, chosen, strict=True):
        if shape is not None and tile is not None:
            kernel = compiled(shape, tile, capability_of(device))
            kernels[kernel.name] = kernel
            task = _ours(task, kernel, shape, tile)
        tasks.append(task)
    return replace(recording, program=replace(recording.program, tasks=tuple(tasks)), kernels=kernels)


def _chosen(task: Task, device: torch.device) -> tuple[Shape | None, str | None]:
    """The shape of a depthwise convolution that our kernel can compute, and the tile with which it is fastest."""
    shape = shape_of(task)
    return shape, None if shape is None else _fastest(shape, _settings(task), device)


def _chosen_as_in(like: Program, i: int, task: Task, device: torch.device) -> tuple[Shape | None, str | None]:
    """The same, as the task with this number was computed there."""
    shape, names = shape_of(task), {like.tasks[i].op} if i < len(like.tasks) else set()
    return shape, None if shape is None else tile_in(names)(shape, device)


def shape_of(task: Task) -> Shape | None:
    """The shape of a depthwise convolution that our kernel can compute; None for any other task."""
    if task.op not in _POSITIONS or len(task.args) < 7:
        return None
    x, weight, (name, out) = task.args[0], task.args[1], (task.kwargs or (("", None),))[0]
    settings = [task.args[position] for position in _POSITIONS[task.op]]
    bias = task.args[3] if task.op == "aten._conv_depthwise2d.out" else None
    if not (isinstance(x, View) and isinstance(weight, View) and isinstance(out, View)) or name != "out":
        return None
    alike = [s[0] for s in settings if isinstance(s, tuple) and len(s) == 2 and s[0] == s[1] and isinstance(s[0], int)]
    return shape_between(x, weight, out, alike) if bias is None and len(alike) == 3 else None


def shape_between(x: View, weight: View, out: View, settings: Sequence[int]) -> Shape | None:
    """The shape of a depthwise convolution with this stride, padding and dilation in both directions; None if our
    kernel cannot compute it.
    """
    if len(x.shape) != 4 or x.dtype not in TYPES or {x.dtype, weight.dtype, out.dtype} != {x.dtype}:
        return None
    channels, kernel = x.shape[1], weight.shape[-1]
    dense = weight.stride[0] == kernel * kernel and (kernel == 1 or weight.stride[2:] == (kernel, 1))
    if weight.shape != (channels, 1, kernel, kernel) or kernel not in KERNELS or not (dense and aligned(weight)):
        return None
    if channels < 2 or 0 in out.shape or max(_elements(x), _elements(out)) >= MOST:
        return None
    formats = [f for f in (True, False) if lies(x, channels_last=f) and lies(out, channels_last=f)]
    if not formats:
        return None
    stride, padding, dilation = settings
    return Shape(
        dtype=x.dtype,
        images=x.shape[0],
        channels=channels,
        height=x.shape[2],
        width=x.shape[3],
        out_height=out.shape[2],
        out_width=out.shape[3],
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        channels_last=formats[0],
    )


@Compiles
def compiled(shape: Shape, tile: str, capability: int, activation: str | None = None) -> StaticKernel:
    """Compile the kernel for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    With `activation`, one of ACTIVATIONS, a bias lies between weight and output; only for channels-last images. Raises
    EngineError if Triton cannot compile it.
    """
    from nimble_jobs.kernels import depthwise_triton

    function: Any
    sizes: tuple[str, ...]
    tensors: tuple[str, ...]
    if shape.channels_last:
        function, sizes = depthwise_triton.depthwise_channels_last, depthwise_triton.SIZES_CHANNELS_LAST
        tensors, warps = ("x", "weight", "bias", "out"), TILES[tile].warps
    else:
        function, sizes = depthwise_triton.depthwise_contiguous, depthwise_triton.SIZES_CONTIGUOUS
        tensors, warps = ("x", "weight", "out"), _CONTIGUOUS_WARPS
    return static_triton.compiled(
        function,
        Launch(name=shape.name(tile, activation), grid=shape.grid(tile), warps=warps),
        capability,
        pointers=dict.fromkeys(tensors, TYPES[shape.dtype]),
        sizes=sizes,
        constants=constants(shape, tile, activation),
    )


def constants(shape: Shape, tile: str, activation: str | None = None) -> dict[str, int]:
    """Of the kernel."""
    both = {"KERNEL": shape.kernel, "UNIT": shape.unit}
    if not shape.channels_last:
        return both | {"PLACES": int(tile)}
    size = TILES[tile]
    windows = itertools.product(range(size.columns), range(shape.kernel))
    read = {column * shape.stride + place * shape.dilation for column, place in windows}
    unrolled = shape.dilation == 1 and shape.kernel <= size.unrolled
    return both | {
        "STRIDE": shape.stride,
        "DILATION": shape.dilation,
        "COLUMNS": size.columns,
        "PATCHES": size.patches,
        "CHANNELS": size.channels,
        "READ": sum(1 << column for column in read),
        "ROWS_AT_ONCE": shape.kernel if unrolled else 1,
        "BIASED": int(activation is not None),
        "ACTIVATION": -1 if activation is None else list(ACTIVATIONS).index(activation),
    }


def _fastest(shape: Shape, settings: tuple[Any, ...], device: torch.device) -> str | None:
    """The tile with which our kernel is fastest; None if the library is faster, or none of ours agrees with it."""
    more = {"task": "depthwise convolution", "settings": str(settings), "code": code_digest()}
    ways, compiling = ("library", *shape.tiles), functools.partial(each, compiled, shape, device)
    way = choices.way_for(shape, ways, device, lambda: _times(shape, settings, device), compiling, **more)
    return None if way == "library" else way


def code_digest() -> str:
    """SHA-256 of the code that decides how long our kernels take."""
    return digest_of("depthwise", "depthwise_triton", "activations_triton")


def _times(shape: Shape, settings: tuple[Any, ...], device: torch.device) -> TaskTimes:
    op, rest = settings
    kind = dtype(shape.dtype)
    form = torch.channels_last if shape.channels_last else torch.contiguous_format
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's random state alone

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=kind)

    x = random(shape.images, shape.channels, shape.height, shape.width).contiguous(memory_format=form)
    weight = random(shape.channels, 1, shape.kernel, shape.kernel)
    results = (shape.images, shape.channels, shape.out_height, shape.out_width)
    theirs, out = (torch.empty(results, dtype=kind, device=device, memory_format=form) for _ in range(2))
    library: Callable[..., Any] = getattr(torch.ops.aten, op).out

    def run_theirs() -> None:
        library(x, weight, *rest, out=theirs)

    def ours(tile: str) -> Callable[[], object]:
        kernel = compiled(shape, tile, capability_of(device))
        out.fill_(float("nan"))
        return lambda: kernel(*tensors_of(shape, x, weight), out, *shape.sizes(tile))

    run_theirs()
    ways = Ways(shape.dtype)
    for tile in shape.tiles:
        ways.add(tile, functools.partial(ours, tile), ends(theirs), ends(out))
    return ways.times(shape.words, run_theirs, _WORTH, device)


def tensors_of(shape: Shape, x: Any, weight: Any, bias: Any = None) -> tuple[Any, ...]:
    """What the kernel is given before the output: the weight stands in for a bias that is not read."""
    return (x, weight, weight if bias is None else bias) if shape.channels_last else (x, weight)


def _settings(task: Task) -> tuple[Any, ...]:
    """The operator's name, and its arguments apart from x, weight and out."""
    return task.op.split(".")[1], tuple(_plain(a) for a in task.args[2:])


def _plain(value: Arg) -> Any:
    return tuple(_plain(v) for v in value) if isinstance(value, tuple) else value


def _ours(task: Task, kernel: StaticKernel, shape: Shape, tile: str) -> Task:
    x, weight, out = task.args[0], task.args[1], task.kwargs[0][1]
    assert isinstance(x, View) and isinstance(weight, View) and isinstance(out, View)  # noqa: PT018  # shape_of saw them
    return replace(
        task,
        op=kernel.name,
        args=(*tensors_of(shape, x, weight), out, *shape.sizes(tile)),
        kwargs=(),
        outputs=None,
        reads=tuple(dict.fromkeys((x, weight))),
        writes=(out,),
        mutates=(out,),
    )


def _elements(view: View) -> int:
    total = 1
    for size in view.shape:
        total *= size
    return total
