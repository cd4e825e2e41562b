"""Our rows: which of the planner's candidates stand for one stream, and which for several."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nimble_jobs.bench.ours import of_candidates
from nimble_jobs.bench.request import OURS_MANY, OURS_ONE, Unit
from nimble_jobs.planner.search.candidate import left_out
from nimble_jobs.schedule import Candidate


def measured(name: str, replay_us: float, streams: int | None) -> Candidate:
    return replace(left_out(name, "", error=0.0, streams=streams), replay_us=replay_us)


@pytest.mark.parametrize(("system", "many", "expected"), [(OURS_ONE, False, "b"), (OURS_MANY, True, "d")])
def test_rows_go_by_the_number_of_streams(system: str, many: bool, expected: str) -> None:
    """Not by what a candidate is called; one that was never planned stands for neither."""
    rows = [
        measured("eager", 1.0, None),
        measured("a", 9.0, 1),
        measured("b", 3.0, 1),
        measured("c, 1 stream", 8.0, 2),
        measured("d", 4.0, 3),
    ]
    unit = Unit(model="m", batch=2, dtype="fp32", layout="contiguous", family="ours")
    found = of_candidates(unit, rows, 1e-3)[many]
    assert (found.system, found.note) == (system, expected)
    none = of_candidates(unit, [left_out("e", "why", streams=2 if many else 1)], 1e-3)[many]
    assert (none.note, none.replay_us) == ("why", None)
