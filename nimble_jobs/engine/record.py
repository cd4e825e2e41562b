"""Run a model once and record every device task that it launches (ahead-of-time scheduling, Nimble, NeurIPS 2020).

The recorder sits under the dispatcher, so it sees operators, not modules: views and allocations cost nothing at replay
and become strides over buffers; everything else becomes a task with what it reads, writes and mutates.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.encode import encode, view_of
from nimble_jobs.engine.private import TorchDispatchMode, modes_off, storage_id, tree_leaves, write_arguments
from nimble_jobs.errors import CannotRecord
from nimble_jobs.schedule import Buffer, BufferKind, Port, Program, Task, View

_HOST_READS = {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.equal.default"}
_MASKS = (torch.bool, torch.uint8)  # an index of this type selects as many elements as are set
_TORCH_FOLDER = f"{Path(torch.__file__).parent}/"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A program, and the live bytes of the constants that it names."""

    program: Program
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # by SHA-256


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain tensor attributes of a module by dotted name; of aliases the first name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, child in module.named_modules():
        own = {**child._parameters, **child._buffers, **vars(child)}
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                found.setdefault(f"{prefix}.{name}" if prefix else name, value)
    return found


def record(
    call: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    module: nn.Module | None = None,
) -> Recording:
    """Record one call of `call(*inputs.values())`, without gradients.

    `module`, where given, lets tasks name the submodule that launched them. Raises CannotRecord, with the operator and
    its source line, for host reads, shapes that depend on data, and copies between host and device.
    """
    recorder = _Recorder(device)
    for name, tensor in inputs.items():
        recorder.add_known(tensor, BufferKind.INPUT, name)
    for name, tensor in state.items():
        recorder.add_known(tensor, BufferKind.STATE, name)
    with torch.no_grad(), _module_names(module, recorder), recorder:
        result = call(*inputs.values())
    return recorder.finish(inputs, flatten_outputs(result))


def flatten_outputs(result: Any) -> dict[str, torch.Tensor]:
    """Name every tensor that a model returns: `output` for one tensor, else keys and positions joined by dots.

    Raises CannotRecord where there is none.
    """
    named: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            named[path or "output"] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else str(key))
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            for key in value._fields:
                walk(getattr(value, key), f"{path}.{key}" if path else key)
        elif isinstance(value, list | tuple):
            for position, item in enumerate(value):
                walk(item, f"{path}.{position}" if path else f"output.{position}")

    walk(result, "")
    if not named:
        raise CannotRecord(f"the model returned {type(result).__name__}; expected a tensor, or tensors in a container")
    return named


class _Recorder(TorchDispatchMode):
    """Collects tasks. Keeps every tensor that it has seen, so that no storage's identity is used twice."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.path: list[str] = []  # names of the submodules being called, outermost first
        self._buffers: list[Buffer] = []
        self._tasks: list[Task] = []
        self._index: dict[int, int] = {}  # storage identity -> buffer index
        self._state: list[Port] = []
        self._constant_ports: list[Port] = []
        self._constants: dict[str, torch.Tensor] = {}
        self._on_device: dict[int, torch.Tensor] = {}  # host constants moved to the device, by identity of the tensor
        self._keep: list[torch.Tensor] = []

    def add_known(self, tensor: torch.Tensor, kind: BufferKind, name: str) -> None:
        identity = storage_id(tensor)
        if identity in self._index:
            return  # tied to a buffer that has a name already
        view = view_of(tensor, self._new_buffer(tensor, kind, name))
        if kind is BufferKind.STATE:
            self._state.append(Port(name=name, view=view))

    def __torch_dispatch__(
        self, op: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._keep += tensors
        self._refuse_data_dependence(op, tensors)
        constant = self._is_constant_work(op, tensors)
        if not constant:
            args, kwargs = self._move_host_constants(op, args, kwargs)
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        result = op(*args, **kwargs)
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._keep += outputs
        if constant:
            return result
        writes = write_arguments(op, args, kwargs)
        if op.namespace == "aten" and op._schema.name.removeprefix("aten::") in _ALLOCATIONS:
            for tensor in outputs:
                self._ensure(tensor)
            return result
        if not writes and self._is_view(tensors, outputs):
            return result  # of a storage that is known, or of a constant
        self._add_task(op, args, kwargs, result, tensors, outputs, writes)
        return result

    def _add_task(
        self,
        op: torch._ops.OpOverload,
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
        fresh = [t for t in outputs if storage_id(t) not in self._index and t.device.type == self.device.type]
        if any(t.device.type != self.device.type for t in outputs):
            raise CannotRecord(f"{op} at {self._source()} moves data from the device to the host")
        reads = tuple(dict.fromkeys(self._view(t) for t in tensors))
        encoded = tuple(encode(a, self._view, self.device) for a in args)
        encoded_kwargs = tuple((n, encode(a, self._view, self.device)) for n, a in kwargs.items())
        mutates = tuple(dict.fromkeys(self._view(t) for t in mutated))
        for tensor in fresh:
            self._ensure(tensor)
        self._tasks.append(
            Task(
                index=len(self._tasks),
                op=str(op),
                args=encoded,
                kwargs=encoded_kwargs,
                outputs=encode(_tensors_only(result), self._view, self.device),
                reads=reads,
                writes=tuple(dict.fromkeys((*mutates, *(self._view(t) for t in fresh)))),
                mutates=mutates,
                random=torch.Tag.nondeterministic_seeded in op.tags,
                source=self._source(),
            )
        )

    def finish(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> Recording:
        """The program that was recorded. Raises CannotRecord for an output that lies outside the device."""
        for name, tensor in outputs.items():
            if tensor.device.type != self.device.type:
                raise CannotRecord(f"the model's output {name!r} lies on {tensor.device}; expected {self.device}")
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
        )

    def _is_constant_work(self, op: torch._ops.OpOverload, tensors: list[torch.Tensor]) -> bool:
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

    def _refuse_data_dependence(self, op: torch._ops.OpOverload, tensors: list[torch.Tensor]) -> None:
        name = str(op)
        if name in _HOST_READS or torch.Tag.data_dependent_output in op.tags:
            raise CannotRecord(f"{name} at {self._source()} reads a value of the device on the host")
        static_index = name == "aten.index.Tensor" and not any(t.dtype in _MASKS for t in tensors[1:])
        if torch.Tag.dynamic_output_shape in op.tags and not static_index:
            raise CannotRecord(f"{name} at {self._source()} has an output whose shape depends on the data")

    def _move_host_constants(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Host tensors with dimensions would be copied at each launch; give the task a copy on the device instead."""
        if self.device.type == "cpu":
            return args, kwargs

        def move(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(move(v) for v in value) if type(value) in (list, tuple) else value
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                return value
            if storage_id(value) in self._index:
                if value.dim() == 0:
                    return value
                raise CannotRecord(f"{op} at {self._source()} reads a host tensor that changes between replays")
            if value.dim() == 0:
                return value
            if id(value) not in self._on_device:
                self._keep.append(value)
                self._on_device[id(value)] = value.to(self.device)
            return self._on_device[id(value)]

        with modes_off():  # the recorder's own work is not part of the program
            return tuple(move(a) for a in args), {n: move(a) for n, a in kwargs.items()}

    def _view(self, tensor: torch.Tensor) -> View:
        """The view of a tensor; one that nobody made inside the program is a constant."""
        identity = storage_id(tensor)
        if identity not in self._index:
            self._add_constant(tensor)
        return view_of(tensor, self._index[identity])

    def _add_constant(self, tensor: torch.Tensor) -> None:
        with modes_off():  # the recorder's own work is not part of the program
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()
            digest = hashlib.sha256(whole.cpu().numpy().tobytes()).hexdigest()
            on_host = tensor.device.type != self.device.type
            index = self._new_buffer(tensor, BufferKind.CONSTANT, digest, on_host=on_host)
            self._constant_ports.append(Port(name=digest, view=view_of(whole, index)))
            self._constants[digest] = whole

    def _ensure(self, tensor: torch.Tensor) -> None:
        if storage_id(tensor) not in self._index:
            self._new_buffer(tensor, BufferKind.INTERMEDIATE, None)

    def _new_buffer(self, tensor: torch.Tensor, kind: BufferKind, name: str | None, *, on_host: bool = False) -> int:
        storage = tensor.untyped_storage()
        index = len(self._buffers)
        self._buffers.append(Buffer(index=index, kind=kind, nbytes=storage.nbytes(), name=name, on_host=on_host))
        self._index[storage_id(tensor)] = index
        self._keep.append(tensor)
        return index

    def _source(self) -> str:
        """The innermost submodule, and the nearest line outside torch's own package."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            file = frame.f_code.co_filename
            if not file.startswith(_TORCH_FOLDER) and file != __file__ and not file.startswith("<"):
                break
            frame = frame.f_back
        line = f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"
        return f"{self.path[-1]} ({line})" if self.path and self.path[-1] else line


_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}


def _tensors_only(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple):
        return tuple(_tensors_only(v) for v in value)
    return None


@contextlib.contextmanager
def _module_names(module: nn.Module | None, recorder: _Recorder) -> Iterator[None]:
    """While inside, `recorder.path` names the submodules being called."""
    handles = []
    for name, child in module.named_modules() if module is not None else ():

        def enter(_m: nn.Module, _a: Any, name: str = name) -> None:
            recorder.path.append(name)

        def leave(_m: nn.Module, _a: Any, _r: Any) -> None:
            recorder.path.pop()

        handles += [child.register_forward_pre_hook(enter), child.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
