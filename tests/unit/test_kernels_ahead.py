"""Kernels that a build will time are compiled by other processes first; what becomes of them there changes nothing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure
from nimble_jobs.engine.private import compilers
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.errors import EngineError
from nimble_jobs.kernel_switches import NOTHING, Kernel, Without
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
TIMES = TaskTimes(task="a", times_us=(("library", 1.0),), chosen="library")
compiled_here: list[tuple[Any, ...]] = []


@Compiles
def made(shape: str, way: str, capability: int) -> str:
    """Stands for a kernel."""
    compiled_here.append((shape, way, capability))
    if way == "wrong":
        raise EngineError("no such kernel")
    return f"{shape} {way} {capability}"


@Compiles
def tuned(shape: str, tile: str | None = None) -> str:
    """Stands for a kernel with a setting that most leave out."""
    return f"{shape}{tile}"


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


def test_a_call_means_the_same_however_its_arguments_are_given(processes: Any) -> None:
    """By position or by name, and a default left out or spelt out: one kernel, which is compiled once."""
    with kernels_ahead():
        tuned.ahead("a")
        tuned.ahead(shape="a", tile=None)
        assert len(processes) == 1
        processes[0][1].set_result("elsewhere")
        assert tuned("a", None) == tuned("a", tile=None) == tuned(shape="a") == "elsewhere"
    assert tuned("a", "x") == "ax"


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


def graph_of(module: torch.nn.Module, do: Callable[[torch.fx.Graph], None]) -> None:
    """Do something with the graph that a compiler is given for a module over a small channels-last picture."""
    seen: list[torch.fx.Graph] = []

    def backend(traced: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(traced.graph)
        with choices.using(choices.Choices()), kernels_ahead():
            do(traced.graph)
        return traced.forward

    module = module.half().to(memory_format=torch.channels_last).eval()
    x = torch.zeros(1, 8, 12, 12, dtype=torch.float16).to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend)(x)
    assert len(seen) == 1


class TwoSeparable(torch.nn.Module):
    """The ReLU between two separable convolutions can be computed in the kernel of either."""

    def __init__(self) -> None:
        super().__init__()
        one = [torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), torch.nn.Conv2d(8, 8, 1)]
        two = [torch.nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False), torch.nn.Conv2d(8, 8, 1)]
        self.all = torch.nn.Sequential(*one, torch.nn.ReLU(), *two)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.all(x)
        return found


def test_a_separable_convolution_is_begun_with_and_without_the_activation_before_it(
    processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel before may have computed it, once that was chosen. What is asked for ahead covers what is timed."""
    monkeypatch.setattr(separable_pass, "capability_of", lambda _: 90)
    timed: list[tuple[int, bool]] = []

    def times(shape: Any, _: torch.device) -> TaskTimes:
        timed.append((shape.depth.kernel, shape.rectified))
        return TaskTimes(task="a", times_us=(("library", 2.0), (shape.tiles[0], 1.0)), chosen=shape.tiles[0])

    def rewrite(graph: torch.fx.Graph) -> None:
        assert twice(lambda: separable_pass.rewrite(graph, CPU)) == 2

    monkeypatch.setattr(separable_pass, "_times", times)
    graph_of(TwoSeparable(), rewrite)
    shapes = [call.args[0] for call, _ in processes if call.func._function.__module__.endswith(".separable")]
    begun = {(shape.depth.kernel, shape.rectified) for shape in shapes}
    assert timed == [(3, False), (5, False)]
    assert begun == {(3, False), (5, False), (5, True)}


@pytest.mark.parametrize(("kernels", "measured"), [(True, True), (True, False), (False, True)])
def test_depthwise_convolutions_that_a_graph_keeps_are_begun_before_it_is_compiled(
    processes: Any, monkeypatch: pytest.MonkeyPatch, kernels: bool, measured: bool
) -> None:
    """In all tiles, with or without a bias, which a compiler adds in another kernel; they are timed once it is. None is
    in a build that measures nothing, nor on a device without kernels.
    """
    module = torch.nn.Sequential(
        torch.nn.Conv2d(8, 8, 3, padding=1, groups=8),
        torch.nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False),
        torch.nn.Conv2d(8, 8, 3, padding=1),
    )
    able = replace(devices.able(CPU), kernels=kernels)
    monkeypatch.setattr(depthwise_pass, "able", lambda _: able)

    def begin(graph: torch.fx.Graph) -> None:
        if measured:
            choices.current().choose({"task": "a"}, ("library",), lambda: TIMES)
        depthwise_pass.begin_plain(graph, CPU)

    graph_of(module, begin)
    begun = [(call.args[0].kernel, call.args[1]) for call, _ in processes]
    tiles = processes[0][0].args[0].tiles if processes else ()
    assert bool(tiles) == (kernels and measured)
    assert begun == [(kernel, tile) for kernel in (3, 5) for tile in tiles]


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


def test_a_convolution_with_one_way_only_is_not_timed(processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A depthwise one without what follows: the library's first call of a shape alone may take most of a second."""
    monkeypatch.setattr(measure, "kernel_times_us", lambda *_: pytest.fail("timed"))
    sizes = {"x": (1, 8, 12, 12), "weight": (8, 1, 3, 3), "out": (1, 8, 12, 12)}
    one = dict.fromkeys(("stride", "padding", "dilation"), (1, 1))
    group = epilogue_ways.Group(dtype=torch.float16, bias=False, groups=8, follows="nothing", **sizes, **one)
    with choices.using(choices.Choices()) as made:
        assert epilogue_ways.fastest(group, CPU) == "library"
    assert (made.measured, made.made()) == ({}, ())


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


@pytest.mark.parametrize("off", [NOTHING, frozenset({Kernel.DEPTHWISE})])
def test_plain_depthwise_kernels_are_begun_if_they_may_be_used(
    processes: Any, monkeypatch: pytest.MonkeyPatch, off: Without
) -> None:
    """Once the passes are done; and no cycle is collected while a compiler works, which makes many lasting objects."""
    begun: list[str] = []
    for _, one, _ in sources._PASSES:
        monkeypatch.setattr(one, "rewrite", lambda *_: begun.append("pass"))
    monkeypatch.setattr(depthwise_pass, "begin_plain", lambda *_: begun.append("plain"))
    recording = Recording(program=Program(buffers=(), tasks=(), inputs=(), state=(), constants=(), outputs=()))
    passes: dict[str, Any] = {}

    def recorded(*_: Any) -> Recording:
        assert not gc.isenabled()
        passes["rewrite"](torch.fx.Graph())
        return recording

    monkeypatch.setattr(sources, "compile_module", lambda _, **named: passes.update(named))
    monkeypatch.setattr(sources, "record_compiled", recorded)
    monkeypatch.setattr(sources, "with_own_depthwise", lambda recording, *_, **__: recording)
    source = sources.Source(kernels="epilogues", layout="given", without=off)
    sources.record_source(torch.nn.ReLU(), source, {"x": torch.zeros(2)}, CPU)
    assert gc.isenabled()
    assert begun == [*["pass"] * 2 * len(sources._PASSES), *["plain"] * (not off)]
