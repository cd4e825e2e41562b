"""Inductor's compile processes begin and end with the build that wants them, or end with the last of several."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from nimble_jobs.engine import inductor
from nimble_jobs.engine.private import compilers
from nimble_jobs.engine.private.compilers import keeping_compilers, stop_compilers
from tests import prefork


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows when the processes are ended, at once for once; Inductor begins with one pool, and always has one."""
    found: list[str] = []
    one = SimpleNamespace(shutdown=lambda: found.append("stopped"))
    module = SimpleNamespace(
        _pool_set=[one],
        after_fork=lambda: None,
        AsyncCompile=SimpleNamespace(),
        shutdown_compile_workers=lambda: found.append("by itself"),
    )
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", module)
    at_once = lambda target, args, **_: SimpleNamespace(start=lambda: target(*args))  # noqa: E731
    monkeypatch.setattr(compilers, "threading", SimpleNamespace(Thread=at_once))
    return found


def test_one_build(stops: list[str]) -> None:
    stop_compilers()
    assert stops == ["stopped"]


def test_several_builds(stops: list[str]) -> None:
    """Also if one fails, or is within another's turn."""

    def build() -> None:
        stop_compilers()
        with keeping_compilers():
            stop_compilers()
        stop_compilers()
        assert stops == []
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"), keeping_compilers():
        build()
    assert stops == ["stopped"]
    stop_compilers()
    assert stops == ["stopped"] * 2


def test_where_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that knows the processes is slow to load, and there are none."""
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile", raising=False)
    with keeping_compilers():
        pass
    assert "torch._inductor.async_compile" not in sys.modules


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, stops: list[str]) -> SimpleNamespace:
    """A stand-in for Inductor's pool of two processes, which become ready at their second question."""
    asked: list[str] = []

    def use_process_pool() -> bool:
        asked.append("asked")
        return len(asked) > 1

    found = SimpleNamespace(asked=asked, stops=stops, submitted=[], threads=2, use_process_pool=use_process_pool)
    found.process_pool = lambda: SimpleNamespace(submit=lambda call: found.submitted.append(call) or "a future")
    module = sys.modules["torch._inductor.async_compile"]
    monkeypatch.setattr(module, "AsyncCompile", found, raising=False)
    monkeypatch.setattr(module, "get_compile_threads", lambda: found.threads, raising=False)
    return found


def test_processes_are_started_for_a_build_and_take_calls_once_they_are_ready(pool: SimpleNamespace) -> None:
    with compilers.compiling(True):
        assert (pool.asked, pool.stops) == (["asked"], [])
        assert compilers.submit(print) == "a future"
    assert (pool.submitted, pool.stops) == ([print], ["stopped"])


@pytest.fixture
def imports(pool: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What is imported, and whether by another thread, which takes a little longer than to start it."""
    found: list[tuple[str, bool]] = []

    def importing(name: str) -> None:
        beside = threading.current_thread() is not threading.main_thread()
        time.sleep(0.2 * beside)
        found.append((name, beside))

    monkeypatch.setattr(compilers, "threading", threading)
    monkeypatch.setattr(compilers, "importlib", SimpleNamespace(import_module=importing))
    return found


ALL_IMPORTS = [("torch._dynamo", False), ("torch._inductor.compile_fx", True)]


@pytest.mark.parametrize("waits", [True, False])
def test_compilers_are_loaded_and_started_beside_what_comes_first(
    pool: SimpleNamespace, imports: list[Any], waits: bool
) -> None:
    """They are there when the block has waited, or has ended, and stay for the build, which ends them."""
    with compilers.loading_compilers(True) as loaded:
        assert imports == ALL_IMPORTS[:1]
        if waits:
            loaded()
            assert imports == ALL_IMPORTS
    assert (imports, pool.asked, pool.stops) == (ALL_IMPORTS, ["asked"], [])


def test_compilers_end_if_there_will_be_no_build(pool: SimpleNamespace, imports: list[Any]) -> None:
    """Whether they are loaded by then or not."""
    ended = threading.Event()
    (one,) = sys.modules["torch._inductor.async_compile"]._pool_set
    one.shutdown = ended.set
    with pytest.raises(KeyboardInterrupt), compilers.loading_compilers(True):
        raise KeyboardInterrupt
    assert imports == ALL_IMPORTS
    assert ended.wait(10)


def test_nothing_is_loaded_where_no_build_compiles(pool: SimpleNamespace, imports: list[Any]) -> None:
    with compilers.loading_compilers(False) as loaded:
        loaded()
    assert (pool.asked, imports) == ([], [])


def test_a_compiler_that_cannot_be_loaded_is_left_to_the_build(
    pool: SimpleNamespace, imports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is wrong."""

    def fails(name: str) -> None:
        if name != "torch._dynamo":
            raise DeprecationWarning("old")

    monkeypatch.setattr(compilers.importlib, "import_module", fails)
    with compilers.loading_compilers(True) as loaded:
        loaded()
    assert pool.stops == []


@pytest.mark.parametrize("name", ["torch._dynamo", "torch._inductor.config", "torch._inductor.compile_fx"])
def test_a_model_may_import_the_compiler_meanwhile(name: str) -> None:
    """In a process of its own. Dynamo and Inductor import each other: threads that begin at either end would find them
    half loaded, and so would every later build.
    """
    script = f"""
import importlib, os, tempfile

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import torch

from nimble_jobs.engine.private import compilers

with compilers.loading_compilers(True) as loaded:
    importlib.import_module("{name}")
    loaded()
import torch._inductor.compile_fx

torch._dynamo.reset()
print("loaded")
"""
    done = prefork.run_light(script, check=False)
    assert done.stdout == "loaded\n", done.stderr


def test_before_they_are_ready_nothing_is_submitted(pool: SimpleNamespace) -> None:
    assert compilers.submit(print) is None
    assert pool.submitted == []


def test_a_build_does_not_wait_for_them_to_end(pool: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes a second. Meanwhile Inductor has none, and may start others."""
    monkeypatch.setattr(compilers, "threading", threading)
    goes_on, ended = threading.Event(), threading.Event()

    def shutdown() -> None:
        assert goes_on.wait(30)
        ended.set()

    module = sys.modules["torch._inductor.async_compile"]
    monkeypatch.setattr(module, "_pool_set", [SimpleNamespace(shutdown=shutdown)])
    monkeypatch.setattr(module, "after_fork", module._pool_set.clear)
    with compilers.compiling(True):
        assert len(module._pool_set) == 1
    assert (len(module._pool_set), ended.is_set()) == (0, False)
    goes_on.set()
    assert ended.wait(30)


def test_a_torch_that_was_not_tested_ends_its_processes_itself(
    stops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names may be others."""
    module = SimpleNamespace(shutdown_compile_workers=lambda: stops.append("by itself"))
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", module)
    monkeypatch.setattr(compilers, "tested_version", lambda: "torch 9 was not tested")
    stop_compilers()
    assert stops == ["by itself"]


def test_a_build_that_wants_none_starts_none(pool: SimpleNamespace) -> None:
    with pytest.raises(KeyError), compilers.compiling(False):
        raise KeyError("in the build")
    assert (pool.asked, pool.stops) == ([], [])


def test_a_server_that_does_not_end_is_killed(pool: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch waits for five minutes, and then leaves it. The build waits for nothing, and the next has another."""

    def never() -> None:
        raise subprocess.TimeoutExpired("a server", 300)

    server = SimpleNamespace(kill=lambda: pool.stops.append("killed"), wait=lambda: pool.stops.append("ended"))
    module = sys.modules["torch._inductor.async_compile"]
    future: Future[Any] = Future()
    old = SimpleNamespace(process=server, futures_lock=nullcontext(), pending_futures={1: future}, shutdown=never)
    monkeypatch.setattr(module, "_pool_set", [old, SimpleNamespace(shutdown=never)])
    monkeypatch.setattr(module, "after_fork", lambda: pool.stops.append("forgotten"))
    pool._ready_future = "of the old one"
    with compilers.compiling(True):
        pass
    assert (pool.stops, pool._ready_future) == (["forgotten", "killed", "ended"], None)
    assert old.pending_futures == {}
    with pytest.raises(RuntimeError, match="the compile processes have ended"):
        compilers.answer(future)


@pytest.mark.parametrize("error", [BrokenPipeError(), RuntimeError("Attempting to use a closed pool")])
def test_a_pool_that_has_ended_takes_no_calls(pool: SimpleNamespace, error: Exception) -> None:
    """Someone may have killed its processes, or they cannot be started."""

    def fails(*_: Any) -> Any:
        raise error

    pool.asked.append("ready by now")
    pool.process_pool = lambda: SimpleNamespace(submit=fails)
    assert compilers.ready()
    assert compilers.submit(print) is None
    pool.use_process_pool = fails
    with compilers.compiling(True):
        assert not compilers.ready()


@pytest.mark.parametrize("lacks", ["processes", "names", "a tested torch"])
def test_where_there_is_no_pool_calls_are_made_here(
    pool: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """A setting may want none, and another torch may have another one."""
    if lacks == "processes":
        pool.threads = 1
    elif lacks == "names":
        monkeypatch.delattr(sys.modules["torch._inductor.async_compile"], "AsyncCompile")
    else:
        monkeypatch.setattr(compilers, "tested_version", lambda: "torch 9 was not tested")
    pool.asked.append("ready by now")
    with compilers.compiling(True):
        assert not compilers.ready()
        assert compilers.submit(print) is None
    assert pool.submitted == []


def test_bounds_of_windows_are_computed_by_torchs_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only inside, also where compiling fails, and only with a tested torch; all else is sympy's, and results agree."""
    from torch._inductor import lowering

    theirs: Any = sys.modules["sympy"]
    before = lowering.sympy
    seen: list[Any] = []

    def fails() -> None:
        seen.append(lowering.sympy)
        raise KeyError("in the compiler")

    with pytest.raises(KeyError), inductor._quick_bounds():
        fails()
    (quick,) = seen
    assert lowering.sympy is before is theirs
    assert quick.Symbol is theirs.Symbol
    assert (quick.Max.__module__, quick.Min.__module__) == ("torch.utils._sympy.functions",) * 2
    i = theirs.Symbol("i", integer=True, nonnegative=True)
    for name in ("Max", "Min"):
        ours, usual = (getattr(kind, name)(i - 2, 5 - i, 0) for kind in (quick, theirs))
        assert [ours.subs(i, n) for n in range(9)] == [usual.subs(i, n) for n in range(9)]
    monkeypatch.setattr(inductor, "tested_version", lambda: "torch 9 was not tested")
    with inductor._quick_bounds():
        assert lowering.sympy is before
