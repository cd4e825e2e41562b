"""Whether the device will be full, and so which of our kernels are tried: chosen alone, beside others, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs.engine import measure
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.errors import EngineError
from nimble_jobs.kernel_switches import NOTHING, Kernel
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
from nimble_jobs.planner.sources.source import AS_GIVEN, Source, record_source
from nimble_jobs.schedule import Candidate

CPU = torch.device("cpu")
ALONE = Source(kernels="epilogues", layout="given")
BESIDE = replace(ALONE, kernels="crowded")
EAGER = replace(ALONE, kernels="eager")
FULL = "eager kernels take 34 us on 4 streams, 2.0 times their critical path"


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


def eager_kernels(branches: int = 4, *, times_us: float | None = 10.0, replay_us: float = 100.0) -> MeasuredCandidate:
    """Eager's kernels on one stream, with the time of each task alone unless it is None."""
    recording = record_source(Branches(branches), AS_GIVEN, {"x": torch.zeros(2)}, CPU)
    planned = plan_on_one_stream(recording)
    if times_us is not None:
        times = (times_us,) * len(recording.program.tasks)
        planned = replace(planned, facts=planned.analysis.single_stream(times)[1], durations_us=times)
    row = measured_row("eager kernels, 1 stream", replay_us, 1, 0, error=None, reason="", streams=1)
    return MeasuredCandidate(row=row, source=AS_GIVEN, programs={Role.FORWARD: planned}, error=None)


def crowd_of(target: Any, rows: list[Candidate] | None = None, **options: Any) -> Crowd:
    return Crowd(target, BuildOptions(**options), clock=Clock(), rows=[] if rows is None else rows)


def target_with(replay: Callable[[], object] = lambda: None, *, captures_take_long: bool = False) -> Any:
    """A target whose captures are `replay`; notes the streams of each plan."""
    streams: list[int] = []

    @contextmanager
    def alone(_: Source, role: Role, recording: Recording, plan: Any) -> Iterator[Callable[[], object]]:
        assert role is Role.FORWARD
        assert recording.program.tasks
        streams.append(plan.streams)
        yield replay

    return SimpleNamespace(device=CPU, alone=alone, captures_take_long=captures_take_long, streams=streams)


@pytest.mark.parametrize(
    ("branches", "sources", "options", "expected"),
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
def test_only_what_could_matter_is_looked_at(
    branches: int, sources: list[Source], options: dict[str, Any], expected: bool
) -> None:
    """To time each task takes seconds."""
    first = eager_kernels(branches, times_us=None)
    assert crowd_of(target_with(), **options).may_fill(first, sources) == expected


@pytest.mark.usefixtures("has_streams")
def test_a_step_is_not_looked_at() -> None:
    """Its captures take long, and several programs have no critical path in common."""
    first = eager_kernels()
    assert not crowd_of(target_with(captures_take_long=True)).may_fill(first, [ALONE])
    several = replace(first, programs=dict.fromkeys((Role.FORWARD, Role.BACKWARD), first.only))
    assert not crowd_of(target_with()).may_fill(several, [ALONE])


@pytest.mark.parametrize(("four_us", "full"), [(34.1, True), (33.9, False)])
def test_the_device_is_full_if_eagers_kernels_take_long_on_few_streams(
    monkeypatch: pytest.MonkeyPatch, four_us: float, full: bool
) -> None:
    """1.7 times the critical path, which has two tasks of 10 us."""
    monkeypatch.setattr(measure, "time_us", lambda *_, **__: four_us)
    first = eager_kernels()
    target, rows = target_with(), list[Candidate]()
    crowd = crowd_of(target, rows)
    assert crowd.ordered([EAGER, ALONE], first) == [EAGER, BESIDE if full else ALONE]
    assert target.streams == [4]
    best = replace(first, source=BESIDE)
    assert crowd.other([EAGER, BESIDE], best) is None
    assert [row.reason for row in rows] == [
        "not tried: eager kernels take 34 us on 4 streams, 1.7 times their critical path, and eager kernels, 1 stream "
        "takes 100 us, 5.0 times its critical path"
    ] * full


@pytest.mark.parametrize(
    ("branches", "times_us", "replay_us"), [(4, 10.0, 33.0), (4, None, 100.0), (3, 10.0, 100.0), (4, 0.0, 100.0)]
)
def test_nothing_is_captured_where_the_answer_is_known(branches: int, times_us: float | None, replay_us: float) -> None:
    """One stream is fast enough already, no task was timed, or there is too little to run side by side."""
    first = eager_kernels(branches, times_us=times_us, replay_us=replay_us)
    target = target_with()
    assert crowd_of(target).ordered([ALONE], first) == [ALONE]
    assert target.streams == []


def test_a_look_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes on as if nobody had looked."""

    def fails(*_: Any, **__: Any) -> float:
        raise EngineError("no capture")

    monkeypatch.setattr(measure, "time_us", fails)
    first = eager_kernels()
    rows: list[Candidate] = []
    assert crowd_of(target_with(), rows).ordered([ALONE], first) == [ALONE]
    assert [(row.name, row.reason) for row in rows] == [("eager kernels, 4 streams", "not built: no capture")]


@pytest.mark.parametrize(
    ("full", "over_path", "tried", "left_out"),
    [
        (None, 1.4, ["eager", "epilogues"], False),
        (None, 1.6, ["eager", "epilogues", "crowded"], False),
        (FULL, 1.4, ["eager", "crowded"], True),
        (FULL, 1.3, ["eager", "crowded", "epilogues"], False),
    ],
)
def test_kernels_are_compiled_both_ways_only_where_each_may_be_better(
    monkeypatch: pytest.MonkeyPatch, full: str | None, over_path: float, tried: list[str], left_out: bool
) -> None:
    """A whole search: what its first look says decides how kernels are chosen first, and how long the best plan takes
    whether the other way is tried.
    """
    found: list[str] = []

    def recorded(module: nn.Module, source: Source, *args: Any, **kwargs: Any) -> Recording:
        found.append(source.kernels)
        return record_source(module, AS_GIVEN, *args, **kwargs)

    times = iter([100.0, 50.0, 10.0, 9.0, 8.0])
    monkeypatch.setattr(measure, "time_us", lambda *_, **__: next(times))
    monkeypatch.setattr(ForwardTarget, "further", lambda *_: [ALONE])
    monkeypatch.setattr(targets, "record_source", recorded)
    monkeypatch.setattr(Crowd, "may_fill", lambda *_: True)
    monkeypatch.setattr(Crowd, "_filled", lambda *_: full)
    monkeypatch.setattr(MeasuredCandidate, "over_path", over_path)
    monkeypatch.setattr("nimble_jobs.planner.search.candidate.CROWDED_STREAMS", 1)
    inputs = {"x": torch.zeros(2)}
    built = build_best(Branches(4), inputs, "key", BuildOptions(streams=1, eager="reference"), CPU)
    built.close()
    assert found == tried
    rows = {row.name: row.reason for row in built.schedule.candidates}
    assert (ALONE.name in rows) == left_out
    name = f"{BESIDE.name}, 1 stream"
    assert not left_out or rows[ALONE.name] == (
        f"not tried: {FULL}, and {name} takes 10 us, 1.4 times its critical path"
    )


def test_what_is_switched_off_is_not_chosen_beside_others() -> None:
    first = eager_kernels()
    off = replace(ALONE, without=frozenset({Kernel.CROWDED}))
    assert off.without != NOTHING
    crowd = crowd_of(target_with())
    assert crowd.ordered([off], first) == [off]
    assert crowd.other([off], first) is None
