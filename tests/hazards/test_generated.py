"""Modules of steps in any order end as hazards must: equal to eager over five calls, or refused, and then equal."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings

from tests.hazards.case import CALLS, Case, Data
from tests.hazards.generated import cases
from tests.hazards.runner import end_of

CPU = torch.device("cpu")


def works(case: Case) -> bool:
    """Whether eager can be called five times."""
    module = case.make().eval()
    try:
        with torch.no_grad():
            for turn in range(CALLS + 1):
                args, kwargs = case.call(Data(turn, CPU))
                module(*args, **kwargs)
    except (RuntimeError, ValueError):
        return False
    return True


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_any_steps(case: Case) -> None:
    """Whatever steps a module is made of, nobody is told what eager would not say."""
    assume(works(case))
    end_of(case, CPU)
