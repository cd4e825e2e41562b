"""A loss of the user's own, with the plain globals of its file and of the neighbours that this imports: they are
treated as the model's attributes are.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nimble_jobs.models.local_import import namespaces

_VALUES = (type(None), bool, int, float, complex, str, bytes)
_TABLES = (list, dict, set)
_MOST = 10_000  # entries of a list, dict or set; longer ones are taken for constants

_Held = dict[str, dict[str, Any]]  # by the name of a neighbour, or "" for the function's own module


class OwnLoss:
    """Calls a function. `held` is what its globals were after the last call.

    Whoever puts the attributes of this object back, as after a trial call, also puts the globals back: the next call
    begins with those in `held`. And who compares attributes sees that a loss counts its calls, say.
    """

    __slots__ = ("__dict__", "_left", "_spaces")  # the latter are no attributes that are put back

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        plain = inspect.unwrap(function)
        self._spaces: dict[str, dict[str, Any]] = namespaces(str(getattr(plain, "__module__", "")))
        self._spaces.setdefault("", getattr(plain, "__globals__", {}))
        self.held = self._left = _plain(self._spaces)

    def __call__(self, outputs: Any, y: torch.Tensor) -> torch.Tensor:
        if self.held is not self._left:
            for space, held in self.held.items():
                _put_back(self._spaces[space], held)
        try:
            loss: torch.Tensor = self._function(outputs, y)
        finally:
            now = _plain(self._spaces)
            self.held = self._left = self.held if now == self.held else now
        return loss

    @property
    def values(self) -> dict[str, Any]:
        """The globals after the last call, by name; those of neighbours as `helper.NAME`."""
        return {f"{space}.{n}" if space else n: v for space, held in self.held.items() for n, v in held.items()}


def _plain(spaces: Mapping[str, dict[str, Any]]) -> _Held:
    """Copies of the values that are plain, or lists, dicts and sets of such."""
    return {space: _plain_in(values) for space, values in spaces.items()}


def _plain_in(values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: copy.copy(v) for n, v in values.items() if not n.startswith("__") and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, _VALUES):
        return True
    if type(value) not in _TABLES or len(value) > _MOST:
        return False
    kinds = set(map(type, value.values() if type(value) is dict else value))
    return all(issubclass(kind, _VALUES) for kind in kinds)


def _put_back(values: dict[str, Any], held: dict[str, Any]) -> None:
    """Make the plain ones among `values` those of `held`. Lists, dicts and sets stay the same objects."""
    for name, now in _plain_in(values).items():
        if name not in held:
            del values[name]
        elif now != held[name] and type(now) is type(held[name]) and type(now) in _TABLES:
            values[name].clear()
            (values[name].extend if type(now) is list else values[name].update)(held[name])
    for name, value in held.items():
        if name not in values or values[name] != value:
            values[name] = copy.copy(value)
