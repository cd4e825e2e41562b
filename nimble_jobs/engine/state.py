"""Saves and restores what a call may change of its module: tensors, attributes, and random generators."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.private.modes import DispatchMode, functions_off
from nimble_jobs.engine.private.modules import buffers_of, parameters_of, tables_of, walk
from nimble_jobs.engine.private.operators import OpOverload, nests, write_arguments
from nimble_jobs.engine.private.tensors import storage_id, tree_leaves
from nimble_jobs.engine.random_states import generator_state, set_generator_state
from nimble_jobs.engine.same_bytes import differing
from nimble_jobs.errors import CannotRecord

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}  # restored separately
_NO_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, nn.Module)
_LEAVES = (*_PLAIN, *_NO_STATE, np.ndarray)
_BARE = frozenset(_LEAVES) - {np.ndarray, nn.Module}  # by their exact type, which is quicker to ask for
_TABLES = frozenset({dict, OrderedDict})
# The pictures of empty tables. A module has a dozen.
_EMPTY: dict[type, tuple[type, list[Any]]] = {kind: (kind, []) for kind in _TABLES}
_EXACT = frozenset({type(None), bool, int, str, bytes})  # equal values look the same to a model
_TENSOR_OR_LEAF = (*_LEAVES, torch.Tensor)
_NO_ITEMS: dict[Any, Any] = {}  # what most tables hold; nobody writes into it
_DEPTH = 8  # levels of nested containers and objects that are searched


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain tensor attributes of a module by dotted name. Aliases have the first name only."""
    found: dict[str, torch.Tensor] = {}
    for prefix, child in walk(module):
        for name, value in {**parameters_of(child), **buffers_of(child), **vars(child)}.items():
            if not _holds_nothing(value) and isinstance(value, torch.Tensor):
                found.setdefault(f"{prefix}.{name}" if prefix else name, value)
    return found


def _holds_nothing(value: Any) -> bool:
    """Whether nothing can be found in a value, as in most attributes of modules: flags, and tables of no hooks."""
    kind = type(value)
    if kind in _TABLES:
        return not value and (kind is dict or not value.__dict__)
    return kind in _BARE


def tensors_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """`state_of`, plus the tensors in a module's containers and objects, named by their place."""
    found = state_of(module)
    waiting = [
        (f"{p}.{n}" if p else n, v, _DEPTH)
        for p, m in walk(module)
        for n, v in vars(m).items()
        if not _holds_nothing(v) and n not in _OWN
    ]
    seen: set[int] = set()
    while waiting:
        name, value, depth = waiting.pop()
        if _holds_nothing(value):
            continue
        if isinstance(value, torch.Tensor):
            found.setdefault(name, value)
            continue
        if isinstance(value, _LEAVES) or id(value) in seen or depth == 0:
            continue
        seen.add(id(value))
        inside = getattr(value, "__dict__", None)
        if type(inside) is dict:
            waiting += [(f"{name}.{k}", v, depth - 1) for k, v in inside.items()]
        if isinstance(value, dict | types.MappingProxyType):
            waiting += [(f"{name}[{k!r}]", v, depth - 1) for k, v in value.items()]
        elif isinstance(value, list | tuple | deque):
            waiting += [(f"{name}[{i}]", v, depth - 1) for i, v in enumerate(value)]
    return found


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

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        for _, m in walk(module):
            for table in tables_of(m):
                if isinstance(table, dict):
                    self._tables.append((table, dict(table) if table else _NO_ITEMS))
        self._held = [(c, _contents(c)) for c in _containers(module)]
        kept = {id(p) for p in module.parameters()}
        tensors = {**{f"#{i}": t for i, t in enumerate(self._in_containers())}, **state_of(module)}
        self.tensors = {n: t for n, t in tensors.items() if id(t) not in kept and writable(t)}
        self._values = {n: t.detach().clone() for n, t in self.tensors.items()}
        self._generators = [(g, generator_state(g)) for g in _generators(module)]
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


def attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are not tensors, by dotted name, as values that can be compared."""
    found = {}
    for prefix, child in walk(module):
        seen: dict[int, Any] = {}
        for name, value in vars(child).items():
            if name not in _OWN:
                found[f"{prefix}.{name}" if prefix else name] = _picture(value, seen, _DEPTH)
    return found


def _picture(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """A form of a value that equals another's form if both look the same to a model.

    `seen` keeps all visited objects alive, so that no new object can have the identity of an old one.
    """
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if kind in _TABLES and not value and id(value) not in seen:
        seen[id(value)] = value
        return _EMPTY[kind]
    if isinstance(value, _PLAIN):
        return kind, repr(value)
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, _NO_STATE):
        return id(value)
    if id(value) in seen or depth == 0:
        return "seen"
    seen[id(value)] = value
    return _picture_of_object(value, seen, depth - 1)


def _picture_of_object(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """`_picture` of what may hold other values, to `depth`."""
    state = generator_state(value)
    if state is not None:
        return repr(state)
    if isinstance(value, dict | types.MappingProxyType):
        return type(value), [(_picture(k, seen, depth), _picture(v, seen, depth)) for k, v in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [_picture(v, seen, depth) for v in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(v) for v in value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    inside = getattr(value, "__dict__", None)
    if inside is not None:
        return type(value), _picture(dict(inside), seen, depth)
    text = repr(value)
    return type(value), text if " at 0x" not in text else None


def _containers(module: nn.Module) -> list[Any]:
    """Lists, dicts, sets and attribute tables that can be reached from a module's attributes."""
    found: dict[int, Any] = {}
    waiting = [(v, _DEPTH) for _, m in walk(module) for n, v in vars(m).items() if n not in _OWN]
    seen: set[int] = set()
    while waiting:
        value, depth = waiting.pop()
        if _holds_nothing(value):
            if type(value) in _TABLES:
                found[id(value)] = value
            if type(value) is OrderedDict:  # a call may give it attributes
                found[id(value.__dict__)] = value.__dict__
            continue
        if isinstance(value, _TENSOR_OR_LEAF) or id(value) in seen or depth == 0:
            continue
        seen.add(id(value))
        inside = getattr(value, "__dict__", None)
        if type(inside) is dict:
            waiting.append((inside, depth))
        if isinstance(value, dict | list | set | deque):
            found[id(value)] = value
        if isinstance(value, dict | types.MappingProxyType):
            waiting += [(v, depth - 1) for v in value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            waiting += [(v, depth - 1) for v in value]
    return list(found.values())


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


def _generators(module: nn.Module) -> Iterator[Any]:
    for _, m in walk(module):
        for value in vars(m).values():
            if not _holds_nothing(value) and generator_state(value) is not None:
                yield value
