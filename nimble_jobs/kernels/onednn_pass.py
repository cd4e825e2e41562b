"""Put oneDNN's kernels over packed weights into a program that was recorded on a CPU.

Each convolution and linear layer whose weight is the module's becomes one task with what directly follows it: an
activation, or, for convolutions, the addition of another tensor of its size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.onednn import ADDED, CONVOLUTION, LINEAR, NO_ACTIVATION, OPERATORS
from nimble_jobs.engine.private.onednn import Activation, computes_in, has_onednn
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.graph.buffers import with_buffers, without_unused
from nimble_jobs.schedule import Arg, BufferKind, Program, Task, View

_ACTIVATION = -2  # its position among the arguments of tasks that may have one
_ATTENTION = "aten._native_multi_head_attention."  # holds four products, which are recorded apart
_MASK = 9  # its position among the arguments of attention
_DIMENSIONS = (4, 5)  # of convolutions that oneDNN packs
_PRODUCTS = (("mm", 2), ("addmm", 3))  # names, each with its number of arguments


def with_packed_weights(recording: Recording) -> Recording:
    """The recording with oneDNN's kernels where it has them; the same recording if there is no such task."""
    if not has_onednn():
        return recording
    program = _Pass(recording.program).run()
    return recording if program is None else replace(recording, program=program)


def packs_weights(program: Program) -> bool:
    """Whether a program, recorded from eager, has tasks that oneDNN could run over packed weights."""
    if not has_onednn():
        return False
    weights = _Pass(program).weights
    return divides_attention(program) or any(_convolution(t, weights) or _linear(t, weights) for t in program.tasks)


def divides_attention(program: Program) -> bool:
    """Whether a program, recorded from eager, has torch's attention in one operator, and computes the same in parts.

    With a mask it may not: where the mask hides all of a sequence, the operator gives NaN, and its parts do not.
    """
    tasks = [task for task in program.tasks if task.op.startswith(_ATTENTION)]
    return bool(tasks) and all(task.args[_MASK:] == () or task.args[_MASK] is None for task in tasks)


@contextlib.contextmanager
def attention_in_parts() -> Iterator[None]:
    """Have torch's attention call its linear layers one by one, instead of one operator that holds their products."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@dataclass
class _Open:
    """A task of oneDNN's that may still take in what follows, as nothing has read its result yet."""

    position: int  # among the new tasks
    task: Task


class _Pass:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._nbytes = {b.index: b.nbytes for b in program.buffers}
        self._kind = {b.index: b.kind for b in program.buffers}
        written = {v.buffer for t in program.tasks for v in t.writes}
        fixed = {b.index for b in program.buffers if b.kind in (BufferKind.STATE, BufferKind.CONSTANT)}
        self.weights = fixed - written  # buffers
        self._last = {v.buffer: t.index for t in program.tasks for v in (*t.reads, *t.writes)}  # task that uses it
        self._last |= {port.view.buffer: len(program.tasks) for port in program.outputs}
        self._instead: dict[int, int] = {}  # by the buffer of a sum, the one that holds it now
        self._open: dict[int, _Open] = {}  # by the buffer of the result
        self._touched: set[int] = set()  # buffers, by the tasks so far
        self._tasks: list[Task | None] = []

    def run(self) -> Program | None:
        """The program with oneDNN's tasks; None if it has none."""
        for before in self._program.tasks:
            task = with_buffers(before, self._now)
            made = _convolution(task, self.weights) or _linear(task, self.weights)
            if made is not None and self._whole(_result(made)) and self._fresh(_result(made)):
                self._add(made)
                self._open[_result(made).buffer] = _Open(len(self._tasks) - 1, made)
            elif not (self._activated(task) or self._added(task)):
                self._add(task)
        tasks = [task for task in self._tasks if task is not None]
        if not any(task.op in OPERATORS for task in tasks):
            return None
        numbered = tuple(replace(task, index=i) for i, task in enumerate(tasks))
        returned = [replace(port.view, buffer=self._now(port.view.buffer)) for port in self._program.outputs]
        outputs = tuple(replace(p, view=v) for p, v in zip(self._program.outputs, returned, strict=True))
        return without_unused(replace(self._program, tasks=numbered, outputs=outputs))

    def _now(self, buffer: int) -> int:
        return self._instead.get(buffer, buffer)

    def _add(self, task: Task) -> None:
        """Append a task. Close what it reads or writes, and what reads something that it writes."""
        written = {v.buffer for v in task.writes}
        touched = written | {v.buffer for v in task.reads}
        self._touched |= touched
        for buffer, entry in list(self._open.items()):
            if buffer in touched or written & {v.buffer for v in entry.task.reads}:
                del self._open[buffer]
        self._tasks.append(task)

    def _activated(self, task: Task) -> bool:
        """Let oneDNN compute an activation together with what it is of; whether it does."""
        activation = _activation(task)
        entry = self._open.get(task.reads[0].buffer) if activation is not None and len(task.reads) == 1 else None
        if activation is None or entry is None or len(task.writes) != 1 or task.args[0] != task.reads[0]:
            return False
        ours, view, result = entry.task, task.reads[0], task.writes[0]
        if ours.args[_ACTIVATION] != NO_ACTIVATION or not self._alike(view, result):
            return False
        if view.buffer != result.buffer and not (self._last[view.buffer] == task.index and self._fresh(result)):
            return False
        args = (*ours.args[:_ACTIVATION], activation, *ours.args[_ACTIVATION + 1 :])
        whole = replace(_result(ours), buffer=result.buffer)
        self._replace(entry, replace(ours, args=args, outputs=whole, writes=(whole,)))
        return True

    def _added(self, task: Task) -> bool:
        """Let a convolution add itself to the other summand, in place, if nothing else needs that; whether it does."""
        if not _is_sum(task) or len(task.writes) != 1:
            return False
        result = task.writes[0]
        for view, other in (task.args, task.args[::-1]):
            assert isinstance(view, View)
            assert isinstance(other, View)
            entry = self._open.get(view.buffer)
            if entry is None or entry.task.op != CONVOLUTION or entry.task.args[_ACTIVATION] != NO_ACTIVATION:
                continue
            x, made = entry.task.args[0], _result(entry.task)
            assert isinstance(x, View)
            done = self._last[view.buffer] == task.index or result.buffer == view.buffer
            free = self._kind[other.buffer] is BufferKind.INTERMEDIATE and other.buffer not in (view.buffer, x.buffer)
            unused = self._last[other.buffer] == task.index or result.buffer == other.buffer
            placed = result.buffer in (view.buffer, other.buffer) or self._fresh(result)
            alike = all(self._alike(each, result) for each in (view, other, made))
            if not (done and free and unused and placed and alike):
                continue
            if result.buffer != other.buffer:
                self._move(result.buffer, other.buffer)
            joined = replace(
                entry.task,
                op=ADDED,
                args=(*entry.task.args[:_ACTIVATION], other),
                outputs=other,
                reads=tuple(dict.fromkeys((*entry.task.reads, other))),
                writes=(other,),
                mutates=(other,),
            )
            self._replace(entry, joined)
            return True
        return False

    def _replace(self, entry: _Open, task: Task) -> None:
        """Put a task in the place where the program is now, instead of an open one. It takes in nothing more."""
        self._tasks[entry.position] = None
        self._add(task)

    def _move(self, buffer: int, place: int) -> None:
        """What is in one buffer from now on is found in another one."""
        self._instead = {b: place if p == buffer else p for b, p in self._instead.items()} | {buffer: place}
        self._last[place] = self._last[buffer]

    def _fresh(self, view: View) -> bool:
        """Whether nothing has used the view's buffer so far."""
        return view.buffer not in self._touched and self._kind[view.buffer] is BufferKind.INTERMEDIATE

    def _alike(self, view: View, other: View) -> bool:
        """Whether two views lay the same elements out in the same way, each filling its buffer."""
        alike = (view.shape, view.stride, view.dtype) == (other.shape, other.stride, other.dtype)
        return alike and self._whole(view) and self._whole(other)

    def _whole(self, view: View) -> bool:
        """Whether a view holds each byte of its buffer once."""
        size = math.prod(view.shape) * view.itemsize
        return view.offset == 0 and view.span == (0, size) and size == self._nbytes[view.buffer]


def _result(task: Task) -> View:
    assert isinstance(task.outputs, View)
    return task.outputs


def _convolution(task: Task, weights: set[int]) -> Task | None:
    """A recorded convolution as one of oneDNN's; None for other tasks."""
    if task.op != "aten.convolution.default" or len(task.args) != 9 or not isinstance(task.outputs, View):
        return None
    x, weight, bias, stride, padding, dilation, transposed, _, groups = task.args
    if not isinstance(x, View) or not isinstance(weight, View) or transposed or len(x.shape) not in _DIMENSIONS:
        return None
    if _unsafe(weight, task.outputs, padding, dilation):
        return None
    settings = (padding, stride, dilation, groups)
    return _made(task, CONVOLUTION, x, weight, bias, (settings,), task.outputs, weights)


def _unsafe(weight: View, out: View, padding: Arg, dilation: Arg) -> bool:
    """Whether torch 2.11's operator over oneDNN may give wrong numbers, or read memory that is not its own.

    It does for groups of one channel if the result is one column wide or a volume, and where the whole kernel fits into
    the padding.
    """
    if weight.shape[1] == 1 and (out.shape[-1] == 1 or len(out.shape) > 4):
        return True
    sizes = weight.shape[2:]
    rims = zip(_each(padding, len(sizes)), sizes, _each(dilation, len(sizes)), strict=True)
    return any(rim > (size - 1) * step for rim, size, step in rims)


def _each(settings: Arg, dimensions: int) -> list[int]:
    """A convolution's setting for each dimension; one may stand for all."""
    assert isinstance(settings, tuple)
    numbers = [n for n in settings if isinstance(n, int)]
    return numbers * dimensions if len(numbers) == 1 else numbers


def _linear(task: Task, weights: set[int]) -> Task | None:
    """A recorded product with a weight as one of oneDNN's linear layers; None for other tasks."""
    name, _, _ = task.op.removeprefix("aten.").partition(".")
    kwargs = {n: a for n, a in task.kwargs if n != "out"}
    if not task.op.startswith("aten.") or (name, len(task.args)) not in _PRODUCTS or kwargs or len(task.writes) != 1:
        return None
    bias, x, weight = (None, *task.args) if name == "mm" else task.args
    out = task.writes[0]
    if not isinstance(x, View) or not isinstance(weight, View) or 0 in x.shape:
        return None
    if isinstance(bias, View) and bias.shape != weight.shape[1:]:
        return None
    return _made(task, LINEAR, x, weight, bias, (), out, weights)


def _made(
    task: Task, op: str, x: View, weight: View, bias: Arg, rest: tuple[Arg, ...], out: View, weights: set[int]
) -> Task | None:
    known = [v for v in (weight, bias) if isinstance(v, View)]
    if any(v.buffer not in weights for v in known) or {v.dtype for v in (x, *known, out)} != {x.dtype}:
        return None
    if not computes_in(dtype(x.dtype)) or 0 in out.shape:
        return None
    if isinstance(bias, View) and bias.stride != (1,):  # oneDNN reads it as if it had no gaps
        return None
    return replace(
        task,
        op=op,
        args=(x, weight, bias, *rest, NO_ACTIVATION, out.stride),
        kwargs=(),
        outputs=out,
        reads=tuple(dict.fromkeys((x, *known))),
        writes=(out,),
        mutates=(),
    )


def _activation(task: Task) -> Activation | None:
    """The activation that a task computes, as oneDNN's operators name it; None if it is none of those that take time.

    oneDNN's ReLU, hardtanh and hardsigmoid make numbers of NaN, and its leaky ReLU without a slope does.
    """
    name = task.op.removeprefix("aten.").partition(".")[0].removesuffix("_")
    kwargs: Mapping[str, Arg] = dict(task.kwargs)
    if len(task.args) != 1:
        return None
    match name:
        case "sigmoid" | "tanh" | "hardswish":
            return name, (), ""
        case "silu":
            return "swish", (), ""
        case "gelu":
            algorithm = kwargs.get("approximate", "none")
            return (name, (), algorithm) if isinstance(algorithm, str) else None
    return None


def _is_sum(task: Task) -> bool:
    """Whether a task adds two tensors and nothing else."""
    name = task.op.removeprefix("aten.").partition(".")[0].removesuffix("_")
    kwargs = [n for n, _ in task.kwargs if n != "out"]
    return name == "add" and not kwargs and len(task.args) == 2 and all(isinstance(a, View) for a in task.args)
