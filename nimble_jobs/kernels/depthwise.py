"""Runs depthwise convolutions by our own kernels if these are faster than the library's.

With a batch of one, cuDNN takes about twice as long, and its first call for each shape costs a fresh process tenths of
a second. Our kernels are compiled once and stored as machine code, like Inductor's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nimble_jobs.engine import measure
from nimble_jobs.engine.device import able
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import choices, static_triton
from nimble_jobs.kernels.own_kernels import digest_of
from nimble_jobs.kernels.static_triton import MOST, TYPES, Launch, aligned, capability_of, lies
from nimble_jobs.kernels.ways import EXACT
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
class Shape:
    """A depthwise convolution: everything that decides its time and its kernel."""

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
    def name(self) -> str:
        """The kernel's name. Shapes that need different binaries or grids have different names."""
        form = "last" if self.channels_last else "first"
        return f"{PREFIX}{self.kernel}.{self.dtype}.{form}.{self.channels}.{'x'.join(map(str, self.sizes))}"

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        size, form = f"{self.kernel}x{self.kernel}", "channels-last" if self.channels_last else "contiguous"
        shapes = f"{self.images}x{self.channels}x{self.height}x{self.width} to {self.out_height}x{self.out_width}"
        return f"depthwise convolution {size}, {self.dtype}, {form}, {shapes}"

    @property
    def unit(self) -> int:
        """How many channels are read at once."""
        return 4 if self.channels % 4 == 0 else 1

    @property
    def places(self) -> int:
        """How many places the output has: its elements, or in channels-last its pixels."""
        return self.images * self.out_height * self.out_width * (1 if self.channels_last else self.channels)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The kernel's arguments after its tensors."""
        return (
            *(self.channels // self.unit, self.height, self.width, self.out_height, self.out_width, self.places),
            *(self.stride, self.padding, self.dilation),
        )

    @property
    def tile(self) -> tuple[int, int, int]:
        """Places and channels per block, and its warps. Tuned on an H200; good for all layers of the zoo."""
        if not self.channels_last:
            return 128, 1, 4
        return (8, 32, 1) if self.kernel <= 3 and self.channels % 32 == 0 else (8, 16, 1)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Number of blocks in each dimension."""
        places, channels, _ = self.tile
        across = -(-self.channels // channels) if self.channels_last else 1
        return -(-self.places // places), across, 1


def with_own_depthwise(recording: Recording, device: torch.device, *, like: Program | None = None) -> Recording:
    """The recording with our kernel for each depthwise convolution, unless it is slower on this device.

    `like` is an earlier recording of the same program. With it, the choice is the same as there, since a new
    measurement could choose otherwise.
    """
    if not able(device).kernels:
        return recording
    kernels = dict(recording.kernels)
    tasks = []
    for i, task in enumerate(recording.program.tasks):
        shape = shape_of(task)
        kernel = None
        if shape is not None and like is not None:
            had = i < len(like.tasks) and like.tasks[i].op == shape.name
            kernel = compiled(shape, capability_of(device)) if had else None
        elif shape is not None:
            kernel = _faster(shape, _settings(task), device)
        if shape is not None and kernel is not None:
            kernels[kernel.name] = kernel
            task = _ours(task, kernel, shape)
        tasks.append(task)
    return replace(recording, program=replace(recording.program, tasks=tuple(tasks)), kernels=kernels)


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


def compiled(shape: Shape, capability: int) -> StaticKernel:
    """Compile the kernel for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    Raises EngineError if Triton cannot compile it.
    """
    from nimble_jobs.kernels import depthwise_triton

    function: Any = (
        depthwise_triton.depthwise_channels_last if shape.channels_last else depthwise_triton.depthwise_contiguous
    )
    places, channels, warps = shape.tile
    return static_triton.compiled(
        function,
        Launch(name=shape.name, grid=shape.grid, warps=warps),
        capability,
        pointers=dict.fromkeys(("x", "weight", "out"), TYPES[shape.dtype]),
        sizes=depthwise_triton.SIZES,
        constants={"KERNEL": shape.kernel, "UNIT": shape.unit, "PLACES": places, "CHANNELS": channels},
    )


def _faster(shape: Shape, settings: tuple[Any, ...], device: torch.device) -> StaticKernel | None:
    """Our kernel; None if the library is faster or the two disagree. Raises EngineError if ours cannot be compiled."""
    parts = {name: str(value) for name, value in asdict(shape).items()}
    parts |= {"task": "depthwise convolution", "settings": str(settings), "code": code_digest()}
    parts |= choices.parts_here(device)
    way = choices.current().choose(parts, ("library", "ours"), lambda: _times(shape, settings, device))
    return _kernel(shape, capability_of(device)) if way == "ours" else None


def code_digest() -> str:
    """Of the source of our kernels."""
    return digest_of("depthwise_triton", "activations_triton")


@functools.lru_cache(maxsize=4096)
def _kernel(shape: Shape, capability: int) -> StaticKernel:
    """`compiled`, once for each shape."""
    return compiled(shape, capability)


def _times(shape: Shape, settings: tuple[Any, ...], device: torch.device) -> TaskTimes:
    op, rest = settings
    kind = dtype(shape.dtype)
    form = torch.channels_last if shape.channels_last else torch.contiguous_format
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's random state alone

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=kind)

    x = random(shape.images, shape.channels, shape.height, shape.width).contiguous(memory_format=form)
    weight = random(shape.channels, 1, shape.kernel, shape.kernel)
    theirs, ours = (
        torch.empty(
            (shape.images, shape.channels, shape.out_height, shape.out_width),
            dtype=kind,
            device=device,
            memory_format=form,
        )
        for _ in range(2)
    )
    kernel = _kernel(shape, capability_of(device))
    library: Callable[..., Any] = getattr(torch.ops.aten, op).out

    def run_theirs() -> None:
        library(x, weight, *rest, out=theirs)

    def run_ours() -> None:
        kernel(x, weight, ours, *shape.sizes)

    times = measure.kernel_times_us([run_theirs, run_ours], device)
    ends = [0, shape.images - 1]  # to compare all of them in fp64 would need much memory
    agree = relative_norm(ours[ends], theirs[ends]) <= EXACT[shape.dtype]
    return TaskTimes(
        task=shape.words,
        times_us=(("library", times[0]), ("ours", times[1])),
        chosen="ours" if agree and times[1] <= _WORTH * times[0] else "library",
    )


def _settings(task: Task) -> tuple[Any, ...]:
    """The operator's name, and its arguments apart from x, weight and out."""
    return task.op.split(".")[1], tuple(_plain(a) for a in task.args[2:])


def _plain(value: Arg) -> Any:
    return tuple(_plain(v) for v in value) if isinstance(value, tuple) else value


def _ours(task: Task, kernel: StaticKernel, shape: Shape) -> Task:
    x, weight, out = task.args[0], task.args[1], task.kwargs[0][1]
    assert isinstance(x, View) and isinstance(weight, View) and isinstance(out, View)  # noqa: PT018  # shape_of saw them
    return replace(
        task,
        op=kernel.name,
        args=(x, weight, out, *shape.sizes),
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
