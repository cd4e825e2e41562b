"""The simulated times behind every drawing of a schedule."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings

from nimble_jobs.draw import simulate
from nimble_jobs.errors import PlanError
from nimble_jobs.graph.dag import build_dag
from nimble_jobs.schedule import BufferKind, Plan, Schedule, Sync
from tests.strategies import flat, program, schedule, schedules, task

INTERMEDIATE = BufferKind.INTERMEDIATE


def diamond(durations_us: tuple[float, ...] = (1.0, 5.0, 2.0, 1.0)) -> Schedule:
    """One task, two that read what it wrote, and one that reads what those wrote."""
    tasks = [
        task(0, writes=[flat(0, 8)]),
        task(1, reads=[flat(0, 8)], writes=[flat(1, 8)]),
        task(2, reads=[flat(0, 8)], writes=[flat(2, 8)]),
        task(3, reads=[flat(1, 8), flat(2, 8)], writes=[flat(3, 8)]),
    ]
    return schedule(program(tasks, [INTERMEDIATE] * 4, nbytes=[8] * 4), None, durations_us)


def test_a_diamond_by_hand() -> None:
    """The long branch decides; the other stream idles while it has nothing to do."""
    timing = simulate(diamond())
    assert timing.measured
    assert timing.start_us == (0.0, 1.0, 1.0, 6.0)
    assert timing.end_us == (1.0, 6.0, 3.0, 7.0)
    assert (timing.makespan_us, timing.critical_path_us, timing.total_work_us) == (7.0, 7.0, 9.0)
    assert timing.critical == (0, 1, 3)
    assert sorted(timing.idle_share) == pytest.approx([0.0, 5 / 7])


def test_without_measured_times_each_task_is_one_unit() -> None:
    """A schedule that was never measured is drawn in units, and says so."""
    timing = simulate(diamond(()))
    assert not timing.measured
    assert timing.end_us == (1.0, 2.0, 2.0, 3.0)
    assert timing.critical_path_us == 3.0


@settings(deadline=None)
@given(schedules())
def test_times_keep_streams_syncs_and_dependencies(drawn: Schedule) -> None:
    """No task starts before its stream is free and what it waits for or depends on has ended; none waits longer."""
    timing = simulate(drawn)
    plan = drawn.plan
    for before, after in ((u, v) for v, us in enumerate(build_dag(drawn.program).preds) for u in us):
        assert timing.start_us[after] >= timing.end_us[before]
    previous: dict[int, int] = {}
    for i in plan.order:
        causes = [sync.before for sync in plan.syncs if sync.after == i]
        if plan.stream_of[i] in previous:
            causes.append(previous[plan.stream_of[i]])
        assert timing.start_us[i] == max((timing.end_us[c] for c in causes), default=0.0)
        previous[plan.stream_of[i]] = i


@settings(deadline=None)
@given(schedules())
def test_the_makespan_lies_between_its_bounds(drawn: Schedule) -> None:
    """Never below the critical path, never above the total work; idle shares say what is left of the streams."""
    timing = simulate(drawn)
    assert timing.makespan_us >= timing.critical_path_us * (1 - 1e-12)
    assert timing.makespan_us <= timing.total_work_us * (1 + 1e-12)
    assert len(timing.idle_share) == drawn.plan.streams
    assert all(0 <= share <= 1 for share in timing.idle_share)
    busy = sum(1 - share for share in timing.idle_share) * timing.makespan_us
    assert math.isclose(busy, timing.total_work_us, rel_tol=1e-9, abs_tol=1e-9) or not timing.makespan_us


@settings(deadline=None)
@given(schedules())
def test_the_critical_path_is_a_path(drawn: Schedule) -> None:
    """Each of its tasks depends on the one before, and together they take the critical path's time."""
    timing = simulate(drawn)
    preds = build_dag(drawn.program).preds
    assert all(u in preds[v] for u, v in zip(timing.critical, timing.critical[1:], strict=False))
    length = sum(timing.end_us[i] - timing.start_us[i] for i in timing.critical)
    assert math.isclose(length, timing.critical_path_us, rel_tol=1e-9, abs_tol=1e-9)
    assert timing.critical or not drawn.program.tasks


@pytest.mark.parametrize("times", [(1.0,), (1.0, 2.0, 3.0, math.nan), (1.0, 2.0, 3.0, -1.0)])
def test_times_that_are_none_are_refused(times: tuple[float, ...]) -> None:
    """Too few times, or one that is no time, cannot be drawn."""
    with pytest.raises(PlanError, match="task times"):
        simulate(dataclasses.replace(diamond(), durations_us=times))


def test_a_plan_that_leaves_a_dependency_unordered_is_refused() -> None:
    """A drawing never shows a plan as sound that is not."""
    sound = diamond()
    broken = Plan(order=sound.plan.order, stream_of=sound.plan.stream_of, syncs=sound.plan.syncs[1:])
    with pytest.raises(PlanError, match="depends on"):
        simulate(dataclasses.replace(sound, plan=broken))
    same = Plan(order=sound.plan.order, stream_of=(0, 0, 0, 0), syncs=(Sync(before=0, after=1),))
    with pytest.raises(PlanError, match="both tasks run on stream"):
        simulate(dataclasses.replace(sound, plan=same))
