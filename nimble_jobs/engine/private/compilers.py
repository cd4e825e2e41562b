"""Inductor's pool of compile processes: when it starts and ends, and calls of our own that its processes make.

Its names are private. Where they are others, or the pool cannot be used, calls are made in this process as if there
was none.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from nimble_jobs.engine.private.runtime import tested_version

_LONGEST_S = 120.0  # that a call may take; a kernel takes a second or two
_LOOKS_S = 1.0  # between two looks at a server that does not answer
_GONE = (OSError, RuntimeError)  # the pool cannot be started, or has ended by itself
_keepers: list[object] = []  # that want the processes to stay
_log = logging.getLogger(__name__)


def start_compilers() -> None:
    """Start the processes, unless a setting of Inductor's wants none. They are ready after some seconds."""
    ready()


def ready() -> bool:
    """Whether a process waits for calls. To ask starts them."""
    pool = _pool()
    if pool is None:
        return False
    try:
        if _ended(pool.process_pool()):
            _forget()  # Inductor would wait for it without end
        return bool(pool.use_process_pool())
    except _GONE:
        return False


def submit(call: Callable[[], Any]) -> Future[Any] | None:
    """Have one of the processes make a call, which is pickled, as is its result; None if none of them is ready."""
    if not ready():
        return None
    try:
        submitted: Future[Any] = _pool().process_pool().submit(call)
    except _GONE:
        return None
    return submitted


def answer(submitted: Future[Any]) -> Any:
    """What a call gives. Raises what it raises; RuntimeError if the processes have ended, or take two minutes: then
    they are ended; TimeoutError for a call that is not theirs.
    """
    end = time.monotonic() + _LONGEST_S
    while True:
        try:
            return submitted.result(_LOOKS_S)
        except TimeoutError:
            if ready() and time.monotonic() < end:
                continue
            if not submitted.done():  # else they were found to have ended
                _forget()
            if not submitted.done():
                raise


def same_assembler() -> None:
    """Have Triton in this process assemble with what the processes assemble with, so that machine code is the same.
    As in the processes, a variable of the environment says so from then on, unless it is set.
    """
    if tested_version() is not None:
        return
    try:
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
    except ImportError:
        return
    _set_triton_ptxas_path()


def stop_compilers() -> None:
    """Have the processes end, which would go on taking time from the host, unless they are kept. They take a second for
    it, beside whatever follows; Inductor starts others when it needs some.
    """
    module: Any = sys.modules.get("torch._inductor.async_compile")  # it is slow to load
    if module is None or _keepers:
        return
    if tested_version() is not None or not hasattr(module, "AsyncCompile"):
        with contextlib.suppress(subprocess.TimeoutExpired):  # one of them is stuck, and left alone
            module.shutdown_compile_workers()
    elif pools := _let_go(module):
        threading.Thread(target=_end, args=(pools,), name="compilers-end", daemon=True).start()


@contextlib.contextmanager
def loading_compilers(wanted: bool) -> Iterator[Callable[[], object]]:
    """Around what comes before a build. If compilers are `wanted`, another thread loads and starts them meanwhile. The
    block is given a function that waits for it; the end of the block does, too. They end if the block raises.

    To import Inductor takes three seconds, and the first call of a large model on a GPU as long. Dynamo, which is a
    third of that, is imported first: it and Inductor import each other, and two threads that begin at either end leave
    both half loaded for the rest of the process.
    """
    if not wanted or tested_version() is not None:
        yield lambda: None
        return
    importlib.import_module("torch._dynamo")
    thread = threading.Thread(target=_load, name="compilers-load", daemon=True)
    thread.start()
    try:
        yield thread.join
    except BaseException:
        thread.join()
        stop_compilers()
        raise
    thread.join()


@contextlib.contextmanager
def compiling(wanted: bool) -> Iterator[None]:
    """Around a build. If compilers are `wanted`, their processes start at once, and end after it."""
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


def _load() -> None:
    try:
        start_compilers()
        importlib.import_module("torch._inductor.compile_fx")
    except Exception as error:  # noqa: BLE001  # the build imports it, too, and says what is wrong
        _log.debug("the compiler was not loaded ahead: %s", error)


def _pool() -> Any:
    """Inductor's class that knows the pool; None if it has none, or may be another one."""
    if tested_version() is not None:
        return None
    try:
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    except ImportError:
        return None
    return AsyncCompile if get_compile_threads() > 1 else None


def _ended(pool: Any) -> bool:
    """Whether the server of the pool's processes has ended. Its pipes do not tell: this process holds both ends."""
    server = getattr(pool, "process", None)
    return server is not None and server.poll() is not None


def _forget() -> None:
    """End the servers at once. Their processes end within a minute, when they notice. Whoever waits for an answer of
    theirs is told.
    """
    for pool in _let_go(sys.modules["torch._inductor.async_compile"]):
        _kill(pool)


def _let_go(module: Any) -> list[Any]:
    """Inductor's pools. It has none any more, and starts another when it needs one."""
    pools = list(module._pool_set)
    module.AsyncCompile._ready_future = None
    module.after_fork()
    return pools


def _end(pools: list[Any]) -> None:
    for pool in pools:
        try:
            pool.shutdown()
        except subprocess.TimeoutExpired:  # one of its processes is stuck
            _kill(pool)
        except _GONE as e:
            _log.debug("a pool of compile processes had ended by itself: %s", e)


def _kill(pool: Any) -> None:
    server = getattr(pool, "process", None)
    if server is None:
        return
    server.kill()
    server.wait()
    with pool.futures_lock:
        for waited_for in pool.pending_futures.values():
            waited_for.set_exception(RuntimeError("the compile processes have ended"))
        pool.pending_futures.clear()
