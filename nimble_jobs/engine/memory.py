"""Tracks the memory of a program while it is recorded: which buffer a tensor lies in, and what differs in replays."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from nimble_jobs.engine.blame import Blame
from nimble_jobs.engine.encode import view_of
from nimble_jobs.engine.private.modes import modes_off
from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.engine.private.tensors import storage_id, tree_leaves
from nimble_jobs.errors import CannotRecord
from nimble_jobs.schedule import Buffer, BufferKind, Port, View

MASKS = (torch.bool, torch.uint8)  # an index of such a type selects the elements that are set
# Operators that copy numbers from the host at each launch; all others pass them by value.
_COPIES_NUMBERS = ("aten.index_put", "aten._index_put_impl")


class Memory(Blame):
    """Buffers of inputs, state, constants and intermediates.

    It keeps every tensor that it has seen, so that no storage identity is used twice.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._buffers: list[Buffer] = []
        self._index: dict[int, int] = {}  # storage identity -> buffer index
        self._state: list[Port] = []
        self._constant_ports: list[Port] = []
        self._constants: dict[str, torch.Tensor] = {}
        self._on_device: dict[int, torch.Tensor] = {}  # host constants moved to the device, by identity of the tensor
        self._places: list[tuple[int, int, int]] = []  # first address, end address, buffer index
        self._storages: list[torch.UntypedStorage] = []  # of the places, kept so that nothing else is put there
        self._keep: list[torch.Tensor] = []
        self._filled: set[int] = set()  # buffers that some task has written
        self._varying: set[int] = set()  # buffers whose values may differ between replays

    def add_known(self, tensor: torch.Tensor, kind: BufferKind, name: str) -> None:
        """Add a tensor that the program knows by name. Raises CannotRecord if it is not dense."""
        if not is_dense(tensor):
            raise CannotRecord(f"{name!r} is {_layout(tensor)}; expected a dense tensor")
        identity = storage_id(tensor)
        if identity in self._index:
            return  # tied to a buffer that has a name already
        view = view_of(tensor, self._new_buffer(tensor, kind, name))
        self._varying.add(view.buffer)
        if kind is BufferKind.STATE:
            self._state.append(Port(name=name, view=view))

    def varies(self, value: Any) -> bool:
        """Whether a tensor in a nested value may hold other values in a replay.

        It does if it depends on inputs, on state or on random numbers.
        """
        if isinstance(value, torch.Tensor):
            return not is_dense(value) or self._buffer_of(value) in self._varying
        return any(self.varies(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor))

    def _buffer_of(self, tensor: torch.Tensor) -> int | None:
        """The buffer that a tensor lies in, even if it was made from an address and torch knows no owner."""
        index = self._index.get(storage_id(tensor))
        if index is not None:
            return index
        storage = tensor.untyped_storage()
        first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return next((i for start, end, i in self._places if first < end and start < last), None) if first else None

    def refuse_moved(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """Refuse to move a tensor of the state, or an input, to other memory."""
        index = self._index.get(storage_id(tensor))
        if index is None or self._buffers[index].kind not in (BufferKind.STATE, BufferKind.INPUT):
            return
        if not is_dense(data) or storage_id(data) != storage_id(tensor) or view_of(data, 0) != view_of(tensor, 0):
            kind = "its tensor" if self._buffers[index].kind is BufferKind.STATE else "its input"
            self.refuse(f"the model replaces the data of {kind} {self._buffers[index].name!r} at {{source}}")

    def _vary(self, reads: tuple[View, ...], writes: tuple[View, ...], *, random: bool) -> None:
        """Mark what a task writes as varying if it reads anything that varies."""
        if random or any(v.buffer in self._varying for v in reads):
            self._varying |= {v.buffer for v in writes}

    def _refuse_strange_memory(
        self, op: str, reads: tuple[View, ...], mutates: tuple[View, ...], writes: tuple[View, ...]
    ) -> None:
        """Refuse what was written by nobody that was seen, and constants that change."""
        written = {v.buffer for v in writes}
        for view in reads:
            buffer = self._buffers[view.buffer]
            unseen = buffer.kind is BufferKind.INTERMEDIATE and view.buffer not in self._filled | written
            if unseen and 0 not in view.shape:
                self.refuse(
                    f"{op} at {{source}} reads memory that no earlier torch operator wrote; "
                    "if a custom kernel wrote it, register that as a torch operator"
                )
        for view in mutates:
            if self._buffers[view.buffer].kind is BufferKind.CONSTANT:
                self.refuse(
                    f"{op} at {{source}} writes into a tensor that is neither an input of the model nor its own"
                )
        self._filled |= written

    def _memory_of(self, tensor: torch.Tensor) -> tuple[int, int | None]:
        """Which memory a tensor lies in, and how much that is if it is the program's own."""
        index = self._index.get(storage_id(tensor))
        own = index is not None and self._buffers[index].kind is BufferKind.INTERMEDIATE
        return storage_id(tensor), tensor.untyped_storage().nbytes() if own else None

    def _becomes_a_view(self, op: OpOverload, args: tuple[Any, ...], moved: list[tuple[int, int | None]]) -> bool:
        """Whether a tensor that was empty now lies in memory that is known, as cuDNN's view of all weights does."""
        was_empty = all(nbytes == 0 for _, nbytes in moved)
        return str(op).startswith("aten.set_.source_") and was_empty and storage_id(args[0]) in self._index

    def _refuse_layouts(self, op: OpOverload, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if not is_dense(tensor):
                self.refuse(f"{op} at {{source}} has a tensor that is {_layout(tensor)}; expected dense ones")

    def _move_host_constants(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give a task copies on the device instead of host tensors with dimensions, which each launch would copy."""
        if self.device.type == "cpu":
            return args, kwargs
        # With a mask the operator fills in the number; with positions it would copy it from the host.
        masks = any(isinstance(t, torch.Tensor) and t.dtype in MASKS for t in tree_leaves(args))
        copies_numbers = str(op).startswith(_COPIES_NUMBERS) and not masks

        def move(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(move(v) for v in value) if type(value) in (list, tuple) else value
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                return value
            if storage_id(value) in self._index:
                if value.dim() == 0 or self._buffers[self._index[storage_id(value)]].kind is BufferKind.INTERMEDIATE:
                    return value
                self.refuse(f"{op} at {{source}} reads a host tensor that changes between replays")
            if value.dim() == 0 and not copies_numbers:
                return value
            if id(value) not in self._on_device:
                self._keep.append(value)
                self._on_device[id(value)] = value.to(self.device)
            return self._on_device[id(value)]

        with modes_off():  # the recorder's own work is not part of the program
            return tuple(move(a) for a in args), {n: move(a) for n, a in kwargs.items()}

    def _view(self, tensor: torch.Tensor) -> View:
        """The view of a tensor. A tensor that no task has made is a constant."""
        identity = storage_id(tensor)
        if identity not in self._index:
            if self._buffer_of(tensor) is not None:
                self.refuse("the model reaches the memory of a tensor by its address at {source}; expected views")
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
        if storage.nbytes() and is_dense(tensor):
            self._places.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), index))
            self._storages.append(storage)
        self._keep.append(tensor)
        return index


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values lie in one storage, at strides."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _layout(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
