"""Compiles kernels of our own side by side, in the compiler's processes, before the first of them is timed.

A kind of task is timed in several ways, each a kernel of its own. If this process compiled one after the other, a build
would wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from nimble_jobs.engine.private import compilers
from nimble_jobs.kernels import choices
from nimble_jobs.kernels.static_triton import capability_of

P = ParamSpec("P")
T = TypeVar("T")
_KEPT = 4096  # results of each function
_LONGEST_S = 120.0  # a kernel takes a second or two

_log = logging.getLogger(__name__)
_pending: ContextVar[dict[Any, Future[Any]] | None] = ContextVar("pending", default=None)


class Compiles(Generic[P, T]):
    """A function of a module that compiles a kernel, by hashable arguments. Its results are kept, and `ahead` has
    another process compute one.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._kept: Any = functools.lru_cache(maxsize=_KEPT)(self._made)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        made: T = self._kept(*args, **kwargs)
        return made

    def __reduce__(self) -> str:
        return self._function.__qualname__  # another process finds it by its name

    def ahead(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Have another process begin, inside of `kernels_ahead`; the next call with the same arguments takes what
        comes of it.
        """
        pending, key = _pending.get(), self._key(args, kwargs)
        if pending is None or key in pending:
            return
        future = compilers.submit(functools.partial(self, *args, **kwargs))
        if future is not None:
            pending[key] = future

    def _made(self, *args: P.args, **kwargs: P.kwargs) -> T:
        future = (_pending.get() or {}).get(self._key(args, kwargs))
        if future is not None:
            try:
                made: T = future.result(_LONGEST_S)
            except Exception as e:  # noqa: BLE001  # of whatever process; what is wrong with the kernel is raised below
                _log.debug("%s is compiled in this process: %s", self._function.__qualname__, e)
            else:
                return made
        return self._function(*args, **kwargs)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (self._function, args, tuple(sorted(kwargs.items())))


@contextlib.contextmanager
def kernels_ahead() -> Iterator[None]:
    """Inside the block, kernels that were asked for ahead are taken from the processes that compile them."""
    token = _pending.set({})
    try:
        yield
    finally:
        _pending.reset(token)


def twice(run: Callable[[], T]) -> T:
    """`run()`, which asks `choices` for ways to run tasks. Inside of `kernels_ahead`, if other processes are there to
    compile, it runs twice: first all answers are the library's, which must change nothing, and nothing is measured,
    while the processes begin with the kernels that the second time needs.
    """
    if _pending.get() is not None and compilers.ready():
        with choices.looking_ahead():
            run()
    return run()


def each(function: Compiles[..., Any], shape: Any, device: torch.device, ways: Iterable[str]) -> None:
    """Compile kernels of one shape ahead, in these ways but for the library's."""
    for way in ways:
        if way != choices.LIBRARY:
            function.ahead(shape, way, capability_of(device))
