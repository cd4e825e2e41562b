"""Split the backward of a convolution in two, so that earlier layers only wait for gradients of activations.

The operator returns the gradients of its input, weight and bias together, although it computes input and weight in
separate kernels. As one task, it makes earlier layers wait for the gradient of the weight, which only the update needs.
"""

from __future__ import annotations

from dataclasses import replace

from nimble_jobs.schedule import Arg, Program, Task, View

_OP = "aten.convolution_backward.default"
_MASK = 10  # position of the argument `output_mask`, which says which of the three gradients to compute


def split_convolutions(program: Program) -> Program:
    """The program with two tasks for each such backward: the input's gradient, then the weight's and the bias's."""
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
