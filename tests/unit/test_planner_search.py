"""The search for a schedule: what it tries, what it leaves out and says why, and where its time goes."""

from __future__ import annotations

import torch
from torch import nn

from nimble_jobs.planner.build import build_best
from nimble_jobs.planner.options import BuildOptions
from nimble_jobs.schedule import Schedule

CPU = torch.device("cpu")


def test_a_search_tells_what_it_begins_and_where_its_time_went() -> None:
    """Each source and candidate by name, in order; the stages are within the whole, and come back from the text."""
    begun: list[str] = []
    built = build_best(nn.Linear(3, 2).eval(), {"x": torch.zeros(2, 3)}, "key", BuildOptions(), CPU, told=begun.append)
    assert begun == ["eager kernels", "eager kernels, 1 stream"]
    schedule = built.schedule
    assert [name for name, _ in schedule.stages] == ["record", "plan", "capture", "check", "measure"]
    assert all(seconds > 0 for _, seconds in schedule.stages)
    assert sum(seconds for _, seconds in schedule.stages) <= schedule.build_s
    assert Schedule.from_json(schedule.to_json()) == schedule
