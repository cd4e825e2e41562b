"""The recorder: a dispatch mode that turns every operator, and every kernel of Inductor, into a task.

It sees operators, not modules. Views and allocations cost nothing in a replay, so they become strides over buffers.
Everything else becomes a task that lists what it reads, writes and mutates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from nimble_jobs.engine.encode import encode
from nimble_jobs.engine.into import into_buffers
from nimble_jobs.engine.memory import MASKS, Memory
from nimble_jobs.engine.private.modes import DispatchMode, functions_off, modes_off
from nimble_jobs.engine.private.operators import (
    OpOverload,
    draws_random,
    returns_seeds,
    returns_unused_seeds,
    write_arguments,
    write_only_arguments,
)
from nimble_jobs.engine.private.runtime import forget_compiled, random_state
from nimble_jobs.engine.private.tensors import storage_id, tree_leaves
from nimble_jobs.errors import CannotRecord
from nimble_jobs.schedule import BufferKind, Port, Program, Task
from nimble_jobs.task_times import TaskChoice

_HOST_READS = {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.equal.default"}
# Views that differ from their tensor in a bit that strides cannot express -> operators that compute the same.
_WITHOUT_BITS = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
# Operators whose outputs' shapes depend on the values of one tensor, though no tag says so: its place among them.
_SHAPED_BY_DATA = {
    "aten._pack_padded_sequence.default": 1,
    "aten._pad_packed_sequence.default": 1,
    "torchvision.nms.default": 0,
}
_INDEX = "aten.index.Tensor"
_LEAST_SQUARES = "aten.linalg_lstsq.default"
_SHAPED_BY_SHAPES = (None, "gels", "gelsy")  # drivers of it; others leave residuals out where the rank is low
_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}


class Kernel(Protocol):
    """A compiled kernel that is not an operator. It is called with its task's arguments, on the current stream."""

    @property
    def name(self) -> str:
        """The name that tasks use, unless another kernel of the program has it."""

    @property
    def identity(self) -> object:
        """Equal for kernels that do the same."""

    @property
    def write_only(self) -> set[int]:
        """Positions of arguments that it only writes."""

    @property
    def updated(self) -> set[int]:
        """Positions of arguments that it reads and writes."""

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A program, with the bytes of its constants and its compiled kernels."""

    program: Program
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # by SHA-256
    kernels: dict[str, Kernel] = field(default_factory=dict)  # by name
    example: dict[str, torch.Tensor] = field(default_factory=dict)  # inputs that its operators can take
    layout_question: str | None = None  # the first one, about a tensor that varies, and where it was asked
    choices: tuple[TaskChoice, ...] = ()  # of the ways in which its tasks run


class Recorder(Memory, DispatchMode):
    """Collects tasks and the buffers that they use."""

    supports_higher_order_operators = True  # so that they arrive here and are refused by name

    def __init__(self, device: torch.device) -> None:
        DispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        Memory.__init__(self, device)
        self._saw_functions = False  # in an operator that takes them, and may have had them compiled
        self._tasks: list[Task] = []
        self._kernels: dict[str, Kernel] = {}
        self.draws: dict[int, bytes] = {}  # the generator's state before each draw, by task

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._saw_functions:
            forget_compiled()  # code that was compiled under this mode fails without it

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with functions_off():  # what an operator's own Python code reads, each replay reads again
            return self._dispatched(op, args, dict(kwargs or {}))

    def _dispatched(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(op, OpOverload):
            self._saw_functions = True
            self.refuse(f"{op} at {{source}} takes functions, whose choice may depend on the data")
        op = _WITHOUT_BITS.get(op, op)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._refuse_layouts(op, tensors)
        self._keep += tensors
        constant = self._depends_on_data(op, tensors, kwargs) or self._is_constant_work(op, tensors)
        if not constant:
            args = self._without_masks(op, args)
            args, kwargs = self._move_host_constants(op, args, kwargs)
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        random = not constant and draws_random(op, args, kwargs)
        state = random_state(self.device) if random else None
        before = [(t, self._memory_of(t)) for t in tensors]
        result = op(*args, **kwargs)
        moved = [memory for t, memory in before if self._memory_of(t) != memory]
        if moved and self._becomes_a_view(op, args, moved):
            return result
        if moved:
            self.refuse(f"{op} at {{source}} moves a tensor to other memory")
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._refuse_layouts(op, outputs)
        self._keep += outputs
        if constant:
            return result
        writes = write_arguments(op, args, kwargs)
        if op.namespace == "aten" and op._schema.name.removeprefix("aten::") in _ALLOCATIONS:
            for tensor in outputs:
                self._ensure(tensor)
            return result
        if not writes and op._schema.returns and self._is_view(tensors, outputs):
            return result  # of a storage that is known, or of a constant; or no tensor, but what is known of one
        if not (writes or tensors or outputs):
            return result
        if not writes and all(storage_id(t) not in self._index for t in outputs):
            with modes_off():  # some of torch's questions are answered by looking at strides
                op, args, kwargs = into_buffers(op, args, kwargs, result) or (op, args, kwargs)
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            writes = write_arguments(op, args, kwargs)
        self._add_task(op, args, kwargs, result, tensors, outputs, writes)
        if state is not None:
            self.draws[len(self._tasks) - 1] = state
        return result

    def _add_task(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        tensors: list[torch.Tensor],
        outputs: list[torch.Tensor],
        writes: tuple[tuple[int, str], ...],
    ) -> None:
        mutated = [
            t
            for position, name in writes
            for t in tree_leaves(args[position] if position < len(args) else kwargs.get(name))
            if isinstance(t, torch.Tensor)
        ]
        seeds = returns_seeds(op, args, kwargs)
        kept = result if seeds else _tensors_on(self.device, result)
        strays = any(t.device.type != self.device.type for t in outputs)
        fresh = [t for t in tree_leaves(kept) if isinstance(t, torch.Tensor) and storage_id(t) not in self._index]
        if strays and not seeds and not returns_unused_seeds(op, args, kwargs):
            self.refuse(f"{op} at {{source}} copies data from the device to the host")
        write_only = write_only_arguments(op)
        for name in write_only:
            for tensor in tree_leaves(kwargs.get(name)):
                if isinstance(tensor, torch.Tensor):
                    self._ensure(tensor)  # it is filled here: what it held before does not matter
        filled = {id(t) for name in write_only for t in tree_leaves(kwargs.get(name))}
        reads = tuple(dict.fromkeys(self._view(t) for t in tensors if id(t) not in filled))
        encoded = tuple(encode(a, self._view, self.device) for a in args)
        encoded_kwargs = tuple((n, encode(a, self._view, self.device)) for n, a in kwargs.items())
        mutates = tuple(dict.fromkeys(self._view(t) for t in mutated))
        for tensor in fresh:
            self._ensure(tensor)
        writes_of = tuple(dict.fromkeys((*mutates, *(self._view(t) for t in fresh))))
        self._refuse_strange_memory(str(op), reads, mutates, writes_of)
        random = draws_random(op, args, kwargs)
        self._vary(reads, writes_of, random=random)
        self._tasks.append(
            Task(
                index=len(self._tasks),
                op=str(op),
                args=encoded,
                kwargs=encoded_kwargs,
                outputs=encode(kept, self._view, self.device),
                reads=reads,
                writes=writes_of,
                mutates=mutates,
                random=random,
                source=self._source(),
            )
        )

    def add_kernel(self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the launch of a compiled kernel. Its buffers were allocated where no mode could see it."""
        self._keep += [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for position in kernel.write_only:
            self._ensure(args[position])
        views = {i: self._view(a) for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
        written = kernel.write_only | kernel.updated
        mutates = tuple(dict.fromkeys(v for i, v in views.items() if i in written))
        reads = tuple(dict.fromkeys(v for i, v in views.items() if i not in kernel.write_only))
        self._refuse_strange_memory(kernel.name, reads, mutates, mutates)
        self._vary(reads, mutates, random=False)
        self._tasks.append(
            Task(
                index=len(self._tasks),
                op=self._name_kernel(kernel),
                args=tuple(encode(a, self._view, self.device) for a in args),
                kwargs=tuple((n, encode(a, self._view, self.device)) for n, a in kwargs.items()),
                outputs=None,
                reads=reads,
                writes=mutates,
                mutates=mutates,
                source=None,
            )
        )

    def _name_kernel(self, kernel: Kernel) -> str:
        """The kernel's unique name in this program. Compilers may give kernels of different graphs the same name."""
        name, number = kernel.name, 1
        while self._kernels.setdefault(name, kernel).identity != kernel.identity:
            number += 1
            name = f"{kernel.name}.{number}"
        return name

    @property
    def counts(self) -> tuple[int, int]:
        """How many tasks and buffers have been recorded so far."""
        return len(self._tasks), len(self._buffers)

    def memory(self) -> set[int]:
        """What tasks read or write, by `storage_id`."""
        touched = {v.buffer for t in self._tasks for v in (*t.reads, *t.writes, *t.mutates)}
        return {identity for identity, index in self._index.items() if index in touched}

    def own(self, outputs: Mapping[str, torch.Tensor], *, since: int = 0) -> dict[str, torch.Tensor]:
        """Outputs that alias inputs, state, constants or the first `since` buffers are cloned by a recorded task.

        Returns all outputs by name.
        """
        made = {b.index for b in self._buffers[since:] if b.kind is BufferKind.INTERMEDIATE}
        with functions_off():
            return {n: t if self._index.get(storage_id(t)) in made else t.clone() for n, t in outputs.items()}

    def finish(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> Recording:
        """The recorded program. Raises CannotRecord if an output lies on another device."""
        for name, tensor in outputs.items():
            if tensor.device.type != self.device.type:
                raise CannotRecord(f"the model's output {name!r} is on {tensor.device}; expected {self.device}")
        return Recording(
            program=Program(
                inputs=tuple(Port(name=n, view=self._view(t)) for n, t in inputs.items()),
                outputs=tuple(Port(name=n, view=self._view(t)) for n, t in outputs.items()),
                tasks=tuple(self._tasks),
                state=tuple(self._state),
                constants=tuple(self._constant_ports),
                buffers=tuple(self._buffers),
            ),
            constants=self._constants,
            kernels=self._kernels,
            example={n: t.detach() for n, t in inputs.items()},
            layout_question=self.layout_question,
        )

    def _is_constant_work(self, op: OpOverload, tensors: list[torch.Tensor]) -> bool:
        """Work on host constants, for a program on another device, has the same result at every replay: do it once."""
        return (
            self.device.type != "cpu"
            and bool(tensors)
            and all(t.device.type == "cpu" and storage_id(t) not in self._index for t in tensors)
            and torch.Tag.nondeterministic_seeded not in op.tags
        )

    @staticmethod
    def _is_view(tensors: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        seen = {storage_id(t) for t in tensors}
        return all(storage_id(t) in seen for t in outputs)

    def _depends_on_data(self, op: OpOverload, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether the operator reads values on the host, or makes shapes of them, and these are constant.

        Refuses the operator if any value may vary.
        """
        name = str(op)
        reads = name in _HOST_READS or torch.Tag.data_dependent_output in op.tags
        static_index = name == _INDEX and not any(t.dtype in MASKS and self.varies(t) for t in tensors[1:])
        static = static_index or (name == _LEAST_SQUARES and kwargs.get("driver") in _SHAPED_BY_SHAPES)
        shapes = name in _SHAPED_BY_DATA or (torch.Tag.dynamic_output_shape in op.tags and not static)
        if not reads and not shapes:
            return False
        if not self.varies(tensors):
            return True
        if reads:
            self.refuse(f"{name} at {{source}} reads a value of the device on the host")
        if name not in _SHAPED_BY_DATA or self.varies(tensors[_SHAPED_BY_DATA[name]]):
            self.refuse(f"{name} at {{source}} has an output whose shape depends on the data")
        return False

    def _without_masks(self, op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Positions instead of masks, which are constant, so that the shape of the output is known."""
        if str(op) != _INDEX:
            return args
        with modes_off():
            places: list[torch.Tensor | None] = []
            for index in args[1]:
                mask = index is not None and index.dtype in MASKS
                places += index.nonzero().unbind(1) if mask else [index]
        return args[0], places, *args[2:]


def _tensors_on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device.type == device.type else None
    if isinstance(value, list | tuple):
        return tuple(_tensors_on(device, v) for v in value)
    return None
