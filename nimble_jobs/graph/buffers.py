"""Rename the buffers of a program, and take those out that none of its tasks touches any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nimble_jobs.schedule import Arg, Buffer, BufferKind, Port, Program, Task, View


def without_unused(program: Program) -> Program:
    """The program without intermediates that no task and no output names. The others are numbered anew, in order."""
    used = {v.buffer for t in program.tasks for v in (*t.reads, *t.writes, *t.mutates)}
    used |= {port.view.buffer for port in program.outputs}
    kept = [b for b in program.buffers if b.index in used or b.kind is not BufferKind.INTERMEDIATE]
    if len(kept) == len(program.buffers):
        return program
    numbers = {buffer.index: i for i, buffer in enumerate(kept)}
    buffers: tuple[Buffer, ...] = tuple(replace(buffer, index=i) for i, buffer in enumerate(kept))
    return Program(
        buffers=buffers,
        tasks=tuple(with_buffers(task, numbers.__getitem__) for task in program.tasks),
        inputs=_ports(program.inputs, numbers.__getitem__),
        state=_ports(program.state, numbers.__getitem__),
        constants=_ports(program.constants, numbers.__getitem__),
        outputs=_ports(program.outputs, numbers.__getitem__),
    )


def with_buffers(task: Task, number: Callable[[int], int]) -> Task:
    """The task over other buffers: `number` gives the new index of each."""
    return replace(
        task,
        args=tuple(_arg(a, number) for a in task.args),
        kwargs=tuple((name, _arg(a, number)) for name, a in task.kwargs),
        outputs=_arg(task.outputs, number),
        reads=tuple(_view(v, number) for v in task.reads),
        writes=tuple(_view(v, number) for v in task.writes),
        mutates=tuple(_view(v, number) for v in task.mutates),
    )


def _arg(arg: Arg, number: Callable[[int], int]) -> Arg:
    if isinstance(arg, View):
        return _view(arg, number)
    return tuple(_arg(a, number) for a in arg) if isinstance(arg, tuple) else arg


def _view(view: View, number: Callable[[int], int]) -> View:
    return replace(view, buffer=number(view.buffer))


def _ports(ports: tuple[Port, ...], number: Callable[[int], int]) -> tuple[Port, ...]:
    return tuple(replace(port, view=_view(port.view, number)) for port in ports)
