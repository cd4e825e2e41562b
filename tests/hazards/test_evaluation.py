"""Hostile modules in evaluation mode: equal to eager over five calls, or refused, and then equal in eager."""

from __future__ import annotations

import pytest
import torch

from tests.hazards import aliasing, chance, control_flow, features, host_reads, inputs, outputs, state
from tests.hazards.case import Case
from tests.hazards.runner import end_of

ALL = [
    case
    for file in (state, aliasing, host_reads, control_flow, outputs, inputs, chance, features)
    for case in file.CASES
]
CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", ALL, ids=str)
def test_equal_or_refused(case: Case) -> None:
    """Outputs, state, written inputs and random states are eager's for five calls, or `prepare` says why not."""
    end = end_of(case, CPU)
    if case.recorded is not None:
        assert end.recorded is case.recorded, end.reason
