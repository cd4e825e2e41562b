"""Hostile modules in evaluation mode: equal to eager over five calls, or refused, and then equal in eager."""

from __future__ import annotations

import pytest
import torch

from tests.hazards import aliasing, chance, control_flow, features, host_reads, inputs, outputs, state
from tests.hazards.case import Case
from tests.hazards.runner import end_of

FILES = (state, aliasing, host_reads, control_flow, outputs, inputs, chance, features)
ALL = [case for file in FILES for case in file.CASES]
CPU = torch.device("cpu")
# Cases that a schedule can hold on a CPU; elsewhere some of their operators read on the host.
RECORDED = {
    "state-cache_with_a_position_in_a_tensor",
    "flow-keys_of_two_types_with_the_same_name",
    "features-a_scripted_submodule",
    "features-a_traced_submodule",
    "inputs-inverted",
    "inputs-solved",
    "inputs-decomposed",
    *(f"inputs-{what}_{kind}" for what in ("eight_bits", "to_eight_bits") for kind in ("float8_e4m3fn", "float8_e5m2")),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", ALL, ids=str)
def test_equal_or_refused(case: Case) -> None:
    """Outputs, state, written inputs and random states are eager's for five calls, or `prepare` says why not."""
    end = end_of(case, CPU)
    expected = True if case.name in RECORDED else case.recorded
    if expected is not None:
        assert end.recorded is expected, end.reason


def test_the_list_names_cases() -> None:
    """A case that is renamed is not forgotten."""
    assert {case.name for case in ALL} >= RECORDED


@pytest.mark.parametrize("function", chance.UNREPEATABLE)
def test_what_nothing_repeats_is_refused(function: object) -> None:
    """A clock or the system's random numbers differ at each call in eager, so that no schedule is accepted."""
    cases: list[Case] = []
    chance.Cases("chance", cases)(chance.x)(function)  # type: ignore[arg-type]
    assert "differs" in unprepared(cases[0])


def unprepared(case: Case) -> str:
    """Why `prepare` refuses a case's module."""
    from nimble_jobs import Nimble
    from nimble_jobs.errors import NimbleError
    from tests.hazards.case import Data

    with pytest.raises(NimbleError) as refused:
        Nimble(case.make().eval()).prepare(case.call(Data(0, CPU)), fuse="off", streams=1)
    return str(refused.value)
