"""Lanes: how long a model has run, in turns."""

from __future__ import annotations

from typing import Any, cast

import pytest

from nimble_jobs.workloads import parts
from nimble_jobs.workloads.parts import Lane


def test_a_lane_counts_the_seconds_of_its_turns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those before its first turn, between two, or after the last one, in which other buckets run."""
    now = 100.0
    monkeypatch.setattr(parts.time, "perf_counter", lambda: now)
    lane = Lane(prepared=cast(Any, None))

    def seconds() -> float:
        return lane.at(record=0, left=0, waits=0.0, idle=0.0).run_s

    now = 107.0
    assert seconds() == 0
    lane.enter()
    now = 109.0
    assert seconds() == 2
    lane.leave()
    now = 150.0
    assert seconds() == 2
    lane.enter()
    now = 151.0
    assert seconds() == 3
    lane.leave()
    assert seconds() == 3
