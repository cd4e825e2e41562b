"""Which candidate to keep in flight, and how often: decided by records a second alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine import measure
from nimble_jobs.engine.bind import arena_plan
from nimble_jobs.planner.forward.calls import observe_calls
from nimble_jobs.planner.forward.target import Example, ForwardTarget
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.search.candidate import MeasuredCandidate, left_out
from nimble_jobs.planner.search.clock import Clock
from nimble_jobs.planner.search.in_flight import InFlight
from nimble_jobs.planner.search.target import PlannedProgram
from nimble_jobs.planner.sources.source import Source, Variants, record_source
from nimble_jobs.schedule import Candidate

CPU = torch.device("cpu")
GIVEN, LAST = Source(kernels="eager", layout="given"), Source(kernels="eager", layout="channels-last")


class Counts(nn.Module):
    """Writes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.seen.copy_(x.mean(dim=(0, 2, 3))) + 1


def found(module: nn.Module, source: Source, replay_us: float) -> MeasuredCandidate:
    variants = Variants(module)
    recording = record_source(variants.use(source), source, {"x": torch.zeros(1, 4, 8, 8)}, CPU)
    variants.use()
    analysis = graph.Analysis.of(recording.program)
    plan, facts = analysis.single_stream()
    candidate = replace(left_out(source.name, ""), replay_us=replay_us, records_per_s=1e6 / replay_us, peak_bytes=1000)
    return MeasuredCandidate(
        row=candidate,
        source=source,
        programs={
            Role.FORWARD: PlannedProgram(
                recording=recording,
                analysis=analysis,
                plan=plan,
                memory=arena_plan(recording.program, plan),
                facts=facts,
                durations_us=(),
                replay_us=replay_us,
            )
        },
        error=0.0,
    )


def in_flight(module: nn.Module, options: BuildOptions, rows: list[Candidate]) -> InFlight:
    example = {"x": torch.zeros(1, 4, 8, 8)}
    observed = observe_calls(module, example, CPU)
    shown = Example(inputs=example, batch=1, below=2)
    target = ForwardTarget(module, shown, options, CPU, tolerance=1e-4, observed=observed)
    return InFlight(target, options, clock=Clock(), say=lambda _: None, rows=rows)


def chosen(
    module: nn.Module,
    passed: list[MeasuredCandidate],
    rates: dict[int, list[float]],
    monkeypatch: pytest.MonkeyPatch,
    **named: Any,
) -> tuple[MeasuredCandidate, list[Candidate]]:
    """What is chosen of the candidates where so many instances give these replays a second, in turn."""
    left = {count: iter(values) for count, values in rates.items()}
    monkeypatch.setattr(measure, "throughput_per_s", lambda instances, *_a, **_k: next(left[len(instances)]))
    rows = [f.row for f in passed]
    flight = in_flight(module, BuildOptions(purpose="throughput", **named), rows)
    return flight.most_records(passed[0], passed), rows


def test_a_slower_replay_wins_where_it_gives_more_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source that comes near the fastest is tried with two in flight, and goes on where it leads."""
    module = nn.Conv2d(4, 4, 3)
    passed = [found(module, GIVEN, 10.0), found(module, LAST, 14.0)]
    best, rows = chosen(module, passed, {1: [100.0], 2: [120.0, 150.0], 4: [170.0], 8: [172.0]}, monkeypatch)
    assert (best.source, best.in_flight, best.row.records_per_s) == (LAST, 4, 170.0)
    assert [r.name.rpartition(", ")[2] for r in rows[2:]] == [f"{n} in flight" for n in (1, 2, 2, 4, 8)]
    assert best.row in rows


def test_a_source_far_behind_is_not_tried_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row says why. Where two in flight bring nothing, one is kept."""
    module = nn.Conv2d(4, 4, 3)
    passed = [found(module, GIVEN, 10.0), found(module, LAST, 16.0)]
    best, rows = chosen(module, passed, {1: [100.0], 2: [102.0]}, monkeypatch)
    assert (best.source, best.in_flight) == (GIVEN, 1)
    assert rows[1].reason == "more than 1.5 times as slow as eager kernels; not tried in flight"


def test_what_was_asked_for_is_measured_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that many; the better candidate of them."""
    module = nn.Conv2d(4, 4, 3)
    passed = [found(module, GIVEN, 10.0), found(module, LAST, 12.0)]
    best, _ = chosen(module, passed, {4: [100.0, 120.0]}, monkeypatch, in_flight=4)
    assert (best.source, best.in_flight) == (LAST, 4)


@pytest.mark.parametrize("asked", ["auto", 4])
def test_a_model_that_writes_its_own_state_never_overlaps_itself(
    monkeypatch: pytest.MonkeyPatch, asked: int | str
) -> None:
    """All instances share the state, so one replay would read what another writes."""
    module = Counts()
    best, rows = chosen(module, [found(module, GIVEN, 10.0)], {1: [100.0]}, monkeypatch, in_flight=asked)
    assert best.in_flight == 1
    count = 2 if asked == "auto" else 4
    assert (rows[-1].name, rows[-1].reason) == (
        f"eager kernels, {count} in flight",
        "not tried: the model writes its own tensor 'seen'",
    )


def test_instances_that_cannot_be_timed_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate is left out; its memory is free for the next one."""
    module = nn.Conv2d(4, 4, 3)
    seen: list[Any] = []

    def fails(instances: Any, *_a: Any, **_k: Any) -> float:
        seen.extend(instances)
        raise RuntimeError("no\nway")

    passed = [found(module, GIVEN, 10.0)]
    flight = in_flight(module, BuildOptions(purpose="throughput", in_flight=2), rows := [])
    monkeypatch.setattr(measure, "throughput_per_s", fails)
    assert flight.most_records(passed[0], passed) is passed[0]
    assert len(seen) == 2
    assert all(not i.inputs for i in seen)
    assert rows[0].reason == "not built: RuntimeError: no"
