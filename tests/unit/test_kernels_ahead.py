"""Kernels that a build will time are compiled by other processes first; what becomes of them there changes nothing."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from nimble_jobs.engine import measure
from nimble_jobs.engine.private import compilers
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.errors import EngineError
from nimble_jobs.kernels import (
    ahead,
    choices,
    depthwise_pass,
    epilogue_ways,
    inductor_pass,
    pointwise_pass,
    separable_pass,
)
from nimble_jobs.kernels.ahead import Compiles, kernels_ahead, twice
from nimble_jobs.planner.sources import source as sources
from nimble_jobs.schedule import Program
from nimble_jobs.task_times import TaskTimes
from tests import prefork

CPU = torch.device("cpu")
compiled_here: list[tuple[Any, ...]] = []


@Compiles
def made(shape: str, way: str, capability: int) -> str:
    """Stands for a kernel."""
    compiled_here.append((shape, way, capability))
    if way == "wrong":
        raise EngineError("no such kernel")
    return f"{shape} {way} {capability}"


@Compiles
def slow(number: int) -> tuple[int, int]:
    """Takes long in another process. With the process that made it."""
    if multiprocessing.parent_process() is not None:
        time.sleep(6)
    return number, os.getpid()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Callable[[], Any], Future[Any]]]:
    """What was submitted to the other processes, which answer when a test has them answer."""
    submitted: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(call: Callable[[], Any]) -> Future[Any]:
        submitted.append((pickle.loads(pickle.dumps(call)), Future()))
        return submitted[-1][1]

    monkeypatch.setattr(compilers, "ready", lambda: True)
    monkeypatch.setattr(compilers, "submit", submit)
    monkeypatch.setattr(ahead, "capability_of", lambda _: 90)
    made._kept.clear()
    compiled_here.clear()
    return submitted


def test_what_another_process_made_is_taken(processes: Any) -> None:
    """Once, and it is kept; what nobody asked for ahead is made here."""
    with kernels_ahead():
        ahead.each(made, "a", CPU, ("library", "x", "y", "x"))
        assert [call.args for call, _ in processes] == [("a", "x", 90), ("a", "y", 90)]
        for call, future in processes:
            future.set_result(f"elsewhere: {call.func._function(*call.args)}")
        compiled_here.clear()
        assert made("a", "x", 90) == "elsewhere: a x 90"
        assert made("b", "x", 90) == "b x 90"
    assert made("a", "x", 90) == "elsewhere: a x 90", "kept"
    assert compiled_here == [("b", "x", 90)]


def test_what_another_process_cannot_make_is_made_here(processes: Any) -> None:
    """Whatever happened to it, and if that fails, too, this process says why."""
    with kernels_ahead():
        ahead.each(made, "a", CPU, ("x", "wrong", "y"))
        processes[0][1].set_exception(RuntimeError("the processes ended"))
        processes[1][1].set_exception(RuntimeError("a traceback of elsewhere"))
        processes[2][1].cancel()
        assert made("a", "x", 90) == "a x 90"
        with pytest.raises(EngineError, match="no such kernel"):
            made("a", "wrong", 90)
        assert made("a", "y", 90) == "a y 90"


def test_a_process_that_never_answers_is_not_waited_for(processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "_LONGEST_S", 0.01)
    monkeypatch.setattr(compilers, "_LOOKS_S", 0.01)
    with kernels_ahead():
        made.ahead("a", "x", 90)
        assert made("a", "x", 90) == "a x 90"


def test_nothing_is_submitted_outside_of_a_recording(processes: Any) -> None:
    """Nobody would take it."""
    made.ahead("a", "x", 90)
    assert twice(lambda: "done") == "done"
    assert processes == []


def test_without_processes_nothing_runs_twice(processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "ready", lambda: False)
    runs: list[bool] = []
    with kernels_ahead():
        twice(lambda: runs.append(True))
    assert runs == [True]


def test_looking_ahead_answers_the_library_and_measures_nothing(processes: Any) -> None:
    """All ways of an unknown kind are begun, and the chosen one of a known kind; the second run measures."""
    own, parts, measured = choices.Choices(), {"task": "a"}, TaskTimes
    answers: list[str] = []

    def times() -> TaskTimes:
        compiled_here.append(("measured",))
        made("a", "y", 90)
        return measured(task="a", times_us=(("library", 2.0), ("y", 1.0)), chosen="y")

    def run() -> None:
        def each(ways: Iterable[str]) -> None:
            ahead.each(made, "a", CPU, ways)

        answers.append(choices.current().choose(parts, ("library", "x", "y"), times, each))

    with choices.using(own):
        with kernels_ahead():
            twice(lambda: (run(), [future.set_result("elsewhere") for _, future in processes if not future.done()]))
        assert (answers, compiled_here) == (["library", "y"], [("measured",)])
        assert own.made()[0].tasks == 1, "looking ahead is not counted"
        processes.clear()
        for asked in ([], [("a", "y", 90)]):  # not what this process has
            with kernels_ahead():
                twice(run)
            assert [call.args for call, _ in processes] == asked
            made._kept.clear()
    assert answers[2:] == ["library", "y"] * 2


class Separable(torch.nn.Module):
    """Two kernels, or one."""

    def __init__(self) -> None:
        super().__init__()
        self.window = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.product = torch.nn.Conv2d(8, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        silu = torch.nn.functional.silu
        return silu(self.product(silu(self.window(x))))


def test_passes_that_look_ahead_change_nothing(processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is as it was, and the kernels of every pass were begun in all their tiles."""
    for each in (depthwise_pass, separable_pass):
        monkeypatch.setattr(each, "capability_of", lambda _: 90)
    monkeypatch.setattr(measure, "kernel_times_us", lambda *_: pytest.fail("measured"))
    graphs: list[torch.fx.Graph] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        before = module.graph.python_code("self").src
        with choices.using(choices.Choices()), kernels_ahead(), choices.looking_ahead():
            found = [each.rewrite(module.graph, CPU) for each in (separable_pass, depthwise_pass, pointwise_pass)]
        assert found == [0, 0, 0]
        assert module.graph.python_code("self").src == before
        return module.forward

    module = Separable().half().to(memory_format=torch.channels_last).eval()
    x = torch.zeros(1, 8, 12, 12, dtype=torch.float16).to(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.compile(module, backend=backend)(x)
    assert graphs
    names = {call.func._function.__module__.rpartition(".")[2] for call, _ in processes}
    assert names == {"separable", "depthwise", "pointwise"}
    assert len(processes) == len({(call.func._function.__module__, call.args) for call, _ in processes})


@pytest.mark.parametrize("follows", ["nothing", "bias", "relu", "add", "add-relu"])
@pytest.mark.parametrize("size", [1, 3])
def test_kernels_of_convolutions_are_begun_whatever_follows(processes: Any, follows: Any, size: int) -> None:
    """Those of all ways that there are; some convolutions have no kernel of ours."""
    group = epilogue_ways.Group(
        dtype=torch.float16,
        x=(1, 512, 7, 7),
        weight=(512, 512, size, size),
        out=(1, 512, 7, 7),
        bias=True,
        stride=(1, 1),
        padding=(size // 2, size // 2),
        dilation=(1, 1),
        groups=1,
        follows=follows,
    )
    with choices.using(choices.Choices()), kernels_ahead(), choices.looking_ahead():
        assert epilogue_ways.fastest(group, CPU) == "library"
    begun = [(call.func._function.__module__.rpartition(".")[2], call.args[1]) for call, _ in processes]
    tiles = [("pointwise", way.removeprefix("pointwise ")) for way in group.ways if way.startswith("pointwise ")]
    assert begun == [*tiles, *(("split_k", way) for way in group.split.ways)]
    assert bool(tiles) == (size == 1 and follows != "add")


def test_the_compilers_processes_make_the_same_kernel() -> None:
    """In a process of its own, with real compile processes: the machine code is that of a compilation here."""
    script = """
import functools, os, tempfile, time

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"

from nimble_jobs.engine.private import compilers
from nimble_jobs.kernels import depthwise

shape = depthwise.Shape(
    dtype="float16", images=1, channels=8, height=9, width=9, out_height=9, out_width=9, kernel=3, stride=1, padding=1,
    dilation=1, channels_last=True,
)
with compilers.compiling(True):
    end = time.monotonic() + 60
    while not compilers.ready() and time.monotonic() < end:
        time.sleep(0.05)
    future = compilers.submit(functools.partial(depthwise.compiled, shape, shape.tiles[0], 90))
    there = future.result(60)
here = depthwise.compiled(shape, shape.tiles[0], 90)
assert there == here, "other machine code"
assert here.binary
print("equal")
"""
    done = prefork.run_light(script, check=False)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_a_server_that_ends_or_hangs_holds_nothing_up(signal: str) -> None:
    """Real processes, whose server is killed, or stopped, with calls under way: they are made here, which is said once,
    the next build has new processes, and all of them end.
    """
    script = f"""
import functools, logging, os, signal, tempfile, time

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
warned = []
logging.getLogger("nimble_jobs.kernels.ahead").addHandler(type("To", (logging.Handler,), {{"emit": warned.append}})())

from torch._inductor.async_compile import AsyncCompile

from nimble_jobs.engine.private import compilers
from nimble_jobs.kernels import ahead, depthwise
from tests.unit.test_kernels_ahead import slow

compilers._LONGEST_S = 2.0


def until_ready():
    end = time.monotonic() + 60
    while not compilers.ready() and time.monotonic() < end:
        time.sleep(0.05)
    return AsyncCompile.process_pool().process


with compilers.compiling(True):
    server = until_ready()
    with ahead.kernels_ahead():
        for number in range(3):
            slow.ahead(number)
        os.kill(server.pid, signal.{signal})
        if "{signal}" == "SIGKILL":  # the next pass asks before anyone waits for an answer
            server.wait()
            assert not compilers.ready()
        began = time.monotonic()
        assert [slow(number) for number in range(3)] == [(number, os.getpid()) for number in range(3)]
        assert time.monotonic() - began < 20
    assert len(warned) == 1 and "since another one could not" in warned[0].getMessage(), warned
    assert server.wait(5) is not None
    another = until_ready()
    assert another is not server
    assert compilers.submit(os.getpid).result(60) not in (os.getpid(), server.pid)
assert another.wait(60) is not None
print("equal")
"""
    done = prefork.run_light(script, check=False)
    assert done.stdout == "equal\n", done.stderr


def test_a_recording_begins_with_all_kernels_that_its_passes_time(
    processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those over torch's functions, over Inductor's operators, and over what was recorded: each runs twice in it."""
    looks: list[tuple[str, bool]] = []
    passes: dict[str, Any] = {}

    def noted(name: str) -> Callable[..., None]:
        return lambda *_, **__: looks.append((name, choices._looking_ahead.get()))

    def recorded(*_: Any) -> Recording:
        for name in ("rewrite", "last"):
            passes[name](torch.fx.Graph())
        return Recording(program=Program(buffers=(), tasks=(), inputs=(), state=(), constants=(), outputs=()))

    def own(recording: Recording, *_: Any, **__: Any) -> Recording:
        twice(lambda: noted("tasks")())
        return recording

    for _, one, _ in sources._PASSES:
        monkeypatch.setattr(one, "rewrite", noted("functions"))
    monkeypatch.setattr(inductor_pass.epilogues, "choose_ways", noted("convolutions"))
    monkeypatch.setattr(inductor_pass.split_k_pass, "split_products", noted("products"))
    monkeypatch.setattr(sources, "compile_module", lambda _, **named: passes.update(named))
    monkeypatch.setattr(sources, "record_compiled", recorded)
    monkeypatch.setattr(sources, "with_own_depthwise", own)
    source = sources.Source(kernels="epilogues", layout="given")
    sources.record_source(torch.nn.ReLU(), source, {"x": torch.zeros(2)}, CPU)
    functions = len(sources._PASSES)
    assert looks == [
        *[("functions", True)] * functions,
        *[("functions", False)] * functions,
        *[("convolutions", True), ("products", True), ("convolutions", False), ("products", False)],
        *[("tasks", True), ("tasks", False)],
    ]
