"""Inductor's pool of compile processes: when it starts and ends, and calls of our own that its processes make.

Its names are private. Where they are others, or the pool cannot be used, calls are made in this process as if there
was none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from nimble_jobs.engine.private.runtime import tested_version

_GONE = (OSError, RuntimeError)  # the pool cannot be started, or has ended by itself
_keepers: list[object] = []  # that want the processes to stay


def start_compilers() -> None:
    """Start the processes, unless a setting of Inductor's wants none. They are ready after some seconds."""
    ready()


def ready() -> bool:
    """Whether a process waits for calls. To ask starts them."""
    pool = _pool()
    try:
        return pool is not None and bool(pool.use_process_pool())
    except _GONE:
        return False


def submit(call: Callable[[], Any]) -> Future[Any] | None:
    """Have one of the processes make a call, which is pickled, as is its result; None if none of them is ready.

    What the call raises is raised by the future, and so is their end.
    """
    if not ready():
        return None
    try:
        submitted: Future[Any] = _pool().process_pool().submit(call)
    except _GONE:
        return None
    return submitted


def same_assembler() -> None:
    """Have Triton in this process assemble with what the processes assemble with, so that machine code is the same."""
    try:
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
    except ImportError:
        return
    _set_triton_ptxas_path()


def stop_compilers() -> None:
    """End the processes, which would go on taking time from the host, unless they are kept."""
    compiling = sys.modules.get("torch._inductor.async_compile")  # it is slow to load
    if compiling is not None and not _keepers:
        compiling.shutdown_compile_workers()


@contextlib.contextmanager
def compiling(wanted: bool) -> Iterator[None]:
    """Around a build. If compilers are `wanted`, their processes start at once, and have ended after it."""
    wanted = wanted and tested_version() is None
    if wanted:
        start_compilers()
    try:
        yield
    finally:
        if wanted:
            stop_compilers()


@contextlib.contextmanager
def keeping_compilers() -> Iterator[None]:
    """While inside, the processes stay for the next build.

    New ones take seconds to start, in which this process compiles one kernel after the other.
    """
    keeper = object()
    _keepers.append(keeper)
    try:
        yield
    finally:
        _keepers.remove(keeper)
        stop_compilers()


def _pool() -> Any:
    """Inductor's class that knows the pool; None if it has none, or may be another one."""
    if tested_version() is not None:
        return None
    try:
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    except ImportError:
        return None
    return AsyncCompile if get_compile_threads() > 1 else None
