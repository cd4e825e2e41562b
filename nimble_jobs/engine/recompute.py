"""Handles activations that a backward pass computes again, as torch's checkpoints do.

They need the forward pass's random numbers. Eager resets the generator and draws again. A replay cannot, so its
backward pass reads the numbers that its forward pass has drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nimble_jobs.errors import CannotRecord
from nimble_jobs.schedule import Arg, Buffer, BufferKind, Program, Task, View

_COPY = "aten.copy_.default"


def draw_once(program: Program, forward: int, states: Mapping[int, bytes]) -> tuple[Program, int]:
    """Replace each draw of the backward pass by copies of what the forward pass drew from the same generator state.

    The first `forward` tasks are the forward pass. `states` are the generator's states before each draw, by task.
    Returns the program and its forward pass's new number of tasks. Raises CannotRecord if a draw in the backward pass
    does not repeat one of the forward pass.
    """
    pairs: dict[int, int] = {}  # task of the backward pass -> task of the forward pass
    for late in (t for t in program.tasks[forward:] if t.random):
        early = next((t for t in program.tasks[:forward] if t.random and _repeats(late, t, states)), None)
        if early is None:
            raise CannotRecord(
                f"{late.op} in the backward pass draws random numbers that the forward pass did not draw"
            )
        pairs[late.index] = early.index
    if not pairs:
        return program, forward
    buffers = list(program.buffers)
    kept = {early: _kept(program, program.tasks[early], buffers) for early in dict.fromkeys(pairs.values())}
    tasks: list[Task] = []
    for task in program.tasks:
        if task.index == forward:
            first = len(tasks)
        if task.index in pairs:
            tasks += [_copied(view, to, task) for view, to in zip(kept[pairs[task.index]], task.writes, strict=True)]
            continue
        tasks.append(task)
        for view, original in zip(kept.get(task.index, ()), task.writes, strict=False):
            if view != original:
                tasks.append(_copied(original, view, task))
    numbered = tuple(replace(t, index=i) for i, t in enumerate(tasks))
    return replace(program, buffers=tuple(buffers), tasks=numbered), first


def _repeats(late: Task, early: Task, states: Mapping[int, bytes]) -> bool:
    """Whether both are the same call, from the same generator state."""
    if "_attention" in late.op or states.get(late.index) != states.get(early.index, b""):
        return False
    return late.op == early.op and _form(late.args) == _form(early.args) and _form(late.kwargs) == _form(early.kwargs)


def _form(arg: Arg | Sequence[object]) -> object:
    """An argument without its place in memory."""
    if isinstance(arg, View):
        return arg.dtype, arg.shape, arg.stride
    return tuple(_form(a) for a in arg) if isinstance(arg, tuple) else arg


def _kept(program: Program, early: Task, buffers: list[Buffer]) -> tuple[View, ...]:
    """Where the values that a task wrote stay readable: in place, or in a copy if they are overwritten later."""
    later = {v.buffer for t in program.tasks[early.index + 1 :] for v in t.writes}
    found = []
    for view in early.writes:
        if view.buffer in later:
            index = len(buffers)
            nbytes = program.buffers[view.buffer].nbytes
            buffers.append(Buffer(index=index, kind=BufferKind.INTERMEDIATE, nbytes=nbytes, name=None))
            view = replace(view, buffer=index)
        found.append(view)
    return tuple(found)


def _copied(view: View, to: View, task: Task) -> Task:
    return replace(
        task,
        op=_COPY,
        args=(to, view),
        kwargs=(),
        outputs=to,
        reads=(to, view),
        writes=(to,),
        mutates=(to,),
        random=False,
    )
