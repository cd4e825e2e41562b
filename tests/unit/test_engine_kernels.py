"""Compiled kernels as tasks: told to the recorder by their launches, bound by name, replayed over live buffers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from nimble_jobs import graph
from nimble_jobs.engine import cuda_driver
from nimble_jobs.engine.bind import bind
from nimble_jobs.engine.record import Recording
from nimble_jobs.engine.recorder import Recorder
from nimble_jobs.errors import EngineError
from nimble_jobs.schedule import BufferKind

CPU = torch.device("cpu")


class Double:
    """Fills its second argument with twice the first."""

    name, identity, write_only, updated = "triton.double", "double", {1}, set[int]()

    def __call__(self, x: torch.Tensor, out: torch.Tensor, count: int) -> None:
        torch.mul(x, 2, out=out)


class Increment:
    """Adds one to its only argument."""

    name, identity, write_only, updated = "triton.increment", "increment", set[int](), {0}

    def __call__(self, x: torch.Tensor, count: int) -> None:
        x.add_(1)


def launched() -> Recording:
    """x -> double -> increment -> mm(out=) -> output, with buffers that no operator allocates."""
    recorder = Recorder(CPU)
    x = torch.randn(4, 4)
    recorder.add_known(x, BufferKind.INPUT, "x")
    first, second = torch.empty_strided((4, 4), (4, 1)), torch.empty_strided((4, 4), (4, 1))
    steps: list[tuple[Any, tuple[Any, ...]]] = [(Double(), (x, first, 16)), (Increment(), (first, 16))]
    for kernel, args in steps:
        kernel(*args)
        recorder.add_kernel(kernel, args, {})
    with recorder:
        torch.mm(first, x, out=second)
    return recorder.finish({"x": x}, {"output": second})


def test_kernels_become_tasks_with_their_reads_and_writes() -> None:
    """A filled buffer is an intermediate, not a constant, and is not read; an updated one is both."""
    program = launched().program
    double, increment, product = program.tasks
    assert [t.op for t in program.tasks] == ["triton.double", "triton.increment", "aten.mm.out"]
    assert {v.buffer for v in double.reads} == {0}
    assert double.mutates == double.writes == increment.mutates == increment.reads
    assert {v.buffer for v in product.reads}.isdisjoint({v.buffer for v in product.mutates})
    assert not program.constants
    assert graph.make_plan(program)[1].meg_edges == 2


def test_kernels_replay_over_new_buffers() -> None:
    """Bound to new buffers, the kernels compute the same function of another input."""
    recording = launched()
    plan, _ = graph.single_stream(recording.program)
    bound = bind(recording.program, plan, state={}, constants={}, device=CPU, kernels=recording.kernels)
    x = torch.randn(4, 4)
    bound.inputs["x"].copy_(x)
    assert torch.allclose(bound.run()["output"], (2 * x + 1) @ x)


class Noting:
    """Keeps the tensors that it is called with."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        self._seen = seen

    def __call__(self, *args: Any) -> None:
        self._seen += [a for a in args if isinstance(a, torch.Tensor)]


def test_tasks_share_the_tensor_of_a_view() -> None:
    """Other views, and other bindings, have tensors of their own."""
    recording = launched()
    plan, _ = graph.single_stream(recording.program)
    seen: list[torch.Tensor] = []
    kernels = dict.fromkeys(recording.kernels, Noting(seen))
    for _ in range(2):
        bind(recording.program, plan, state={}, constants={}, device=CPU, kernels=kernels).run()
    x, first, again, *others = seen
    assert first is again
    assert len({id(each) for each in (x, first, *others)}) == 4
    assert others[1] is others[2]


def test_a_missing_kernel_is_an_error() -> None:
    """A program whose kernels are not there cannot be bound."""
    recording = launched()
    plan, _ = graph.single_stream(recording.program)
    with pytest.raises(EngineError, match=r"triton\.double"):
        bind(recording.program, plan, state={}, constants={}, device=CPU)


def test_machine_code_is_loaded_once_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal binaries of one device share a function; the binary itself may be let go of. A refusal names the kernel."""
    loaded: list[bytes] = []

    class Driver:
        def cuModuleLoadData(self, _module: Any, binary: bytes) -> int:  # noqa: N802  # the driver's name
            loaded.append(bytes(binary))
            return 200 if binary.startswith(b"broken") else 0

        def cuModuleGetFunction(self, function: Any, _module: Any, _name: bytes) -> int:  # noqa: N802
            function._obj.value = len(loaded)
            return 0

        def cuGetErrorString(self, _status: int, text: Any) -> None:  # noqa: N802
            text._obj.value = b"device kernel image is invalid"

    monkeypatch.setattr(cuda_driver, "driver", Driver)
    monkeypatch.setattr(cuda_driver, "_FUNCTIONS", {})
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    asked = [(b"a" * 5000, "k", first), (b"a" * 5000, "k", first), (b"a" * 5000, "k", second), (b"b", "k", first)]
    assert [cuda_driver.load_function(binary, name, 0, device) for binary, name, device in asked] == [1, 1, 2, 3]
    assert max(len(part) for key in cuda_driver._FUNCTIONS for part in key if isinstance(part, bytes)) == 32
    with pytest.raises(EngineError, match=r"^the kernel k cannot be loaded: device kernel image is invalid$"):
        cuda_driver.load_function(b"broken", "k", 0, first)
