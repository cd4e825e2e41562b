"""Activations that a backward pass computes again, as checkpoints do, with the random numbers of the forward pass.

Eager sets the generator back and draws once more. A replay cannot, so its backward takes what its forward has drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nimble_jobs.errors import CannotRecord
from nimble_jobs.schedule import Arg, Buffer, BufferKind, Program, Task, View

_COPY = "aten.copy_.default"


def draw_once(program: Program, forward: int, states: Mapping[int, bytes]) -> tuple[Program, int]:
    """The program with each draw after the first `forward` tasks replaced by copies of what they drew from the same
    state of the generator; and how many tasks these are now.

    `states` are those before the draws, by task. Raises CannotRecord for a draw that is no such repetition.
    """
    pairs: dict[int, int] = {}  # task of the backward -> of the forward
    for late in (t for t in program.tasks[forward:] if t.random):
        early = next((t for t in program.tasks[:forward] if t.random and _repeats(late, t, states)), None)
        if early is None:
            raise CannotRecord(
                f"{late.op} in the backward pass draws random numbers; the forward's would be drawn again"
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
    """Whether both are the same call from the same state of the generator."""
    if "_attention" in late.op or states.get(late.index) != states.get(early.index, b""):
        return False
    return late.op == early.op and _form(late.args) == _form(early.args) and _form(late.kwargs) == _form(early.kwargs)


def _form(arg: Arg | Sequence[object]) -> object:
    """An argument without the memory that it lies in."""
    if isinstance(arg, View):
        return arg.dtype, arg.shape, arg.stride
    return tuple(_form(a) for a in arg) if isinstance(arg, tuple) else arg


def _kept(program: Program, early: Task, buffers: list[Buffer]) -> tuple[View, ...]:
    """Where what a task wrote can be read for good: in its own place, or in a copy where that is written again."""
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
