"""Kernels that a build will time are compiled by other processes first; what becomes of them there changes nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from nimble_jobs.engine import measure
from nimble_jobs.engine.private import compilers
from nimble_jobs.errors import EngineError
from nimble_jobs.kernels import ahead, choices, depthwise_pass, pointwise_pass, separable_pass
from nimble_jobs.kernels.ahead import Compiles, kernels_ahead, twice
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
    made._kept.cache_clear()
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
    monkeypatch.setattr(ahead, "_LONGEST_S", 0.01)
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
        with kernels_ahead():
            twice(run)
        assert [call.args for call, _ in processes] == [("a", "y", 90)]
    assert answers[2:] == ["library", "y"]


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
