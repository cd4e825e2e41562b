"""Instances of a stored schedule that are captured while a job runs."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine.capture import Instance, capture
from nimble_jobs.engine.record import Recording, record, state_of
from nimble_jobs.engine.verify import check_alike
from nimble_jobs.errors import CheckFailed, DeviceFault, EngineError, OutOfMemory
from nimble_jobs.planner.forward.further import Further

CPU = torch.device("cpu")


class Fake:
    """An instance of ten bytes."""

    bytes = 10

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def same(instance: Any) -> Any:
    return instance


def further(made: list[Fake], *, left: int = 2, refused: dict[int, Exception] | None = None) -> Further:
    """`made` collects what is captured; those whose number is in `refused` do not pass the check."""

    def make() -> Any:
        made.append(Fake())
        return made[-1]

    def check(one: Any) -> None:
        error = (refused or {}).get(made.index(one))
        if error is not None:
            raise error

    first: Any = Fake()
    return Further(first, left, make, check)


def test_as_many_are_made_as_there_are() -> None:
    """Their memory counts from the beginning, and is given back with them."""
    made: list[Fake] = []
    more = further(made)
    assert (more.left, more.bytes) == (2, 20)
    assert [more.take(same) for _ in range(3)] == [*made, None]
    assert len(made) == 2
    assert (more.left, more.bytes) == (0, 20)
    more.close()
    assert [one.closed for one in made] == [True, True]
    assert (more.take(same), more.bytes) == (None, 0)


@pytest.mark.parametrize(
    "error", [CheckFailed("it differs"), OutOfMemory("no room"), torch.OutOfMemoryError("no room")]
)
def test_one_that_cannot_be_had_is_the_last(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """It is closed, the log says why, and those before it stay."""
    made: list[Fake] = []
    more = further(made, left=3, refused={1: error})
    with caplog.at_level(logging.WARNING):
        assert [more.take(same) for _ in range(3)] == [made[0], None, None]
    assert [one.closed for one in made] == [False, True]
    assert (more.left, more.bytes) == (0, 10)
    assert caplog.messages == [f"2 of 4 instances could be captured, so fewer batches run at once: {error}"]


@pytest.mark.parametrize("error", [EngineError("the head cannot be captured"), torch.OutOfMemoryError("no room")])
def test_one_that_cannot_be_used_is_the_last(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """As one that cannot be had: whoever asked for it goes on without."""

    def use(_: Any) -> None:
        raise error

    made: list[Fake] = []
    more = further(made)
    with caplog.at_level(logging.WARNING):
        assert more.take(use) is None
    assert [one.closed for one in made] == [True]
    assert (more.left, more.made, more.take(same)) == (0, [], None)
    assert str(error) in caplog.text


def test_an_error_of_whoever_uses_it_is_raised() -> None:
    """It is no failure of the instance."""

    def use(_: Any) -> None:
        raise KeyError("logits")

    with pytest.raises(KeyError, match="logits"):
        further([]).take(use)


@pytest.mark.parametrize("fails", [False, True])
def test_what_they_are_made_of_is_let_go(fails: bool) -> None:
    """Once all are there, or there will be no more: constants and machine code on the host."""

    class Recording:
        pass

    recording, first = Recording(), Fake()
    left = weakref.ref(recording)

    def make(_: Any = recording) -> Any:
        return Fake()

    def check(_: Any) -> None:
        if fails:
            raise CheckFailed("it differs")

    given: Any = first
    more = Further(given, 1, make, check)
    del recording, make
    assert left() is not None
    more.take(same)
    assert left() is None


def test_a_fault_of_the_device_is_raised() -> None:
    more = further([], refused={0: DeviceFault("illegal memory access")})
    with pytest.raises(DeviceFault):
        more.take(same)


class Net(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.linear(x)
        return x, x.relu()


def captured(recording: Recording, module: nn.Module) -> Instance:
    plan, _ = graph.single_stream(recording.program)
    return capture(recording.program, plan, state=state_of(module), constants=recording.constants, device=CPU)


def test_instances_of_one_program_are_alike() -> None:
    """One over other weights is not; within the tolerance it is."""
    torch.manual_seed(0)
    module, other = Net().eval(), Net().eval()
    recording = record(module, {"x": torch.zeros(3, 6)}, state_of(module), CPU, module)
    first, ports = captured(recording, module), recording.program.inputs
    check_alike(first, captured(recording, module), ports=ports, device=CPU, tolerance=0.0)
    with pytest.raises(CheckFailed, match=r"output '.*' of a further instance differs"):
        check_alike(first, captured(recording, other), ports=ports, device=CPU, tolerance=1e-3)
    with torch.no_grad():
        other.load_state_dict({name: t * (1 + 1e-5) for name, t in module.state_dict().items()})
    check_alike(first, captured(recording, other), ports=ports, device=CPU, tolerance=1e-3)
    with pytest.raises(CheckFailed):
        check_alike(first, captured(recording, other), ports=ports, device=CPU, tolerance=1e-7)


def test_an_instance_that_writes_nothing_is_not_alike() -> None:
    module = Net().eval()
    recording = record(module, {"x": torch.zeros(3, 6)}, state_of(module), CPU, module)
    first, idle = captured(recording, module), captured(recording, module)
    idle.replay = lambda: None  # type: ignore[method-assign]
    with pytest.raises(CheckFailed):
        check_alike(first, idle, ports=recording.program.inputs, device=CPU, tolerance=1e-3)
