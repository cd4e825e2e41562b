"""Split the backward of convolutions in two, so that only gradients of activations are on the way to earlier layers.

The operator returns the gradients of its input, weight and bias together, by kernels of their own for input and weight.
As one task it makes whatever needs the first wait for the second, although nothing before the update needs that.
"""

from __future__ import annotations

from dataclasses import replace

from nimble_jobs.schedule import Arg, Program, Task, View

_OP = "aten.convolution_backward.default"
_MASK = 10  # position of the argument that says which of the three gradients are wanted


def split_convolutions(program: Program) -> Program:
    """The program with each such task as two: the input's gradient, then the weight's and the bias's."""
    tasks: list[Task] = []
    for task in program.tasks:
        tasks += [replace(part, index=len(tasks) + i) for i, part in enumerate(_parts(task))]
    return replace(program, tasks=tuple(tasks))


def _parts(task: Task) -> tuple[Task, ...]:
    if task.op != _OP or len(task.args) <= _MASK or not isinstance(task.outputs, tuple):
        return (task,)
    mask = task.args[_MASK]
    if not isinstance(mask, tuple) or len(mask) != len(task.outputs) or mask[0] is not True or mask[1] is not True:
        return (task,)
    return _with(task, (True, False, False)), _with(task, (False, *mask[1:]))


def _with(task: Task, mask: tuple[Arg, ...]) -> Task:
    assert isinstance(task.outputs, tuple)
    outputs = tuple(view if wanted else None for view, wanted in zip(task.outputs, mask, strict=True))
    made = {view.buffer for view in outputs if isinstance(view, View)}
    return replace(
        task,
        args=(*task.args[:_MASK], mask, *task.args[_MASK + 1 :]),
        outputs=outputs,
        writes=tuple(view for view in task.writes if view.buffer in made),
    )
