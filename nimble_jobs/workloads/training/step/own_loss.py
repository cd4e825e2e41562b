"""A loss of the user's own, with the plain globals of its file: they are treated as the model's attributes are."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

_VALUES = (type(None), bool, int, float, complex, str, bytes)
_TABLES = (list, dict, set)
_MOST = 1000  # entries of a list, dict or set; longer ones are taken for constants


class OwnLoss:
    """Calls a function. `held` is what its globals were after the last call.

    Whoever puts the attributes of this object back, as after a trial call, also puts the globals back: the next call
    begins with those in `held`. And who compares attributes sees that a loss counts its calls, say.
    """

    __slots__ = ("__dict__", "_left")  # the latter is no attribute that is put back

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.held = self._left = _plain(self._globals)

    def __call__(self, outputs: Any, y: torch.Tensor) -> torch.Tensor:
        if self.held is not self._left:
            _put_back(self._globals, self.held)
        try:
            loss: torch.Tensor = self._function(outputs, y)
        finally:
            now = _plain(self._globals)
            self.held = self._left = self.held if now == self.held else now
        return loss

    @property
    def _globals(self) -> dict[str, Any]:
        found: dict[str, Any] = getattr(inspect.unwrap(self._function), "__globals__", {})
        return found


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Copies of the values that are plain, or lists, dicts and sets of such."""
    return {n: copy.copy(v) for n, v in values.items() if not n.startswith("__") and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, _VALUES):
        return True
    if type(value) not in _TABLES or len(value) > _MOST:
        return False
    return all(isinstance(v, _VALUES) for v in (value.values() if type(value) is dict else value))


def _put_back(values: dict[str, Any], held: dict[str, Any]) -> None:
    """Make the plain ones among `values` those of `held`. Lists, dicts and sets stay the same objects."""
    for name, now in _plain(values).items():
        if name not in held:
            del values[name]
        elif now != held[name] and type(now) is type(held[name]) and type(now) in _TABLES:
            values[name].clear()
            (values[name].extend if type(now) is list else values[name].update)(held[name])
    for name, value in held.items():
        if name not in values or values[name] != value:
            values[name] = copy.copy(value)
