"""A module in evaluation mode for a while, or left as it is for a while, from many threads at once.

The mode of a module is one flag for all threads. So calls that need evaluation mode share it: the first sets it, the
last puts back what was there. Calls that need the module's own mode wait for those, and the other way round, in the
order in which they came. `train()` and `eval()` of another thread in between cannot be told from our own, so they may
be lost; nothing else is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_turn = threading.Condition()
_thread = threading.local()


@dataclass(eq=False)
class _Use:
    """A call, or what makes many, that needs its modules in one mode."""

    modules: frozenset[int]  # by identity; none where evaluation mode is their own
    evaluating: bool

    def excludes(self, other: _Use) -> bool:
        return self.evaluating != other.evaluating and not self.modules.isdisjoint(other.modules)


@dataclass
class _Held:
    """A submodule in evaluation mode for a while."""

    own: bool  # its `training` otherwise
    uses: int = 0


_under_way: list[_Use] = []
_waiting: list[_Use] = []
_held: dict[int, _Held] = {}


def own_mode(module: nn.Module) -> bool:
    """A module's `training`, whatever `eval_mode` makes of it for now."""
    held = _held.get(id(module))
    return module.training if held is None else held.own


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """While inside, every submodule is in evaluation mode; afterwards each is in its own mode again."""
    modules = list(module.modules())
    with _turn:
        use = _Use(frozenset(id(m) for m in modules if own_mode(m)), evaluating=True)
        _begin(use)
        for m in modules:
            held = _held.setdefault(id(m), _Held(m.training))
            held.uses += 1
            m.training = False
    try:
        yield
    finally:
        with _turn:
            for m in modules:
                held = _held[id(m)]
                held.uses -= 1
                if not held.uses:
                    m.training = m.training or held.own
                    del _held[id(m)]
            _end(use)


@contextlib.contextmanager
def own_modes(module: nn.Module) -> Iterator[None]:
    """While inside, no other thread's `eval_mode` changes the mode of a submodule."""
    use = _Use(frozenset(id(m) for m in module.modules()), evaluating=False)
    with _turn:
        _begin(use)
    try:
        yield
    finally:
        with _turn:
            _end(use)


def _begin(use: _Use) -> None:
    """Waits for its turn. Inside of another use of the same thread, which others may wait for, it does not."""
    _waiting.append(use)
    try:
        while not getattr(_thread, "depth", 0) and any(map(use.excludes, (*_under_way, *_before(use)))):
            _turn.wait()
    finally:
        _waiting.remove(use)
        _turn.notify_all()
    _under_way.append(use)
    _thread.depth = getattr(_thread, "depth", 0) + 1


def _before(use: _Use) -> list[_Use]:
    return _waiting[: _waiting.index(use)]


def _end(use: _Use) -> None:
    _under_way.remove(use)
    _thread.depth -= 1
    _turn.notify_all()
