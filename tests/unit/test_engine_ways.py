"""Ways to run a task: those that do not work are left out and say why; the fastest of the others is chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from nimble_jobs.cli import render
from nimble_jobs.engine import measure
from nimble_jobs.errors import EngineError
from nimble_jobs.kernels.ways import Ways
from nimble_jobs.task_times import TaskTimes

CPU = torch.device("cpu")


def test_what_does_not_work_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fail to compile, fail at its first call, or give something else; the others are timed."""
    theirs, out = torch.ones(8), torch.empty(8)

    def fails() -> Any:
        raise EngineError("no room")

    def writes(value: float) -> Callable[[], Callable[[], Any]]:
        return lambda: lambda: out.fill_(value)

    ways = Ways("float16")
    ways.add("uncompiled", fails, theirs)
    ways.add("unlaunched", lambda: fails, theirs)
    ways.add("wrong", writes(1.1), theirs, out)
    ways.add("unwritten", lambda: lambda: None, theirs, out.fill_(float("nan")))
    ways.add("fast", writes(1.0), theirs, out)
    ways.add("slow", lambda: lambda: torch.ones(8), theirs)
    monkeypatch.setattr(measure, "kernel_times_us", lambda calls, _: [10.0, 4.0, 12.0][: len(calls)])
    times = ways.times("a product", lambda: None, 0.95, CPU)
    assert (times.chosen, dict(times.times_us)) == ("fast", {"library": 10.0, "fast": 4.0, "slow": 12.0})
    assert dict(times.failed) == {
        "uncompiled": "no room",
        "unlaunched": "no room",
        "wrong": "differs from the library by 1.0e-01; at most 2e-03 is allowed",
        "unwritten": "differs from the library by inf; at most 2e-03 is allowed",
    }
    assert TaskTimes.from_plain(json.loads(json.dumps(asdict(times)))) == times
    ((_, lines),) = render.choices([{"times": asdict(times), "tasks": 2}])
    assert "; wrong failed: differs from the library by 1.0e-01" in lines[0][1]


@pytest.mark.parametrize(("us", "chosen"), [(9.4, "ours"), (9.6, "library")])
def test_another_way_must_be_clearly_faster(monkeypatch: pytest.MonkeyPatch, us: float, chosen: str) -> None:
    """By the share that is asked for."""
    ways = Ways("float32")
    ways.add("ours", lambda: lambda: torch.ones(2), torch.ones(2))
    monkeypatch.setattr(measure, "kernel_times_us", lambda *_: [10.0, us])
    assert ways.times("a product", lambda: None, 0.95, CPU).chosen == chosen


@pytest.mark.parametrize("failed", [[["way"]], [["way", "two\nlines"]], "way"])
def test_reasons_that_are_none_are_refused(failed: Any) -> None:
    """A row of the store that was not written by us."""
    raw = {"task": "t", "times_us": [["library", 1.0]], "chosen": "library", "failed": failed}
    with pytest.raises(ValueError, match=r"not the times of a kind of task|to unpack"):
        TaskTimes.from_plain(raw)
