"""Saves and restores what a call may change of its module: tensors, attributes, and random generators."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.contents import Contents
from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.private.modes import DispatchMode, functions_off
from nimble_jobs.engine.private.modules import tables_of
from nimble_jobs.engine.private.operators import OpOverload, nests, write_arguments
from nimble_jobs.engine.private.tensors import storage_id, tree_leaves
from nimble_jobs.engine.random_states import set_generator_state
from nimble_jobs.engine.same_bytes import differing
from nimble_jobs.errors import CannotRecord

_NO_ITEMS: dict[Any, Any] = {}  # what most tables hold; nobody writes into it


def writable(tensor: torch.Tensor) -> bool:
    """Whether a call may change a tensor in place. Not if it is an inference tensor or its elements share memory."""
    if tensor.is_inference():
        return False
    return not is_dense(tensor) or all(
        stride or n <= 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


class Snapshot:
    """A copy of what a module holds, to be restored: tensors, attributes, and the contents of containers.

    Parameters are only copied just before something writes into them: see `watching`.
    """

    def __init__(self, module: nn.Module, contents: Contents | None = None) -> None:
        contents = contents or Contents(module)
        self._module = module
        self._tables = [
            (table, dict(table) if table else _NO_ITEMS)
            for _, part, _ in contents.parts
            for table in tables_of(part)
            if isinstance(table, dict)
        ]
        self._empty = contents.empty
        self._held = [(c, _contents(c)) for c in contents.containers()]
        kept = {id(p) for p in module.parameters()}
        tensors = {**{f"#{i}": t for i, t in enumerate(self._in_containers())}, **contents.state()}
        self.tensors = {n: t for n, t in tensors.items() if id(t) not in kept and writable(t)}
        self._values = {n: t.detach().clone() for n, t in self.tensors.items()}
        self._generators = list(contents.generators())
        self.nests = False  # whether a watched call used nested tensors

    def watching(self) -> DispatchMode:
        """A mode under which parameters are copied before they are written for the first time."""
        return _Writes(self)

    def resized(self) -> str | None:
        """The name of a tensor whose shape has changed; None if there is none."""
        for name, tensor in self.tensors.items():
            if is_dense(tensor) and tensor.shape != self._values[name].shape:
                return name
        return None

    def refuse_resized(self) -> None:
        """Raise CannotRecord if the first call has changed a tensor's shape. Names the tensor."""
        resized = self.resized()
        if resized is not None:
            raise CannotRecord(f"the model changes the shape of its tensor {resized!r} in its first call")

    def refuse_nested(self) -> None:
        """Raise CannotRecord if the model made nested tensors. In eager, a padding mask then decides about shapes."""
        if self.nests:
            raise CannotRecord(
                "the model turns its padding mask into nested tensors, whose shapes depend on the mask's values; build "
                "its nn.TransformerEncoder with enable_nested_tensor=False"
            )

    def changing(self, *, containers: bool = False) -> dict[str, torch.Tensor]:
        """The module's own tensors whose values have changed; with `containers`, also those in its containers."""
        asked = {n: t for n, t in self.tensors.items() if (containers or not n.startswith("#")) and is_dense(t)}
        return {name: asked[name] for name in differing(asked, self._values)}

    def put_back_values(self) -> None:
        """Restore the values and shapes of tensors, and the states of the module's own generators."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if is_dense(tensor) and tensor.shape != self._values[name].shape:
                    tensor.data = self._values[name].clone()
                else:
                    tensor.copy_(self._values[name])
        for generator, state in self._generators:
            set_generator_state(generator, state)

    def put_back(self) -> None:
        """Restore everything that the module held: attributes, the contents of containers, and values."""
        for table, before in self._tables:
            for name in table.keys() - before.keys():
                del table[name]
            for name, value in before.items():
                if table.get(name) is not value or name not in table:
                    table[name] = value
        for container in self._empty:
            container.clear()
            if type(container) is OrderedDict:  # a call may give it attributes
                container.__dict__.clear()
        for container, contents in self._held:
            _refill(container, contents)
        self.put_back_values()

    def _in_containers(self) -> list[torch.Tensor]:
        values = [v for _, contents in self._held for v in (contents.values() if type(contents) is dict else contents)]
        return list({id(v): v for v in values if isinstance(v, torch.Tensor)}.values())


class _Writes(DispatchMode):
    """Copies parameters before they are written."""

    supports_higher_order_operators = True  # so that they arrive here and are refused by name

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._snapshot = snapshot
        self._parameters: dict[int, tuple[str, torch.Tensor]] = {
            storage_id(p): (n, p) for n, p in snapshot._module.named_parameters() if is_dense(p) and writable(p)
        }

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(op, OpOverload):
            raise CannotRecord(f"{op} takes functions, which may depend on the data")
        self._snapshot.nests |= nests(op)
        written = write_arguments(op, args, kwargs)
        if written:
            with functions_off():
                for position, name in written:
                    for tensor in tree_leaves(args[position] if position < len(args) else kwargs.get(name)):
                        if isinstance(tensor, torch.Tensor) and is_dense(tensor):
                            self._save(storage_id(tensor))
        return op(*args, **kwargs)

    def _save(self, identity: int) -> None:
        if identity in self._parameters:
            name, parameter = self._parameters.pop(identity)
            self._snapshot.tensors[name] = parameter
            self._snapshot._values[name] = parameter.detach().clone()


def _contents(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container) if container else _NO_ITEMS
    return list(container)


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, dict):
        if len(container) == len(contents) and all(
            k is j and v is w for (k, v), (j, w) in zip(container.items(), contents.items(), strict=True)
        ):
            return
        container.clear()
        container.update(contents)
    elif isinstance(container, set):
        if container != set(contents):
            container.clear()
            container.update(contents)
    elif len(container) != len(contents) or any(v is not w for v, w in zip(container, contents, strict=True)):
        container.clear()
        container.extend(contents)
