"""Whether the device will be full, and so which of our kernels are tried: chosen alone, beside others, or both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs.engine import measure
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.errors import EngineError
from nimble_jobs.kernel_switches import Kernel
from nimble_jobs.planner.forward import target as targets
from nimble_jobs.planner.forward.build import build_best
from nimble_jobs.planner.forward.target import ForwardTarget
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.search import crowd as crowds
from nimble_jobs.planner.search.candidate import MeasuredCandidate, measured_row
from nimble_jobs.planner.search.clock import Clock
from nimble_jobs.planner.search.crowd import Crowd
from nimble_jobs.planner.search.plans import plan_on_one_stream
from nimble_jobs.planner.search.search import Search
from nimble_jobs.planner.search.target import PlannedProgram
from nimble_jobs.planner.sources.source import AS_GIVEN, Source, record_source
from nimble_jobs.schedule import Candidate, GraphFacts, Plan

CPU = torch.device("cpu")
ALONE = Source(kernels="epilogues", layout="given")
BESIDE = replace(ALONE, kernels="crowded")
EAGER = replace(ALONE, kernels="eager")


class Branches(nn.Module):
    """As many branches as asked for, each of one task, and a last one for all."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.mul(n) for n in range(self.count)])


@pytest.fixture
def has_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has streams, as a GPU has."""
    monkeypatch.setattr(crowds, "may_have_streams", lambda facts, options, _: options.streams != 1)


def eager_kernels(branches: int = 4, *, replay_us: float = 100.0) -> MeasuredCandidate:
    """Eager's kernels on one stream."""
    recording = record_source(Branches(branches), AS_GIVEN, {"x": torch.zeros(2)}, CPU)
    row = measured_row("eager kernels, 1 stream", replay_us, 1, 0, error=None, reason="", streams=1)
    programs = {Role.FORWARD: plan_on_one_stream(recording)}
    return MeasuredCandidate(row=row, source=AS_GIVEN, programs=programs, error=None)


def timed_at(us: float) -> Callable[[MeasuredCandidate], MeasuredCandidate]:
    """Each task takes so long alone."""

    def timed(one: MeasuredCandidate) -> MeasuredCandidate:
        times = (us,) * len(one.only.recording.program.tasks)
        planned = replace(one.only, facts=one.only.analysis.single_stream(times)[1], durations_us=times)
        return replace(one, programs={Role.FORWARD: planned})

    return timed


def crowd_of(target: Any, rows: list[Candidate] | None = None, **options: Any) -> Crowd:
    return Crowd(target, BuildOptions(**options), clock=Clock(), rows=[] if rows is None else rows)


def target_with(us: float | Exception = 1000.0, *, captures_take_long: bool = False) -> Any:
    """A target on which each plan takes so long, or fails; notes the streams of each."""
    streams: list[int] = []

    def alone_us(_: Source, role: Role, recording: Recording, plan: Plan) -> float:
        assert (role, bool(recording.program.tasks)) == (Role.FORWARD, True)
        streams.append(plan.streams)
        if isinstance(us, Exception):
            raise us
        return us

    return SimpleNamespace(device=CPU, alone_us=alone_us, captures_take_long=captures_take_long, streams=streams)


@pytest.mark.parametrize(
    ("branches", "sources", "options", "looks"),
    [
        (4, [ALONE], {}, True),
        (3, [ALONE], {}, False),
        (4, [ALONE], {"streams": 4}, True),
        (4, [ALONE], {"streams": 3}, False),
        (4, [ALONE], {"streams": 1}, False),
        (4, [EAGER], {}, False),
        (4, [], {}, False),
        (4, [EAGER, replace(ALONE, without=frozenset({Kernel.CROWDED}))], {}, False),
    ],
)
@pytest.mark.usefixtures("has_streams")
def test_tasks_are_timed_only_where_it_could_matter(
    branches: int, sources: list[Source], options: dict[str, Any], looks: bool
) -> None:
    """That takes seconds. Who needed it is given the times."""
    target, first = target_with(), eager_kernels(branches)
    again, ordered = crowd_of(target, **options).ordered(first, sources, timed_at(10.0))
    assert (bool(again.only.durations_us), target.streams) == (looks, [4] * looks)
    assert ordered == ([BESIDE] if looks else sources)


@pytest.mark.usefixtures("has_streams")
def test_a_step_is_not_looked_at() -> None:
    """Its captures take long, and several programs have no critical path in common."""
    first = eager_kernels()
    several = replace(first, programs=dict.fromkeys((Role.FORWARD, Role.BACKWARD), first.only))
    for target, one in ((target_with(captures_take_long=True), first), (target_with(), several)):
        assert crowd_of(target).ordered(one, [ALONE], lambda _: pytest.fail("timed")) == (one, [ALONE])


@pytest.mark.parametrize(("four_us", "full"), [(34.1, True), (33.9, False)])
@pytest.mark.usefixtures("has_streams")
def test_the_device_is_full_if_eagers_kernels_take_long_on_few_streams(four_us: float, full: bool) -> None:
    """1.7 times the critical path, which has two tasks of 10 us."""
    rows: list[Candidate] = []
    crowd = crowd_of(target_with(four_us), rows)
    first, ordered = crowd.ordered(eager_kernels(), [EAGER, ALONE], timed_at(10.0))
    assert ordered == [EAGER, BESIDE if full else ALONE]
    best = on_streams(replace(first, source=BESIDE), 4)
    assert crowd.other([EAGER, BESIDE], best) is None
    assert [row.reason for row in rows] == [
        "not tried: eager kernels take 34 us on 4 streams, 1.7 times their critical path, and eager kernels, 1 stream "
        "takes 100 us, 5.0 times its critical path"
    ] * full


def four_of(one: PlannedProgram) -> tuple[Plan, GraphFacts]:
    """The only plan on several streams."""
    return one.analysis.plan(durations_us=one.durations_us, max_streams=4)


def on_streams(one: MeasuredCandidate, streams: int) -> MeasuredCandidate:
    """As if its plan had so many."""
    planned = replace(one.only, facts=replace(one.only.facts, streams=streams))
    return replace(one, programs={Role.FORWARD: planned})


@pytest.mark.parametrize(
    ("source", "streams", "replay_us", "tried"),
    [
        (BESIDE, 4, 27.1, False),
        (BESIDE, 4, 26.9, True),  # less than 1.35 times the critical path
        (BESIDE, 3, 100.0, True),
        (EAGER, 4, 100.0, True),
    ],
)
@pytest.mark.usefixtures("has_streams")
def test_the_other_choice_is_left_out_only_if_the_best_plan_fills_the_device(
    source: Source, streams: int, replay_us: float, tried: bool
) -> None:
    """With the kernels that were chosen for that, and on many streams: one stream takes longer than the path anyway."""
    rows: list[Candidate] = []
    crowd = crowd_of(target_with(), rows)
    first, _ = crowd.ordered(eager_kernels(), [ALONE], timed_at(10.0))
    row = replace(first.row, replay_us=replay_us)
    other = crowd.other([EAGER, BESIDE], on_streams(replace(first, row=row, source=source), streams))
    assert (other, len(rows)) == ((ALONE, 0) if tried else (None, 1))
    assert crowd.other([EAGER, ALONE], first) is None, "the one for a full device failed, and the search went on"


@pytest.mark.parametrize(
    ("branches", "times_us", "replay_us", "options"),
    [
        (4, 10.0, 33.0, {}),
        (4, 0.0, 100.0, {}),
        (4, 10.0, 100.0, {"memory_bytes": 8}),
    ],
)
@pytest.mark.usefixtures("has_streams")
def test_nothing_is_captured_where_it_need_not_or_must_not_be(
    branches: int, times_us: float, replay_us: float, options: dict[str, Any]
) -> None:
    """One stream is fast enough already, no time is known, or the plan needs more memory than it may use."""
    target = target_with()
    crowd = crowd_of(target, **options)
    _, ordered = crowd.ordered(eager_kernels(branches, replay_us=replay_us), [ALONE], timed_at(times_us))
    assert (ordered, target.streams) == ([ALONE], [])


@pytest.mark.usefixtures("has_streams")
def test_a_look_that_fails_is_a_row() -> None:
    """The search goes on as if nobody had looked. Nor does it matter if tasks could not be timed."""
    rows: list[Candidate] = []
    crowd = crowd_of(target_with(EngineError("no capture")), rows)
    assert crowd.ordered(eager_kernels(), [ALONE], timed_at(10.0))[1] == [ALONE]
    name = "eager kernels, a look at 4 streams"
    assert [(row.name, row.reason) for row in rows] == [(name, "not built: no capture")]
    assert crowd.ordered(eager_kernels(), [ALONE], lambda one: one)[1] == [ALONE]


class Searched:
    """A whole search on the CPU, as if it had streams and compilers; `tried` are the kernels that were recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *replays_us: float, fails: str = "") -> None:
        self.tried: list[str] = []
        self._fails = fails
        self._times = iter([100.0, *replays_us])  # eager is timed first
        monkeypatch.setattr(measure, "time_us", lambda *_, before=lambda: None, **__: before() or next(self._times))
        monkeypatch.setattr(ForwardTarget, "further", lambda *_: [ALONE])
        monkeypatch.setattr(ForwardTarget, "task_times_us", lambda *given: (10.0,) * len(given[3].program.tasks))
        monkeypatch.setattr(targets, "record_source", self._recorded)

    def run(self, module: nn.Module, inputs: dict[str, torch.Tensor], **options: Any) -> dict[str, str]:
        """The reasons of all candidates by name."""
        built = build_best(module.eval(), inputs, "key", BuildOptions(eager="reference", **options), CPU)
        built.close()
        assert built.failure is None
        return {row.name: row.reason for row in built.schedule.candidates}

    def _recorded(self, module: nn.Module, source: Source, *args: Any, **kwargs: Any) -> Recording:
        self.tried.append(source.kernels)
        if source.kernels == self._fails:
            raise EngineError("no room")
        return record_source(module, AS_GIVEN, *args, **kwargs)


@pytest.mark.parametrize(
    ("four_us", "replays_us", "tried", "left_out"),
    [
        (30.0, [20.0, 18.0], ["eager", "epilogues"], False),
        (40.0, [20.0, 9.0], ["eager", "crowded", "epilogues"], False),
        (40.0, [29.0, 28.0], ["eager", "crowded"], True),
    ],
)
@pytest.mark.usefixtures("has_streams")
def test_kernels_are_compiled_both_ways_only_where_each_may_be_better(
    monkeypatch: pytest.MonkeyPatch, four_us: float, replays_us: list[float], tried: list[str], left_out: bool
) -> None:
    """Eager's kernels on four streams decide how ours are chosen first, and how long the best plan takes whether the
    other way is tried. The critical path takes 20 us.
    """
    search = sys.modules["nimble_jobs.planner.search.search"]
    monkeypatch.setattr(search, "may_have_streams", lambda *_: True)
    monkeypatch.setattr(search, "plans_with_streams", lambda one, *_: ([four_of(one)], None))
    monkeypatch.setattr(search, "_HOPELESS", 0.0)
    searched = Searched(monkeypatch, 50.0, four_us, *replays_us, *[19.0] * 4)
    rows = searched.run(Branches(4), {"x": torch.zeros(2)})
    assert searched.tried == tried
    assert (ALONE.name in rows) == left_out
    full = f"eager kernels take {four_us:.0f} us on 4 streams, 2.0 times their critical path"
    took = f"{BESIDE.name}, 4 streams takes 28 us, 1.4 times its critical path"
    assert not left_out or rows[ALONE.name] == f"not tried: {full}, and {took}"


@pytest.mark.usefixtures("has_streams")
def test_where_kernels_for_a_full_device_fail_those_chosen_alone_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """To choose them takes more memory. A row says why they are not among the candidates."""
    searched = Searched(monkeypatch, 50.0, 40.0, 20.0, fails="crowded")
    rows = searched.run(Branches(4), {"x": torch.zeros(2)})
    assert searched.tried == ["eager", "crowded", "epilogues"]
    assert rows[BESIDE.name] == "not built: no room"
    assert f"{ALONE.name}, 1 stream" in rows


@pytest.mark.usefixtures("has_streams")
def test_a_search_without_time_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = Searched(monkeypatch, 50.0)
    rows = searched.run(Branches(4), {"x": torch.zeros(2)}, budget_s=0)
    assert searched.tried == ["eager"]
    assert set(rows) == {"eager", "eager kernels, 1 stream", ALONE.name}
    assert rows[ALONE.name] == "not tried: the budget of 0 s was used up"


@pytest.mark.usefixtures("has_streams")
def test_kernels_that_disagree_with_eager_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes on with the next source."""
    checks = iter([(1.0, "differs"), (0.0, None)])
    monkeypatch.setattr(Search, "_checked", lambda *_, **__: next(checks))
    monkeypatch.setattr(ForwardTarget, "compare", lambda *_, **__: 0.0)
    searched = Searched(monkeypatch, 50.0, 20.0)
    searched.run(Branches(4), {"x": torch.zeros(2)})
    assert searched.tried == ["eager", "epilogues"]


class Counting(Branches):
    """Counts its calls, and reads a table at that number."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("table", torch.ones(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x + self.table[self.calls])


@pytest.mark.usefixtures("has_streams")
def test_a_look_leaves_a_models_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its replays begins with the same state. A model that counts would else read beyond its table."""
    looked: list[int] = []
    real = ForwardTarget.alone_us

    def alone_us(*args: Any) -> float:
        us = real(*args)
        looked.append(int(module.calls))
        return us

    module = Counting()
    monkeypatch.setattr(ForwardTarget, "alone_us", alone_us)
    monkeypatch.setattr(ForwardTarget, "further", lambda *_: [ALONE])
    monkeypatch.setattr(ForwardTarget, "task_times_us", lambda *given: (0.1,) * len(given[3].program.tasks))
    monkeypatch.setattr(targets, "record_source", lambda m, _, *args, **kw: record_source(m, AS_GIVEN, *args, **kw))
    build_best(module.eval(), {"x": torch.zeros(2)}, "key", BuildOptions(eager="reference"), CPU).close()
    assert looked == [0]
    assert int(module.calls) == 0


def test_what_is_switched_off_is_not_chosen_beside_others() -> None:
    """Not even if the best plan fills the device."""
    off = replace(ALONE, without=frozenset({Kernel.CROWDED}))
    best = on_streams(timed_at(10.0)(replace(eager_kernels(), source=off)), 4)
    assert best.crowded
    assert crowd_of(target_with()).other([off], best) is None
    assert crowd_of(target_with()).other([ALONE], replace(best, source=ALONE)) == BESIDE
