"""What a job builds now, and what later: expected costs against expected savings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.payback import QUICK_STAKE, STAKE, Costs, Plan, Situation, beside, decide
from nimble_jobs.planner.jobs.first_run import expected
from nimble_jobs.store.schedules import BuildFacts

COSTS = Costs(
    quick_s=0.7, quick_ratio=0.6, build_s=22.0, build_ratio=0.3, start_s=5.0, move_s=1.0, source="as two builds here"
)
NOW = Situation(left=100_000, record_s=2e-4, spent_s=3.0, idle_cores=12.0)

ratios = st.floats(0.02, 1.0)
seconds = st.floats(0.0, 200.0)
costs = st.builds(
    Costs,
    quick_s=seconds,
    quick_ratio=ratios,
    build_s=seconds,
    build_ratio=ratios,
    start_s=st.floats(0.0, 20.0),
    move_s=st.floats(0.0, 5.0),
    source=st.just("a guess"),
)
situations = st.builds(
    Situation,
    left=st.integers(0, 10**7),
    record_s=st.floats(1e-6, 1.0),
    busy=st.floats(0.0, 1.0),
    spent_s=st.floats(0.0, 100.0),
    on_gpu=st.booleans(),
    idle_cores=st.floats(0.0, 64.0),
    threads=st.integers(1, 64),
    beside=st.booleans(),
    outlives=st.booleans(),
    uses=st.floats(0.0, 50.0),
    records=st.integers(0, 10**6),
)


@given(now=situations, costs=costs)
def test_no_build_costs_more_than_it_saves(now: Situation, costs: Costs) -> None:
    """And without uses elsewhere the job itself is expected to end sooner."""
    found = decide(now, costs)
    assert (found.plan is Plan.NOTHING) == (found.cost_s == 0.0 and found.saving_s == 0.0) or found.cost_s == 0.0
    assert found.cost_s <= found.saving_s
    if not now.uses:
        assert found.ends_s <= found.eager_s


@given(now=situations, costs=costs)
def test_a_wrong_guess_costs_a_share_of_the_job(now: Situation, costs: Costs) -> None:
    """Where a build brings nothing at all, the job takes a fifth longer at most; a capture alone may cost a quarter."""
    found = decide(replace(now, uses=0.0), costs)
    stake = QUICK_STAKE if found.plan is Plan.QUICK else STAKE
    assert found.cost_s <= stake * (now.spent_s + found.eager_s) + 1e-9


def test_a_risk_that_is_too_large() -> None:
    """Half of a short job is not staked, though it would be won; with time spent before, it is less of the job."""
    job = Situation(left=4_000, record_s=1e-3, beside=False)
    costs = replace(COSTS, quick_s=2.0, quick_ratio=0.1, build_s=1e6)
    assert decide(job, costs).plan is Plan.NOTHING
    assert decide(replace(job, spent_s=4.1), costs).plan is Plan.QUICK


@given(now=situations, costs=costs, more=st.integers(0, 10**7))
def test_more_records_never_bring_less(now: Situation, costs: Costs, more: int) -> None:
    """What pays for some records pays for more of them. (For others' sake a longer job is disturbed for longer.)"""
    now = replace(now, uses=0.0)
    few, many = decide(now, costs), decide(replace(now, left=now.left + more), costs)
    assert many.saving_s - many.cost_s >= few.saving_s - few.cost_s - 1e-6
    assert few.plan is Plan.NOTHING or many.plan is not Plan.NOTHING


@given(now=situations, costs=costs)
def test_what_is_never_made_faster_is_not_built(now: Situation, costs: Costs) -> None:
    """A job that waits for its input gets nothing from a schedule, and neither do its like."""
    assert decide(replace(now, busy=0.0), costs).plan is Plan.NOTHING


@pytest.mark.parametrize(
    ("left", "plan"),
    [(1_000, Plan.NOTHING), (20_000, Plan.QUICK), (100_000, Plan.QUICK), (1_000_000, Plan.QUICK_BESIDE)],
)
def test_the_plan_grows_with_the_job(left: int, plan: Plan) -> None:
    """0.2 ms a record in eager, on a GPU with idle cores beside it."""
    found = decide(replace(NOW, left=left), COSTS)
    assert found.plan is plan
    assert found.later is (plan in (Plan.NOTHING, Plan.QUICK))


@pytest.mark.parametrize(("on_gpu", "saving_s"), [(True, 14.0), (False, 14.0 * 0.8)])
def test_the_host_works_while_a_gpu_computes(on_gpu: bool, saving_s: float) -> None:
    """On a GPU replays hide what the host does for a batch; on a CPU that is added to the model's time."""
    costs = replace(COSTS, quick_ratio=0.3, build_s=1e6)
    found = decide(replace(NOW, busy=0.8, on_gpu=on_gpu), costs)
    assert found.saving_s == pytest.approx(saving_s)
    longer = decide(replace(NOW, busy=0.6), costs)  # the host's 40 % of a batch are more than a replay
    assert longer.saving_s == pytest.approx(20.0 * 0.6)


def test_a_build_beside_needs_cores() -> None:
    """On two cores that compute already it makes the job slower, and takes longer itself."""
    alone, crowded = (
        beside(Situation(left=1, record_s=1.0, on_gpu=False, threads=2, idle_cores=idle), COSTS) for idle in (2.0, 0.0)
    )
    assert (alone[0], alone[1]) == (0.0, COSTS.start_s + COSTS.build_s)
    assert crowded[0] > 0.0
    assert crowded[1] > 2 * alone[1]


def test_what_was_missed_before_may_be_waited_for() -> None:
    """A short job builds first when so many like it are expected that they pay for it together."""
    job = replace(NOW, left=20_000, records=20_000, beside=False)
    assert decide(replace(job, uses=2.0), COSTS).plan is not Plan.WAIT
    found = decide(replace(job, uses=40.0), COSTS)
    assert found.plan is Plan.WAIT
    assert "in 40 uses elsewhere" in found.why


def test_the_reason_is_said() -> None:
    """With the figures that it rests on."""
    found = decide(replace(NOW, left=1_000_000), COSTS)
    assert found.why.startswith(
        "captures eager's kernels in about 0.7 s, and builds in the background: "
        "1,000,000 records left would take 200 s in eager; a build would take about 22 s (as two builds here), "
        "38 s alongside the job; that saves "
    )


def facts(**changed: Any) -> BuildFacts:
    values = {
        "model": "m",
        "dtype": "fp16",
        "input": "x",
        "build_s": 10.0,
        "eager_us": 5000.0,
        "quick_us": 2000.0,
        "replay_us": 500.0,
        "runs": "schedule",
    }
    return BuildFacts(**values | changed)


def test_costs_are_learned() -> None:
    """From builds of the model if there are any, else from all of the device; a call that takes longer costs more."""
    given = {"on_gpu": True, "call_s": 0.005}
    default = expected([], model="m", **given)
    others = expected([facts(model="other", build_s=44.0)], model="m", **given)
    own = expected([facts(model="other", build_s=44.0), facts(build_s=11.0)], model="m", **given)
    assert (default.build_s, others.build_s, own.build_s) == (22.0, 44.0, 11.0)
    assert own.build_ratio == pytest.approx(own.quick_ratio * 0.25)
    assert [c.source for c in (default, others, own)] == [
        "estimated from other machines, as this one has built nothing yet",
        "estimated from 1 build of other models on this device",
        "estimated from 1 earlier build of this model on this device",
    ]
    assert expected([], model="m", on_gpu=True, call_s=0.05).build_s > default.build_s


def test_kernels_say_what_a_capture_brings() -> None:
    """The gaps between them are gone; on a CPU there are none."""
    assert expected([], model="m", on_gpu=True, call_s=0.006, quick_ratio=0.5).quick_ratio == 0.5
    assert expected([], model="m", on_gpu=False, call_s=0.006).quick_ratio == 1.0
    slow = facts(runs="eager", replay_us=9000.0)
    assert expected([slow], model="m", on_gpu=False, call_s=0.005).build_ratio == 1.0
