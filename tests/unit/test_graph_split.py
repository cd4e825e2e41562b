"""Backward passes of convolutions as two tasks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine.capture import capture
from nimble_jobs.engine.record import Recording, record, state_of
from nimble_jobs.graph.dag import build_dag
from nimble_jobs.graph.split import split_convolutions
from nimble_jobs.schedule import Program

CPU = torch.device("cpu")
OP = "aten.convolution_backward.default"


class Backward(nn.Module):
    """Two convolutions after each other, backwards."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, bias=bias), nn.Conv2d(4, 4, 3, bias=bias)
        self.bias = [4] if bias else None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.first(x)
        gradient = torch.ones_like(self.second(y))
        found = {}
        for name, conv, given in (("second", self.second, y), ("first", self.first, x)):
            gradient, weight, bias = torch.ops.aten.convolution_backward(
                gradient, given, conv.weight, self.bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
                [True, True, self.bias is not None],
            )  # fmt: skip
            found[f"{name}.weight"] = weight
            if bias is not None:
                found[f"{name}.bias"] = bias
        return found | {"x": gradient}


def recorded(module: nn.Module, x: torch.Tensor) -> Recording:
    return record(module, {"x": x}, state_of(module), CPU, module)


def results(recording: Recording, program: Program, module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    plan, _ = graph.single_stream(program)
    graph.check_plan(program, plan)
    instance = capture(program, plan, state=state_of(module), constants=recording.constants, device=CPU)
    instance.inputs["x"].copy_(x)
    instance.replay()
    return {name: tensor.clone() for name, tensor in instance.outputs.items()}


@pytest.mark.parametrize("bias", [False, True])
def test_both_parts_give_what_the_whole_gave(bias: bool) -> None:
    """Each task becomes two with the same reads; together they write the same, and the results keep their bits."""
    module, x = Backward(bias=bias), torch.randn(2, 3, 8, 8)
    recording = recorded(module, x)
    whole, split = recording.program, split_convolutions(recording.program)
    assert [t.index for t in split.tasks] == list(range(len(whole.tasks) + 2))
    before, after = ([t for t in p.tasks if t.op == OP] for p in (whole, split))
    assert (len(before), len(after)) == (2, 4)
    for task, parts in zip(before, zip(after[::2], after[1::2], strict=True), strict=True):
        assert sorted(map(repr, task.writes)) == sorted(repr(v) for part in parts for v in part.writes)
        assert all(part.reads == task.reads for part in parts)
    expected, found = results(recording, whole, module, x), results(recording, split, module, x)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_weights_wait_for_nothing_but_their_own_layer() -> None:
    """The last gradient of the input no longer waits for that of the second weight."""
    recording = recorded(Backward(bias=False), torch.randn(2, 3, 8, 8))
    program = split_convolutions(recording.program)
    second_x, second_weight, first_x, first_weight = (t.index for t in program.tasks if t.op == OP)
    preds = build_dag(program).preds
    assert second_x in preds[first_x]
    assert second_weight not in preds[first_x]
    assert second_weight not in preds[first_weight]
    assert graph.single_stream(program)[1].width > graph.single_stream(recording.program)[1].width


def test_a_layer_whose_input_needs_no_gradient_stays_whole() -> None:
    """There is nothing to split where one gradient is asked for."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.aten.convolution_backward(
                torch.ones(2, 4, 6, 6), x, self.conv.weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
                [False, True, False],
            )[1]  # fmt: skip
            return result

    program = recorded(First(), torch.randn(2, 3, 8, 8)).program
    assert split_convolutions(program) == program
