"""Bind a program to live tensors. Each task becomes a call whose operator and fixed arguments are resolved.

Buffers of inputs, state and constants are fixed for the life of a binding. An intermediate that an operator returns is
released as soon as the plan proves that no task still uses it, so that the allocator can reuse its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from nimble_jobs.engine import onednn
from nimble_jobs.engine.encode import decode, dtype, operator, view_of
from nimble_jobs.engine.private.modes import below_autograd
from nimble_jobs.engine.private.operators import wants_grad_mode
from nimble_jobs.engine.workspace import workspace_bytes
from nimble_jobs.errors import EngineError
from nimble_jobs.graph.check import check_memory
from nimble_jobs.graph.memory import MemoryPlan, live_bytes, plan_memory
from nimble_jobs.graph.release import releases
from nimble_jobs.schedule import Arg, BufferKind, Plan, Port, Program, Task, View

Env = dict[int, torch.Tensor]  # buffer index -> a tensor over its storage


@dataclass(frozen=True, slots=True)
class Step:
    """One task, ready to be called."""

    task: int
    call: Callable[[Env], None]
    drops: tuple[int, ...]  # buffers to release before the call
    stream: int
    waits: tuple[int, ...]  # tasks on other streams that must have finished
    marked: bool  # tasks on other streams wait for it


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A program over live tensors."""

    inputs: dict[str, torch.Tensor]
    fixed: Env
    steps: tuple[Step, ...]
    outputs: tuple[Port, ...]
    nbytes: int  # size of inputs, outputs, packed weights and the arena: everything that no operator allocates

    def run(self) -> dict[str, torch.Tensor]:
        """Launch every task in the plan's order, all on the current stream, and return the outputs."""
        env = dict(self.fixed)
        for step in self.steps:
            for buffer in step.drops:
                del env[buffer]
            step.call(env)
        return self.results(env)

    def results(self, env: Env) -> dict[str, torch.Tensor]:
        """The outputs by name, once every task has been launched."""
        return {port.name: tensor_at(env[port.view.buffer], port.view) for port in self.outputs}


def tensor_at(base: torch.Tensor, view: View, start: int = 0) -> torch.Tensor:
    """The tensor that a view describes, over the storage of `base` from `start` on, in the view's items."""
    wanted, offset = dtype(view.dtype), start + view.offset
    if base.dtype == wanted:
        if base.shape == view.shape and base.stride() == view.stride and base.storage_offset() == offset:
            return base
        return base.as_strided(view.shape, view.stride, offset)
    empty = torch.empty(0, dtype=wanted, device=base.device)
    return empty.set_(base.untyped_storage(), offset, view.shape, view.stride)


def bind(
    program: Program,
    plan: Plan,
    *,
    state: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    device: torch.device,
    kernels: Mapping[str, Callable[..., None]] = MappingProxyType({}),
    memory: MemoryPlan | None = None,
) -> Bound:
    """Bind a program to a module's state on `device`. `memory` places the intermediates (default: `arena_plan`).

    Raises EngineError if the state is not laid out as it was when the program was recorded.
    """
    inputs = {p.name: _allocate(p.view, program.buffers[p.view.buffer].nbytes, device) for p in program.inputs}
    fixed: Env = {p.view.buffer: inputs[p.name] for p in program.inputs}
    for port in program.state:
        fixed[port.view.buffer] = _state_tensor(port, state)
    for port in program.constants:
        if port.name not in constants:
            raise EngineError(f"the schedule's constant {port.name[:12]} is missing")
        on_host = program.buffers[port.view.buffer].on_host
        fixed[port.view.buffer] = constants[port.name].to("cpu" if on_host else device)
    made = _made(program)
    starts = _place_intermediates(program, plan, made, fixed, device, memory or arena_plan(program, plan))
    own = [*inputs.values(), *(t for b, t in fixed.items() if program.buffers[b].kind is BufferKind.INTERMEDIATE)]
    kept = {p.view.buffer for p in program.outputs}
    drops = releases(program, plan, made - kept)
    waits: dict[int, list[int]] = {}
    for sync in plan.syncs:
        waits.setdefault(sync.after, []).append(sync.before)
    marked = {sync.before for sync in plan.syncs}
    tensors: dict[View, torch.Tensor] = {}
    return Bound(
        inputs=inputs,
        fixed=fixed,
        steps=tuple(
            Step(
                task=i,
                call=_call(program.tasks[i], fixed, starts, device, kernels, tensors),
                drops=drops.get(i, ()),
                stream=plan.stream_of[i],
                waits=tuple(waits.get(i, ())),
                marked=i in marked,
            )
            for i in plan.order
        ),
        outputs=program.outputs,
        nbytes=sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own}.values())
        + onednn.packed_bytes(program),
    )


def arena_plan(program: Program, plan: Plan) -> MemoryPlan:
    """Places in one arena for the intermediates that no operator allocates."""
    return plan_memory(program, plan, among=_intermediates(program) - _made(program))


def planned_bytes(program: Program, plan: Plan, memory: MemoryPlan, device: torch.device) -> int:
    """Device memory in bytes that one instance needs beyond the module's state, known before it is captured.

    The sum of inputs, outputs, the arena, what operators allocate, packed weights, and `workspace_bytes`.
    """
    kept = {p.view.buffer for p in program.outputs}
    own = {p.view.buffer for p in program.inputs} | kept
    allocated = live_bytes(program, among=_made(program) - kept)
    buffers = sum(program.buffers[b].nbytes for b in own) + memory.peak_bytes + allocated
    return buffers + onednn.packed_bytes(program) + workspace_bytes(program, plan, device)


def _made(program: Program) -> set[int]:
    """The buffers that operators allocate."""
    return {v.buffer for t in program.tasks for v in set(t.writes).difference(t.mutates)}


def _intermediates(program: Program) -> set[int]:
    return {b.index for b in program.buffers if b.kind is BufferKind.INTERMEDIATE}


def _place_intermediates(
    program: Program, plan: Plan, made: set[int], fixed: Env, device: torch.device, memory: MemoryPlan
) -> dict[int, int]:
    """Give bytes to every intermediate that no operator allocates: in one arena, or for an output, memory of its own.

    Adds them to `fixed` and returns each one's start in the arena, in bytes.
    """
    unallocated = _intermediates(program) - made
    if len(memory.offsets) != len(program.buffers):
        raise EngineError(
            f"the memory plan places {len(memory.offsets)} buffers, but the program has {len(program.buffers)}"
        )
    check_memory(program, plan, memory, among=unallocated)
    arena = torch.empty(memory.peak_bytes, dtype=torch.uint8, device=device)
    starts = {i: start for i in unallocated if (start := memory.offsets[i]) is not None}
    for index in unallocated:
        own = (
            torch.empty(program.buffers[index].nbytes, dtype=torch.uint8, device=device)
            if index not in starts
            else arena
        )
        fixed[index] = own
    return starts


def _allocate(view: View, nbytes: int, device: torch.device) -> torch.Tensor:
    base = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return tensor_at(base, view)


def _state_tensor(port: Port, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = state.get(port.name)
    if tensor is None:
        raise EngineError(f"the module has no tensor {port.name!r}, which the schedule reads")
    actual = view_of(tensor, port.view.buffer)
    if actual != port.view:
        raise EngineError(
            f"the module's tensor {port.name!r} is {actual.dtype}{list(actual.shape)} with strides "
            f"{list(actual.stride)}; the schedule expects {port.view.dtype}{list(port.view.shape)} with strides "
            f"{list(port.view.stride)}"
        )
    return tensor.detach()


class _Dynamic:
    """An argument that lies in an intermediate, and so is a different tensor in each run."""

    __slots__ = ("view",)

    def __init__(self, view: View) -> None:
        self.view = view


def _call(
    task: Task,
    fixed: Env,
    starts: Mapping[int, int],
    device: torch.device,
    kernels: Mapping[str, Callable[..., None]],
    tensors: dict[View, torch.Tensor],
) -> Callable[[Env], None]:
    """A task's launch. `tensors` are those of earlier tasks, which this one uses again: most are read several times.

    That holds because no task changes the shape, the strides or the storage of a tensor that it is given.
    """
    op: Callable[..., Any] = kernels.get(task.op) or onednn.caller(task.op) or _operator(task.op)

    def at_bind_time(view: View) -> Any:
        if view.buffer not in fixed:
            return _Dynamic(view)
        if view not in tensors:
            start = starts.get(view.buffer, 0) // view.itemsize  # starts are multiples of every item size
            tensors[view] = tensor_at(fixed[view.buffer], view, start)
        return tensors[view]

    args = [decode(a, at_bind_time, device) for a in task.args]
    kwargs = {name: decode(a, at_bind_time, device) for name, a in task.kwargs}
    existing = {v.buffer for v in (*task.reads, *task.mutates)}
    results = _fresh_outputs(task.outputs, existing)
    fixed_args = not any(map(_changes, (*args, *kwargs.values())))

    def call(env: Env) -> None:
        if fixed_args:
            result = op(*args, **kwargs)
        else:
            result = op(*[_resolve(a, env) for a in args], **{n: _resolve(a, env) for n, a in kwargs.items()})
        for path, view in results:
            value = result
            for position in path:
                value = value[position]
            if value is None:
                raise EngineError(f"{task.op} returned nothing; the schedule expects {list(view.shape)}")
            if value.stride() != view.stride or value.shape != view.shape:
                raise EngineError(
                    f"{task.op} returned {list(value.shape)} with strides {list(value.stride())}; "
                    f"the schedule expects {list(view.shape)} with strides {list(view.stride)}"
                )
            env[view.buffer] = value

    return call


def _operator(name: str) -> Callable[..., Any]:
    op = operator(name)
    if not wants_grad_mode(name):
        return op

    def with_grad_mode(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), below_autograd():
            return op(*args, **kwargs)

    return with_grad_mode


def _changes(value: Any) -> bool:
    """Whether `_resolve` makes something else of it."""
    return type(value) is _Dynamic or (type(value) is list and any(map(_changes, value)))


def _resolve(value: Any, env: Env) -> Any:
    if type(value) is _Dynamic:
        return tensor_at(env[value.view.buffer], value.view)
    if type(value) is list:
        return [_resolve(v, env) for v in value]
    return value


def _fresh_outputs(outputs: Arg, existing: set[int], path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], View]]:
    if isinstance(outputs, View):
        return [] if outputs.buffer in existing else [(path, outputs)]
    if isinstance(outputs, tuple):
        return [r for i, item in enumerate(outputs) for r in _fresh_outputs(item, existing, (*path, i))]
    return []
