"""Depthwise convolutions by our own kernels: which tasks they take over, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nimble_jobs.engine import verify
from nimble_jobs.engine.observe import Watched
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.engine.static_kernel import pack, unpack
from nimble_jobs.errors import CheckFailed, EngineError
from nimble_jobs.kernels import depthwise
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.planner.forward.restore import check_loaded
from nimble_jobs.schedule import Buffer, BufferKind, Port, Program, Task, View
from tests.kernel_trials import interpreted, timed_as

SIDE = 6


def _view(buffer: int, shape: tuple[int, ...], *, channels_last: bool = False, dtype: str = "float16") -> View:
    order = (0, 2, 3, 1) if channels_last and len(shape) == 4 else tuple(range(len(shape)))
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= shape[dim]
    return View(buffer=buffer, dtype=dtype, itemsize=2, shape=shape, stride=tuple(stride))


def _task(channels: int = 8, kernel: int = 3, *, channels_last: bool = True) -> Task:
    x = _view(0, (1, channels, SIDE, SIDE), channels_last=channels_last)
    weight = _view(1, (channels, 1, kernel, kernel))
    out = _view(2, (1, channels, SIDE, SIDE), channels_last=channels_last)
    around = ((kernel // 2,) * 2, (1, 1), (1, 1))
    return Task(
        index=0,
        op="aten.cudnn_convolution.out",
        args=(x, weight, *around, channels, False, False, True),
        kwargs=(("out", out),),
        outputs=None,
        reads=(x, weight),
        writes=(out,),
        mutates=(out,),
        source="net (net.py:1)",
    )


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_depthwise_convolution_is_known_by_its_shape(channels_last: bool) -> None:
    shape = depthwise.shape_of(_task(12, 5, channels_last=channels_last))
    assert shape is not None
    assert (shape.channels, shape.kernel, shape.stride, shape.padding, shape.dilation) == (12, 5, 1, 2, 1)
    assert shape.channels_last is channels_last
    sizes = [(3, SIDE, SIDE, SIDE, SIDE, patches, 2) for patches in (2 * SIDE, SIDE)]  # of four and of eight columns
    of_places = (3, SIDE, SIDE, SIDE, SIDE, 12 * SIDE * SIDE, 1, 2, 1)
    assert [shape.sizes(tile) for tile in shape.tiles] == (sizes if channels_last else [of_places])


def test_everything_else_stays_as_it_is() -> None:
    task = _task()
    x, weight, *rest = task.args
    assert isinstance(x, View) and isinstance(weight, View)  # noqa: PT018
    dense = replace(weight, shape=(8, 8, 3, 3), stride=(72, 9, 3, 1))
    strided = replace(x, stride=(2 * x.stride[0], *(2 * s for s in x.stride[1:])))
    others = [
        replace(task, op="aten.convolution.default"),
        replace(task, args=(x, dense, *rest)),  # not depthwise
        replace(task, args=(strided, weight, *rest)),
        replace(task, args=(replace(x, offset=1), weight, *rest)),  # reads are of sixteen bytes at once
        replace(task, args=(x, weight, rest[0], (1, 2), *rest[2:])),  # another stride in each direction
        replace(task, args=(x, replace(weight, dtype="float32"), *rest)),
        replace(task, args=(x, replace(weight, offset=1), *rest)),
        replace(_task(8, 1), args=(x, replace(weight, shape=(8, 1, 1, 1)), *rest)),  # a corner of a larger filter
        _task(8, 9),
        replace(task, args=(*task.args[:6],)),
    ]
    assert [depthwise.shape_of(other) for other in others] == [None] * len(others)


def test_equal_sizes_with_another_unit_are_another_kernel() -> None:
    """Twelve channels are three units of four; three channels are three of one."""
    twelve, three = (depthwise.shape_of(_task(channels)) for channels in (12, 3))
    assert twelve is not None and three is not None  # noqa: PT018
    (tile, *_) = twelve.tiles
    assert twelve.sizes(tile) == three.sizes(tile)
    assert twelve.name(tile) != three.name(tile)


def test_what_triton_cannot_compile_is_an_error_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        raise ValueError("no such target\nand more")

    shape = depthwise.shape_of(_task())
    assert shape is not None
    monkeypatch.setattr("triton.compile", fails)
    depthwise.compiled._kept.clear()
    with pytest.raises(EngineError, match=r"Triton cannot compile the kernel .*: ValueError: no such target$"):
        depthwise.compiled(shape, "4x4x16", 90)


def test_the_recording_of_another_device_stays_as_it_is() -> None:
    recording = _recording(_task())
    assert depthwise.with_own_depthwise(recording, torch.device("cpu")) is recording


def test_a_faster_kernel_takes_the_task_over(monkeypatch: pytest.MonkeyPatch) -> None:
    task = _task()
    asked = []

    def fastest(shape: depthwise.Shape, settings: object, device: torch.device) -> str | None:
        asked.append(settings)
        return "8x8x32" if len(asked) == 1 else None

    monkeypatch.setattr(depthwise, "capability_of", lambda _: 90)
    monkeypatch.setattr(depthwise, "_fastest", fastest)
    found = depthwise.with_own_depthwise(_recording(task), torch.device("cuda", 0))
    (ours,) = found.program.tasks
    (name,) = found.kernels
    assert ours.op == name == "triton.depthwise3.float16.last.8x6x6x6x6x36x1x1x1.8x8x32"
    assert ours.args == (*task.args[:2], task.args[1], task.kwargs[0][1], 2, 6, 6, 6, 6, 6, 1)
    assert (ours.reads, ours.writes, ours.mutates) == (task.reads, task.writes, task.mutates)
    assert ours.source == task.source
    assert asked == [("cudnn_convolution", ((1, 1), (1, 1), (1, 1), 8, False, False, True))]
    kept = depthwise.with_own_depthwise(_recording(task), torch.device("cuda", 0))
    assert kept.program.tasks == (task,)
    assert not kept.kernels


@pytest.mark.parametrize(
    ("ours_us", "wrong", "chosen"),
    [((10.4, 10.6), (), "4x4x16"), ((10.6, 10.6), (), None), ((10.4, 9.0), ("8x8x32",), "4x4x16")],
)
def test_ours_may_take_a_little_longer_than_the_library(
    monkeypatch: pytest.MonkeyPatch, ours_us: tuple[float, float], wrong: tuple[str, ...], chosen: str | None
) -> None:
    """The library's first call for each shape takes long, which a stored kernel saves. Ours must agree with it."""

    def compiled(shape: depthwise.Shape, tile: str, _: int) -> Callable[..., None]:
        def kernel(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor, out: torch.Tensor, *sizes: int) -> None:
            assert sizes == shape.sizes(tile)
            out.copy_(torch.conv2d(x, weight, None, 1, 1, 1, shape.channels) + (tile in wrong))

        return kernel

    def library(x: torch.Tensor, weight: torch.Tensor, *_: object, out: torch.Tensor) -> None:
        out.copy_(torch.conv2d(x, weight, None, 1, 1, 1, x.shape[1]))

    monkeypatch.setattr(depthwise, "compiled", compiled)
    monkeypatch.setattr(depthwise, "capability_of", lambda _: 90)
    monkeypatch.setattr(torch.ops.aten.cudnn_convolution, "out", library)
    shape = depthwise.shape_of(_task())
    assert shape is not None
    timed_as(monkeypatch, [10.0, *(us for us, tile in zip(ours_us, shape.tiles, strict=True) if tile not in wrong)])
    with using(Choices()) as choices:
        settings = ("cudnn_convolution", ((1, 1), (1, 1), (1, 1), 8, False, False, True))
        assert depthwise._fastest(shape, settings, torch.device("cpu")) == chosen
    (made,) = choices.made()
    assert made.times.task == shape.words
    assert [way for way, _ in made.times.failed] == list(wrong)


def test_what_is_recorded_again_has_our_kernels_where_it_had_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule whose kernels are compiled again: a new measurement must not make it another program."""
    gpu, task = torch.device("cuda", 0), _task()
    monkeypatch.setattr(depthwise, "capability_of", lambda _: 90)
    monkeypatch.setattr(depthwise, "_fastest", lambda shape, *_: shape.tiles[-1])
    ours = depthwise.with_own_depthwise(_recording(task), gpu).program
    monkeypatch.delattr(depthwise, "_fastest")
    again = depthwise.with_own_depthwise(_recording(task), gpu, like=ours)
    assert again.program == ours
    assert list(again.kernels) == [ours.tasks[0].op]
    theirs = _recording(task).program
    assert depthwise.with_own_depthwise(_recording(task), gpu, like=theirs).program == theirs


def test_the_machine_code_can_be_stored() -> None:
    shapes = [depthwise.shape_of(_task(channels, 3)) for channels in (8, 12)]
    kernels = [depthwise.compiled(shape, "4x4x16", 90) for shape in shapes if shape is not None]
    assert kernels[0].arg_types.startswith("OOOOiiiiiii")
    assert kernels[0].grid == (3, 1, 1)
    packed = pack({k.name: k for k in kernels})
    assert packed is not None
    described, binaries = packed
    assert len(binaries) == len(kernels[0].binary)  # one binary for both sizes
    for name, kernel in unpack(described, binaries).items():
        assert kernel.identity == next(k for k in kernels if k.name == name).identity


def test_a_check_without_the_library_is_not_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored schedule with such kernels is refused only by what it was built against."""
    asked: list[object] = []

    def check(instance: object, eager: object, *_: object, **__: object) -> None:
        asked.append(eager)
        if len(asked) == 1:
            raise CheckFailed("rounds otherwise")

    module = torch.nn.Identity()
    program = replace(_recording(_task()).program, tasks=(replace(_task(), op="triton.depthwise3.float16"),))
    schedule: Any = SimpleNamespace(program=program)
    monkeypatch.setattr(verify, "check", check)
    given: Any = {"device": torch.device("cpu"), "tolerance": 1e-2, "seed": 1}
    check_loaded([cast(Any, None)], module, schedule, **given)
    assert len(asked) == 2
    assert asked[1] is module
    schedule.program = _recording(_task()).program
    check_loaded([cast(Any, None)], module, schedule, **given)
    assert asked[2] is module
    check_loaded([cast(Any, None)], module, schedule, **given | {"device": torch.device("cuda:0")})
    assert asked[3] is not module  # does without cuDNN's attention


@pytest.mark.parametrize(
    ("layer", "dtype", "batch", "without"),
    [
        (torch.nn.Conv2d(8, 8, 3), torch.float16, 4, True),
        (torch.nn.Conv2d(8, 8, 3, groups=8), torch.bfloat16, 1, True),
        (torch.nn.Conv2d(8, 8, 3), torch.float16, 5, False),  # one picture after the other
        (torch.nn.Conv2d(8, 8, 3, groups=2), torch.float16, 1, False),  # one group after the other
        (torch.nn.Conv2d(8, 8, 3), torch.float32, 1, False),  # cuDNN rounds
        (torch.nn.Linear(8, 8), torch.float16, 1, False),
    ],
)
@pytest.mark.parametrize("watched", [False, True])
def test_few_pictures_are_checked_without_cudnn(
    monkeypatch: pytest.MonkeyPatch,
    layer: torch.nn.Module,
    dtype: torch.dtype,
    batch: int,
    without: bool,
    watched: bool,
) -> None:
    """In half precision, on a GPU: torch's own convolutions take no plans."""
    enabled: list[bool] = []

    class Noted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer.to(dtype)

        def forward(self, *_: torch.Tensor) -> None:
            enabled.append(torch.backends.cudnn.enabled)

    module = Noted()
    x = View(buffer=0, dtype="float16", itemsize=2, shape=(batch, 8, 9, 9), stride=(648, 81, 9, 1), offset=0)
    program = replace(_recording(_task()).program, inputs=(Port(name="x", view=x),))
    schedule: Any = SimpleNamespace(program=program)
    monkeypatch.setattr(verify, "check", lambda _, eager, *__, **___: eager())
    eager = Watched(module, torch.device("cpu")) if watched else module
    given: Any = {"tolerance": 1e-2, "seed": 1}
    check_loaded([cast(Any, None)], eager, schedule, torch.device("cuda:0"), **given)
    check_loaded([cast(Any, None)], eager, schedule, torch.device("cpu"), **given)
    assert enabled == [not without, True]


RUN = """
import sys, torch
import triton
from nimble_jobs.kernels import depthwise_triton
from nimble_jobs.kernels.depthwise import Shape, constants
for channels_last in (True, False):
    form = torch.channels_last if channels_last else torch.contiguous_format
    for images, channels, kernel, stride, padding, dilation, side in (
        (1, 8, 3, 1, 1, 1, 6), (2, 5, 5, 2, 2, 1, 7), (1, 36, 3, 1, 2, 2, 5), (1, 12, 2, 1, 0, 1, 4),
        (1, 4, 7, 1, 3, 1, 5), (1, 6, 2, 3, 0, 1, 17), (1, 40, 3, 2, 2, 2, 11)
    ):
        x = torch.randn(images, channels, side, side).contiguous(memory_format=form)
        weight = torch.randn(channels, 1, kernel, kernel)
        expected = torch.nn.functional.conv2d(
            x, weight, stride=stride, padding=padding, dilation=dilation, groups=channels
        ).contiguous(memory_format=form)
        out = torch.full_like(expected, float("nan"))
        shape = Shape(
            dtype="float32", images=images, channels=channels, height=side, width=side, out_height=out.shape[2],
            out_width=out.shape[3], kernel=kernel, stride=stride, padding=padding, dilation=dilation,
            channels_last=channels_last,
        )
        function = (
            depthwise_triton.depthwise_channels_last if channels_last else depthwise_triton.depthwise_contiguous
        )
        given = (x, weight, weight) if channels_last else (x, weight)
        for tile in shape.tiles:
            out.fill_(float("nan"))
            function[shape.grid(tile)](*given, out, *shape.sizes(tile), **constants(shape, tile))
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
print("equal")
"""


def test_the_kernels_compute_what_torch_does() -> None:
    """Under Triton's interpreter, which is chosen when Triton is imported."""
    interpreted(RUN)


def _recording(task: Task) -> Recording:
    views = [v for v in (*task.args[:2], task.kwargs[0][1]) if isinstance(v, View)]
    kinds = (BufferKind.INPUT, BufferKind.STATE, BufferKind.INTERMEDIATE)
    names = ("x", "weight", None)
    program = Program(
        buffers=tuple(
            Buffer(index=i, kind=kind, nbytes=4096, name=name)
            for i, (kind, name) in enumerate(zip(kinds, names, strict=True))
        ),
        tasks=(task,),
        inputs=(Port(name="x", view=views[0]),),
        state=(Port(name="weight", view=views[1]),),
        constants=(),
        outputs=(Port(name="output", view=views[2]),),
    )
    return Recording(program=program)
