"""Compiles kernels of our own side by side, in the compiler's processes, before the first of them is timed.

A kind of task is timed in several ways, each a kernel of its own. If this process compiled one after the other, a build
would wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
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

_log = logging.getLogger(__name__)
_begun: ContextVar[dict[Any, Future[Any]] | None] = ContextVar("begun", default=None)  # by function and arguments


class Compiles(Generic[P, T]):
    """A function of a module that compiles a kernel, by hashable arguments. Its results are kept, and `ahead` has
    another process compute one.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._signature = inspect.signature(function)
        self._kept: dict[Any, T] = {}  # by arguments, the oldest first

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        key = self._key(args, kwargs)
        if key not in self._kept:
            made = self._made(key, *args, **kwargs)
            if len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)), None)
            self._kept[key] = made
        return self._kept[key]

    def __reduce__(self) -> str:
        return self._function.__qualname__  # another process finds it by its name

    def ahead(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Have another process begin, inside of `kernels_ahead`; the next call with the same arguments takes what
        comes of it.
        """
        begun, key = _begun.get(), self._key(args, kwargs)
        if begun is None or key in self._kept or (self._function, key) in begun:
            return
        future = compilers.submit(functools.partial(self, *args, **kwargs))
        if future is not None:
            begun[self._function, key] = future

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for calls that mean the same, however arguments are passed or left to their defaults."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, tuple(sorted(bound.kwargs.items()))

    def _made(self, key: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        begun = _begun.get() or {}
        future = begun.pop((self._function, key), None)
        if future is None:
            return self._function(*args, **kwargs)
        try:
            there: T = compilers.answer(future)
        except Exception as e:  # noqa: BLE001  # if it is the kernel's fault, the next line raises it
            here = self._function(*args, **kwargs)
            _log.warning("kernels are compiled in this process, since another one could not: %s", _last_line(e))
            begun.clear()
            return here
        return there


@contextlib.contextmanager
def kernels_ahead() -> Iterator[None]:
    """Inside the block, kernels that were asked for ahead are taken from the processes that compile them."""
    token = _begun.set({})
    try:
        yield
    finally:
        _begun.reset(token)


def twice(run: Callable[[], T]) -> T:
    """`run()`, which asks `choices` for ways to run tasks. Inside of `kernels_ahead`, if other processes are there to
    compile, it runs twice: first all answers are the library's and nothing is measured, while the processes begin with
    the kernels that the second time needs. With such answers it may change only what it would change in any case.
    """
    if _begun.get() is not None and compilers.ready():
        with choices.looking_ahead():
            run()
    return run()


def each(
    function: Compiles[..., Any], shape: Any, device: torch.device, ways: Iterable[str], *, last: tuple[Any, ...] = ()
) -> None:
    """Compile kernels of one shape ahead, in these ways but for the library's. `last`: the function's other arguments,
    after shape, way and the device's compute capability.
    """
    for way in ways:
        if way != choices.LIBRARY:
            function.ahead(shape, way, capability_of(device), *last)


def _last_line(error: Exception) -> str:
    """Of a traceback of elsewhere, what was raised."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
