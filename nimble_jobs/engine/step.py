"""Records the forward and the backward pass of a model as two programs that share memory.

Both are recorded in one go. What the backward pass needs from the forward pass (activations, inputs, masks) is an
output of the forward program and state of the backward program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.host_reads import watching
from nimble_jobs.engine.inductor import kernels_to
from nimble_jobs.engine.recompute import draw_once
from nimble_jobs.engine.record import flatten_outputs, held, module_names, recorder_for, refusing
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.errors import CannotRecord
from nimble_jobs.graph.split import split_convolutions
from nimble_jobs.schedule import Arg, Buffer, BufferKind, Port, Program, Task, View

GENERATOR = "@generator"  # a tensor that stands for the random state, so that draws keep their order
_SAVED, _INPUT, _GRADIENT = "@saved.", "@input.", "grad."
_WARM_UP_STEPS = 2  # the first compiles, the second runs the compiled code


@dataclass(frozen=True, kw_only=True)
class Step:
    """A recorded training step without its loss and its optimizer."""

    forward: Recording  # outputs: the model's, and tensors saved for the backward pass
    backward: Recording  # inputs: gradients of outputs; outputs: gradients of leaves
    outputs: tuple[str, ...]  # names of the model's outputs
    differentiable: tuple[str, ...]  # names of the outputs into which gradients flow
    leaves: tuple[str, ...]  # names of the tensors that get a gradient

    @property
    def saved(self) -> dict[str, str]:
        """Names in the backward program's state -> names of the forward program's outputs or inputs."""
        return {
            p.name: p.name.removeprefix(_INPUT)
            for p in self.backward.program.state
            if p.name.startswith((_SAVED, _INPUT))
        }


def gradient_name(name: str) -> str:
    """The name of the gradient of a leaf or of an output."""
    return _GRADIENT + name


def differentiate(
    outputs: Mapping[str, torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    *,
    accumulate: bool,
) -> dict[str, torch.Tensor]:
    """Gradients of the leaves by leaf name, from gradients of some outputs by output name. Unused leaves are absent.

    With `accumulate`, autograd adds them up in the leaves as `Tensor.backward` does, and the leaves' earlier gradients
    are restored. This covers leaves that reentrant checkpoints hide, and runs every hook. Without it, nothing is
    copied.
    """
    roots = [outputs[name] for name in gradients]
    if not roots or not leaves:
        return {}
    with torch.autograd.set_multithreading_enabled(False):  # modes and patches only apply to this thread
        if not accumulate:
            found = torch.autograd.grad(
                roots, list(leaves.values()), grad_outputs=list(gradients.values()), allow_unused=True
            )
            return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
        kept = {name: leaf.grad for name, leaf in leaves.items()}
        try:
            for leaf in leaves.values():
                leaf.grad = None
            torch.autograd.backward(roots, list(gradients.values()))
            return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        finally:
            for name, leaf in leaves.items():
                leaf.grad = kept[name]


def foreign_leaf(outputs: Iterable[torch.Tensor], leaves: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """A tensor outside these leaves to which a backward pass would give a gradient; None if there is none."""
    known = {id(leaf) for leaf in leaves}
    variables = (getattr(node, "variable", None) for node in _graph(outputs))
    return next((v for v in variables if v is not None and id(v) not in known), None)


def reached(output: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Names of the leaves that an output depends on."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    ends = [output, *(getattr(node, "variable", None) for node in _graph([output]))]
    return frozenset(names[id(end)] for end in ends if id(end) in names)


def _graph(outputs: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes of autograd's graph behind these tensors."""
    seen: set[Any] = set()
    waiting: list[Any] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def record_step(
    call: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    module: nn.Module,
    compiled: bool = False,
    accumulate: bool = False,
) -> Step:
    """Record one call and its backward pass with respect to `leaves`: parameters, and inputs that require grad.

    `accumulate` is as in `differentiate`. Raises CannotRecord as `record` does, and if no output depends on a leaf.
    """
    recorder = recorder_for(inputs, state, device)

    def watched() -> AbstractContextManager[object]:
        return kernels_to(recorder) if compiled else watching(recorder)

    def in_eager() -> None:
        found = flatten_outputs(call(*inputs.values()))
        differentiate(found, leaves, _ones_like(found), accumulate=accumulate)

    with torch.enable_grad():
        for _ in range(_WARM_UP_STEPS if compiled else 0):
            in_eager()
    with torch.enable_grad(), refusing(in_eager), held(module, state, recorder):
        with module_names(None if compiled else module, recorder), watched():
            outputs = flatten_outputs(call(*inputs.values()))
        with recorder:
            outputs = recorder.own(outputs)
        tasks, buffers = recorder.counts
        gradients = {n: g.clone() for n, g in _ones_like(outputs).items()}
        if not gradients or not leaves:
            raise CannotRecord("no output of the model depends on a tensor that requires grad")
        for name, gradient in gradients.items():
            recorder.add_known(gradient, BufferKind.INPUT, gradient_name(name))
        recorder.path = ["backward"]
        with watched():
            found = differentiate(outputs, leaves, gradients, accumulate=accumulate)
        with recorder:
            found = recorder.own(found, since=buffers)
    whole = recorder.finish(
        _apart(inputs, {gradient_name(n): g for n, g in gradients.items()}),
        _apart(outputs, {gradient_name(n): g for n, g in found.items()}),
    )
    program, tasks = draw_once(whole.program, tasks, recorder.draws)
    forward, backward = _split(program, tasks, len(inputs), len(outputs))
    return Step(
        forward=Recording(program=forward, constants=whole.constants, kernels=whole.kernels),
        backward=Recording(program=split_convolutions(backward), constants=whole.constants, kernels=whole.kernels),
        outputs=tuple(outputs),
        differentiable=tuple(gradients),
        leaves=tuple(found),
    )


def _apart(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The union. Raises CannotRecord if both have the same name, or one has a name that steps reserve."""
    twice = next((n for n in first if n in second or n.startswith("@")), None)
    if twice is not None:
        raise CannotRecord(f"the model has a tensor named {twice!r}, a name that the training step uses; rename it")
    return {**first, **second}


def _ones_like(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: torch.ones_like(t) for n, t in outputs.items() if t.requires_grad}


def _split(whole: Program, tasks: int, inputs: int, outputs: int) -> tuple[Program, Program]:
    """Split a program: the first `tasks` tasks with the first inputs and outputs, and all the rest."""
    before, after = whole.tasks[:tasks], whole.tasks[tasks:]
    made = {
        v.buffer: v
        for t in reversed(before)
        for v in reversed(t.writes)
        if whole.buffers[v.buffer].kind is BufferKind.INTERMEDIATE
    }
    first_inputs = {p.view.buffer: p for p in whole.inputs[:inputs]}
    needed = sorted({v.buffer for t in after for v in _views(t)} & (made.keys() | first_inputs.keys()))
    saved = [
        Port(name=_INPUT + first_inputs[b].name, view=first_inputs[b].view)
        if b in first_inputs
        else Port(name=f"{_SAVED}{i}", view=made[b])
        for i, b in enumerate(needed)
    ]
    forward = _part(
        _with_generator(whole),
        lambda program: program.tasks[:tasks],
        whole.inputs[:inputs],
        (),
        (*whole.outputs[:outputs], *(p for p in saved if p.name.startswith(_SAVED))),
    )
    backward = _part(
        whole, lambda program: program.tasks[tasks:], whole.inputs[inputs:], saved, whole.outputs[outputs:]
    )
    return forward, backward


def _with_generator(program: Program) -> Program:
    """The program with each draw from the generator as a write to one more tensor."""
    if not any(t.random for t in program.tasks):
        return program
    buffer = Buffer(index=len(program.buffers), kind=BufferKind.STATE, nbytes=1, name=GENERATOR)
    view = View(buffer=buffer.index, dtype="uint8", itemsize=1, shape=(1,), stride=(1,))
    tasks = tuple(
        replace(t, reads=(*t.reads, view), writes=(*t.writes, view), mutates=(*t.mutates, view)) if t.random else t
        for t in program.tasks
    )
    return replace(
        program,
        buffers=(*program.buffers, buffer),
        tasks=tasks,
        state=(*program.state, Port(name=GENERATOR, view=view)),
    )


def _part(
    whole: Program,
    choose: Callable[[Program], tuple[Task, ...]],
    inputs: Iterable[Port],
    more_state: Iterable[Port],
    outputs: Iterable[Port],
) -> Program:
    """A program of some of the tasks. The buffers that they touch get new numbers."""
    tasks, inputs, more_state, outputs = choose(whole), tuple(inputs), tuple(more_state), tuple(outputs)
    touched = {v.buffer for t in tasks for v in _views(t)} | {p.view.buffer for p in (*inputs, *more_state, *outputs)}
    number = {old: new for new, old in enumerate(sorted(touched))}
    names = {p.view.buffer: p.name for p in more_state}

    def port(p: Port) -> Port:
        return Port(name=p.name, view=replace(p.view, buffer=number[p.view.buffer]))

    def moved(arg: Arg) -> Arg:
        if isinstance(arg, View):
            return replace(arg, buffer=number[arg.buffer])
        return tuple(moved(a) for a in arg) if isinstance(arg, tuple) else arg

    def views(given: tuple[View, ...]) -> tuple[View, ...]:
        return tuple(replace(v, buffer=number[v.buffer]) for v in given)

    return Program(
        buffers=tuple(
            replace(whole.buffers[old], index=new, kind=BufferKind.STATE, name=names[old])
            if old in names
            else replace(whole.buffers[old], index=new)
            for old, new in number.items()
        ),
        tasks=tuple(
            replace(
                t,
                index=i,
                args=tuple(moved(a) for a in t.args),
                kwargs=tuple((n, moved(a)) for n, a in t.kwargs),
                outputs=moved(t.outputs),
                reads=views(t.reads),
                writes=views(t.writes),
                mutates=views(t.mutates),
            )
            for i, t in enumerate(tasks)
        ),
        inputs=tuple(port(p) for p in inputs),
        state=tuple(port(p) for p in (*(p for p in whole.state if p.view.buffer in touched), *more_state)),
        constants=tuple(port(p) for p in whole.constants if p.view.buffer in touched),
        outputs=tuple(port(p) for p in outputs),
    )


def _views(task: Task) -> list[View]:
    found = [*task.reads, *task.writes, *task.mutates]

    def walk(arg: Arg) -> None:
        if isinstance(arg, View):
            found.append(arg)
        elif isinstance(arg, tuple):
            for a in arg:
                walk(a)

    for arg in (*task.args, *(a for _, a in task.kwargs), task.outputs):
        walk(arg)
    return found
