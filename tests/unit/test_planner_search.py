"""The search for a schedule: what it tries, what it leaves out and says why, and where its time goes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.errors import CannotRecord, CheckFailed, DeviceFault, EngineError, OutOfMemory
from nimble_jobs.kernel_switches import NOTHING, Kernel, Without
from nimble_jobs.kernels import choices
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.planner.forward import target as targets
from nimble_jobs.planner.forward.build import Built, build_best, build_schedule
from nimble_jobs.planner.forward.target import ForwardTarget
from nimble_jobs.planner.keys.options import BuildOptions, options_of
from nimble_jobs.planner.keys.request import Request
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.lookup.siblings import Precedent
from nimble_jobs.planner.search import candidate as candidates
from nimble_jobs.planner.search.candidate import MeasuredCandidate, measured_row
from nimble_jobs.planner.search.plans import far_behind
from nimble_jobs.planner.search.search import Search
from nimble_jobs.planner.search.target import Captured
from nimble_jobs.planner.sources.source import AS_GIVEN, Source, record_source
from nimble_jobs.schedule import Candidate, Schedule
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.task_times import TaskChoice, TaskTimes

CPU = torch.device("cpu")
LAST = Source(kernels="eager", layout="channels-last")
FOLDED = Source(kernels="eager", layout="given", folded=(("conv", "bn"),))


class Images(nn.Module):
    """A convolution and its normalisation; kinds that lean on their layout or on the normalisation's attributes."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.beside: Any = threading.Lock() if kind == "locked" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x))
        if self.kind == "views":
            return x.view(len(x), -1)
        return x * self.bn.eps if self.kind == "reads" else x


class Twice(Images):
    """Something for two streams."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu() + x[:, :, 2:, 2:].tanh().sum(dim=1, keepdim=True)


def with_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a search try plans with two streams, as on a GPU."""
    module = sys.modules["nimble_jobs.planner.search.search"]
    monkeypatch.setattr(module, "may_have_streams", lambda *_: True)
    monkeypatch.setattr(module, "_HOPELESS", 0.0)
    monkeypatch.setattr(module, "plans_with_streams", lambda one, *_: ([one.analysis.plan(max_streams=2)], None))


def measured_as(monkeypatch: pytest.MonkeyPatch, mib: Sequence[int], replay_us: Sequence[float]) -> None:
    """Have the candidates of a search, one after the other, need so much memory and take so long."""
    module = sys.modules["nimble_jobs.planner.forward.target"]
    real, sizes, times = module.capture_several, iter(mib), iter([10.0, *replay_us])  # eager is timed first

    def sized(*args: Any) -> Any:
        instances = real(*args)
        instances[0].bytes = next(sizes, 1) << 20  # the winner is captured again
        return instances

    monkeypatch.setattr(module, "capture_several", sized)
    monkeypatch.setattr(measure, "time_us", lambda *_, **__: next(times))


def searched(module: nn.Module, monkeypatch: pytest.MonkeyPatch, *further: Source, **options: Any) -> Built:
    """The search on the CPU, where only the first source is tried, with further ones."""
    monkeypatch.setattr(ForwardTarget, "further", lambda *_: list(further))
    images = torch.zeros(2, 3, 8, 8)
    return build_best(module.eval(), {"x": images}, "key", BuildOptions(**options), CPU)


def row(built: Built, name: str) -> Candidate:
    return next(c for c in built.schedule.candidates if c.name == name)


def test_a_search_tells_what_it_begins_and_where_its_time_went() -> None:
    """Each source and candidate by name, in order; the stages are within the whole, and come back from the text."""
    begun: list[str] = []
    built = build_best(nn.Linear(3, 2).eval(), {"x": torch.zeros(2, 3)}, "key", BuildOptions(), CPU, say=begun.append)
    assert begun == ["eager kernels", "eager kernels, 1 stream"]
    schedule = built.schedule
    assert [name for name, _ in schedule.stages] == ["record", "plan", "capture", "check", "measure"]
    assert all(seconds > 0 for _, seconds in schedule.stages)
    assert sum(seconds for _, seconds in schedule.stages) <= schedule.build_s
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("views", LAST, "not built: RuntimeError: view size is not compatible"),
        ("reads", FOLDED, "not built: AttributeError: 'Identity' object has no attribute 'eps'"),
        ("locked", FOLDED, "not built: TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_what_only_a_further_source_raises_leaves_that_source_out(
    monkeypatch: pytest.MonkeyPatch, kind: str, source: Source, reason: str
) -> None:
    """The first candidate works, so the model has a schedule, and the table says why the other is not in it."""
    built = searched(Images(kind), monkeypatch, source)
    assert built.failure is None
    assert row(built, "eager kernels, 1 stream").chosen
    assert row(built, source.name).reason.startswith(reason)


@pytest.mark.parametrize("fails", ["record", "check"])
def test_choices_of_a_source_that_fails_are_doubted(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """They are measured anew; those of a source that works are kept, and its schedule names them."""
    times = TaskTimes(task="a product", times_us=(("library", 2.0), ("ours", 1.0)), chosen="ours")
    record = ForwardTarget.record

    def choosing(target: ForwardTarget, source: Source) -> Iterator[tuple[Role, Recording]]:
        choices.current().choose({"of": source.name}, ("library", "ours"), lambda: times)
        if fails == "record" and source == LAST:
            raise ValueError("no")
        yield from record(target, source)

    def check(search: Search, captured: Captured, *, required: bool) -> tuple[float | None, str | None]:
        return (0.0, None) if required or fails != "check" else (1.0, "differs")

    monkeypatch.setattr(ForwardTarget, "record", choosing)
    monkeypatch.setattr(Search, "_checked", check)
    with using(Choices()) as made:
        built = searched(Images(), monkeypatch, LAST)
    assert [parts["of"] for parts, _ in made.measured.values()] == ["eager kernels"]
    assert built.schedule.choices == (TaskChoice(times=times, tasks=1),)
    assert Schedule.from_json(built.schedule.to_json()) == built.schedule


@pytest.mark.parametrize("error", [OutOfMemory("full"), torch.OutOfMemoryError("full"), ValueError("no")])
def test_what_fails_while_it_is_timed_is_left_out_too(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Only the first source may fail the search."""
    real, calls = measure.time_us, 0

    def second_fails(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:  # eager is timed first
            raise error
        return real(*args, **named)

    monkeypatch.setattr(measure, "time_us", second_fails)
    built = searched(Images(), monkeypatch, LAST)
    reasons = [c.reason for c in built.schedule.candidates if c.name.startswith(LAST.name)]
    no_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    assert reasons == ["not built: not enough memory on the device" if no_memory else "not built: ValueError: no"]
    calls = 2
    with pytest.raises(type(error) if no_memory else CannotRecord):
        searched(Images(), monkeypatch, LAST)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("full"), "not built: not enough memory on the device"),
        (ValueError("no"), "not built: ValueError: no"),
    ],
)
def test_a_candidate_whose_tasks_cannot_be_timed_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """Drawings and bounds lack the times, and a row says why; plans with several streams, which need them, are not
    tried.
    """

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    with_two_streams(monkeypatch)
    monkeypatch.setattr(measure, "task_times_us", fails)
    built = searched(Twice(), monkeypatch, eager="reference")
    assert row(built, "eager kernels, 1 stream").chosen
    (alone,) = [c for c in built.schedule.candidates if c.name == "eager kernels, 1 stream, each task alone"]
    assert alone.reason == reason
    assert built.schedule.durations_us == ()
    assert built.failure is None
    assert not any("2 streams" in c.name for c in built.schedule.candidates)
    assert Schedule.from_json(built.schedule.to_json()) == built.schedule


def test_no_tasks_are_timed_for_streams_that_there_is_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of what is kept; the row says that time is up."""
    timed: list[int] = []
    real, sources = measure.task_times_us, Search._sources

    def late(search: Search, **named: Any) -> Any:
        found = sources(search, **named)
        search._deadline = 0.0
        return found

    monkeypatch.setattr(measure, "task_times_us", lambda *a, **k: (timed.append(1), real(*a, **k))[1])
    monkeypatch.setattr(Search, "_sources", late)
    with_two_streams(monkeypatch)
    measured_as(monkeypatch, [1] * 8, [10.0, 11.0])
    built = searched(Twice(), monkeypatch, LAST, eager="reference")
    assert len(timed) == 1
    assert row(built, "eager kernels, several streams").reason == "not tried: the budget of 900 s was used up"


def test_eager_kernels_are_tried_unfolded_if_folded_ones_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: on a CPU they were tried before."""
    folded = replace(LAST, folded=FOLDED.folded)
    for sources in ([folded], [LAST, folded]):
        rows = [c.name for c in searched(Images("reads"), monkeypatch, *sources).schedule.candidates]
        assert rows.count("eager kernels, channels-last, 1 stream") == 1
        assert rows.count("eager kernels, channels-last, folded") == 1


def test_only_what_streams_need_and_what_is_kept_is_timed_task_by_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without streams that is the winner, whichever source it is of; else all that are not far behind."""
    timed: list[int] = []
    real = measure.task_times_us
    monkeypatch.setattr(measure, "task_times_us", lambda *a, **k: (timed.append(1), real(*a, **k))[1])
    measured_as(monkeypatch, [1] * 8, [10.0, 9.0])
    built = searched(Images(), monkeypatch, LAST, eager="reference")
    assert row(built, "eager kernels, channels-last, 1 stream").chosen
    assert len(timed) == 1
    assert len(built.schedule.durations_us) == len(built.schedule.program.tasks)
    assert built.schedule.facts.critical_path_us is not None
    with_two_streams(monkeypatch)
    for second_us, times in ((14.0, 2), (16.0, 1)):
        timed.clear()
        measured_as(monkeypatch, [1] * 8, [10.0, second_us, 9.9, 9.9, 9.9])
        searched(Twice(), monkeypatch, LAST, eager="reference")
        assert len(timed) == times


def test_a_lost_device_is_no_reason_to_try_another_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is raised, also where it shows only when the device is asked."""
    with pytest.raises(DeviceFault, match="gone"):
        candidates.failed("a", DeviceFault("gone"), CPU)

    def broken(_device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert candidates.failed("a", EngineError("no"), CPU).reason == "not built: no"
    assert candidates.failed("a", CheckFailed("differs", error=0.5), CPU).error == 0.5
    monkeypatch.setattr(candidates, "synchronize", broken)
    with pytest.raises(DeviceFault, match="a: KeyError: 'x'; the device no longer responds: CUDA error"):
        candidates.failed("a", KeyError("x"), CPU)


def test_memory_is_planned_before_tasks_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing takes the memory of a whole replay, so what is too large is refused before."""
    monkeypatch.setattr(measure, "task_times_us", lambda *_: pytest.fail("timed beyond the limit"))
    with pytest.raises(OutOfMemory, match="eager kernels, 1 stream: its memory plan needs"):
        searched(Images(), monkeypatch, memory_bytes=10)


def test_what_measures_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first candidate, too: libraries may take more than was planned."""
    module, limit = sys.modules["nimble_jobs.planner.forward.target"], 10**6
    real, sizes = module.capture_several, iter([1000, 10 * limit])

    def larger(*args: Any) -> Any:
        instances = real(*args)
        instances[0].bytes = next(sizes, 1000)  # the winner is captured again
        return instances

    monkeypatch.setattr(module, "capture_several", larger)
    built = searched(Images(), monkeypatch, LAST, memory_bytes=limit)
    needs = f"needs {10 * limit} bytes, more than the {limit} that it may use"
    assert row(built, "eager kernels, channels-last, 1 stream").reason == needs
    assert row(built, "eager kernels, 1 stream").chosen
    sizes = iter([10 * limit])
    with pytest.raises(OutOfMemory, match=f"eager kernels, 1 stream: {needs}"):
        searched(Images(), monkeypatch, LAST, memory_bytes=limit)


@pytest.mark.parametrize(("given", "used"), [(None, 900.0), (120.0, 120.0)])
def test_the_budget_of_a_spec_bounds_the_search(
    given: float | None, used: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`schedule.budget` in seconds; 15 minutes where the spec gives none."""
    seen: list[BuildOptions] = []
    monkeypatch.setattr(
        sys.modules["nimble_jobs.planner.forward.build"], "build_best", lambda *args, **_: seen.append(args[3])
    )
    request = Request(
        model=ModelSpec(source="torchvision:resnet18"),
        shape=(3,),
        dtype="float32",
        batch_size=2,
        schedule=ScheduleSpec(budget=given),
    )
    build_schedule(nn.Linear(3, 2), request, "key", CPU)
    assert [options.budget_s for options in seen] == [used]
    assert options_of(request.schedule).budget_s == used


def test_time_is_asked_for_before_each_plan_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first candidate is always measured; the others' rows say that the budget was used up."""
    with_two_streams(monkeypatch)
    spent = searched(Twice(), monkeypatch, LAST, budget_s=0.0)
    several = row(spent, "eager kernels, several streams")
    assert (several.reason, several.streams) == ("not tried: the budget of 0 s was used up", None)
    assert row(spent, LAST.name).reason == several.reason
    assert [c.streams for c in spent.schedule.candidates] == [None, 1, None, None]
    assert Schedule.from_json(spent.schedule.to_json()) == spent.schedule
    assert row(searched(Twice(), monkeypatch), "eager kernels, 2 streams").replay_us is not None
    real = Search.timed

    def slowly(search: Search, one: MeasuredCandidate) -> MeasuredCandidate:
        found = real(search, one)
        search._deadline = 0.0
        return found

    monkeypatch.setattr(Search, "timed", slowly)
    two = row(searched(Twice(), monkeypatch, budget_s=7.0), "eager kernels, 2 streams")
    assert (two.reason, two.streams) == ("not tried: the budget of 7 s was used up", 2)


def test_replays_are_timed_over_inputs_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four random ones at least, each given before the clock starts and not while it runs."""
    real, seen, timing = measure._sample, set(), False

    def sampled(call: Any, device: torch.device, calls: int) -> float:
        nonlocal timing
        timing = True
        took = real(call, device, 1)
        timing = False
        return took

    class Watched(targets.Samples):
        def fill(self, instance: Instance) -> None:
            assert not timing
            super().fill(instance)
            seen.add(float(instance.inputs["x"].sum()))

    monkeypatch.setattr(measure, "_sample", sampled)
    monkeypatch.setattr(measure, "BUDGET_S", 60.0)  # for several samples on the busiest cores
    monkeypatch.setattr(sys.modules["nimble_jobs.planner.forward.target"], "Samples", Watched)
    searched(Images(), monkeypatch)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("replay_us", "mib", "chosen", "reason"),
    [
        (90.0, 40, True, ""),
        (99.0, 40, False, "within the noise of eager kernels, 1 stream"),
        (101.0, 40, False, "slower than eager kernels, 1 stream"),
        (99.0, 41, False, "within the noise of eager kernels, 1 stream"),
        (89.0, 80, True, ""),
        (87.0, 160, False, "faster than eager kernels, 1 stream, but not by enough to justify its memory"),
        (79.0, 160, True, ""),
    ],
)
def test_memory_counts_in_the_choice(
    monkeypatch: pytest.MonkeyPatch, replay_us: float, mib: int, chosen: bool, reason: str
) -> None:
    """Two streams against 100 us in 40 of 800 MiB: what takes a fifth of them must save 16 % more time than what takes
    a twentieth, and 2 % for noise."""
    measured_as(monkeypatch, [40, mib], [100.0, replay_us])
    with_two_streams(monkeypatch)
    two = row(searched(Twice(), monkeypatch, memory_bytes=800 << 20), "eager kernels, 2 streams")
    assert two.chosen == chosen
    assert two.reason == reason or chosen


def test_where_memory_is_no_question_time_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, on the CPU, time alone counts."""
    measured_as(monkeypatch, [1, 3000], [100.0, 99.0])
    assert row(searched(Images(), monkeypatch, LAST), "eager kernels, channels-last, 1 stream").chosen


def test_sources_are_compared_by_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster one that needs much more than the first is not chosen, and says why."""
    measured_as(monkeypatch, [40, 160], [100.0, 92.0])
    built = searched(Images(), monkeypatch, LAST, memory_bytes=800 << 20)
    assert row(built, "eager kernels, 1 stream").reason.startswith("the least time for its memory")
    reason = "faster than eager kernels, 1 stream, but not by enough to justify its memory"
    assert row(built, "eager kernels, channels-last, 1 stream").reason == reason


def test_kernels_chosen_for_a_full_device_may_be_slow_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what several streams are for."""
    real = record_source

    def recorded(module: nn.Module, source: Source, *args: Any, **kwargs: Any) -> Recording:
        return real(module, Source(kernels="eager", layout="given"), *args, **kwargs)

    with_two_streams(monkeypatch)
    monkeypatch.setattr(targets, "record_source", recorded)
    monkeypatch.setattr(MeasuredCandidate, "crowded", True)
    measured_as(monkeypatch, [1] * 8, [9.0, 8.0, 7.0, 6.0, 99.0, 1.0])
    built = searched(Twice(), monkeypatch, Source(kernels="epilogues", layout="given"), eager="reference")
    assert row(built, "inductor kernels and ours, chosen side by side, 1 stream").replay_us == 99.0
    assert row(built, "inductor kernels and ours, chosen side by side, 2 streams").chosen


@pytest.mark.parametrize(("second_us", "tried"), [(14.9, True), (15.1, False)])
def test_a_source_far_behind_on_one_stream_is_not_tried_on_several(
    monkeypatch: pytest.MonkeyPatch, second_us: float, tried: bool
) -> None:
    """Streams do not make up for half as long again; the table says so."""
    with_two_streams(monkeypatch)
    measured_as(monkeypatch, [1] * 8, [10.0, second_us, 9.0, 8.0])
    built = searched(Twice(), monkeypatch, LAST, eager="reference")
    rows = {c.name: c for c in built.schedule.candidates}
    assert rows["eager kernels, 2 streams"].replay_us == 9.0
    assert ("eager kernels, channels-last, 2 streams" in rows) == tried
    reason = "not tried: one stream takes 15 us, and eager kernels, 1 stream 10 us"
    assert tried or rows["eager kernels, channels-last, several streams"].reason == reason


def test_sums_over_devices_have_a_stream_of_their_own() -> None:
    """Then no candidate of a training step has one stream only."""
    first, second = (
        MeasuredCandidate(
            row=measured_row("eager kernels", us, 1, 0, error=None, reason="", streams=2),
            source=AS_GIVEN,
            programs={},
            error=None,
        )
        for us in (10.0, 16.0)
    )
    assert far_behind(first, [first, second]) is None
    assert far_behind(second, [first, second]) == "one stream takes 16 us, and eager kernels 10 us"


@pytest.mark.parametrize(("given_us", "tried"), [(24.9, True), (25.1, False)])
def test_eager_kernels_far_behind_compiled_ones_are_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, given_us: float, tried: bool
) -> None:
    """Neither in another layout nor over folded weights, which gain less; the table says so."""
    ours = Source(kernels="epilogues", layout="given")
    real = record_source

    def recorded(module: nn.Module, source: Source, *args: Any, **kwargs: Any) -> Recording:
        return real(module, replace(source, kernels="eager"), *args, **kwargs)

    monkeypatch.setattr(targets, "record_source", recorded)
    measured_as(monkeypatch, [1] * 8, [given_us, 10.0, 11.0, 12.0])
    rows = {c.name: c for c in searched(Images(), monkeypatch, ours, FOLDED, LAST).schedule.candidates}
    for name in ("eager kernels, folded", "eager kernels, channels-last"):
        if tried:
            assert f"{name}, 1 stream" in rows
        else:
            assert rows[name].reason == (
                "not tried: eager kernels, 1 stream takes 25 us, and inductor kernels and ours, 1 stream 10 us"
            )


def test_what_we_add_to_a_compilers_kernels_costs_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a source with our additions fails, and the compiler's own kernels were not tried, they are; else not again."""
    ours, plain = (Source(kernels=kernels, layout="given") for kernels in ("epilogues", "inductor"))
    tried: list[str] = []
    real = record_source

    def recorded(module: nn.Module, source: Source, *args: Any, **kwargs: Any) -> Recording:
        tried.append(source.kernels)
        if source.kernels == "epilogues":
            raise CannotRecord("no")
        return real(module, Source(kernels="eager", layout="given"), *args, **kwargs)

    monkeypatch.setattr(targets, "record_source", recorded)
    searched(Images(), monkeypatch, ours)
    assert tried == ["eager", "epilogues", "inductor"]
    tried.clear()
    folded = replace(ours, folded=FOLDED.folded)
    rows = [c.name for c in searched(Images(), monkeypatch, folded).schedule.candidates]
    assert tried == ["eager", "epilogues", "epilogues", "inductor"]
    assert rows[2:4] == ["inductor kernels and ours, folded", "inductor kernels and ours"], "both failed"
    assert "inductor kernels, folded, 1 stream" in rows
    tried.clear()
    searched(Images(), monkeypatch, plain, ours)
    assert tried == ["eager", "inductor", "epilogues"]


@pytest.mark.parametrize(
    ("full", "without", "tried"),
    [
        (True, NOTHING, ["eager", "inductor", "epilogues", "crowded"]),
        (True, frozenset({Kernel.CROWDED}), ["eager", "inductor", "epilogues"]),
        (False, NOTHING, ["eager", "inductor", "epilogues"]),
    ],
)
def test_kernels_are_chosen_for_a_full_device_where_the_best_plan_fills_it(
    monkeypatch: pytest.MonkeyPatch, full: bool, without: Without, tried: list[str]
) -> None:
    """They come last, on one stream and on several, and win if they are faster."""
    found: list[Source] = []
    real = record_source

    def recorded(module: nn.Module, source: Source, *args: Any, **kwargs: Any) -> Recording:
        found.append(source)
        return real(module, Source(kernels="eager", layout="given"), *args, **kwargs)

    with_two_streams(monkeypatch)
    monkeypatch.setattr(targets, "record_source", recorded)
    monkeypatch.setattr(MeasuredCandidate, "crowded", full)
    measured_as(monkeypatch, [1] * 8, [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    sources = [Source(kernels=each, layout="given", without=without) for each in ("inductor", "epilogues")]
    built = searched(Twice(), monkeypatch, *sources, eager="reference")
    assert [source.kernels for source in found] == tried
    chosen = next(c.name for c in built.schedule.candidates if c.chosen)
    name = "inductor kernels and ours, chosen side by side, 2 streams"
    assert (chosen == name, built.schedule.kernels == "crowded") == ("crowded" in tried,) * 2
    assert Schedule.from_json(built.schedule.to_json()) == built.schedule


@pytest.mark.parametrize(
    ("streams", "path_us", "crowded"), [(8, 60.0, True), (4, 66.0, True), (3, 60.0, False), (8, 67.0, False)]
)
def test_a_device_is_full_if_many_streams_take_much_longer_than_the_critical_path(
    monkeypatch: pytest.MonkeyPatch, streams: int, path_us: float, crowded: bool
) -> None:
    found: list[MeasuredCandidate] = []
    real = Search._ranked

    def ranked(search: Search, measured: MeasuredCandidate, single: MeasuredCandidate | None) -> MeasuredCandidate:
        found.append(real(search, measured, single))
        return found[-1]

    monkeypatch.setattr(Search, "_ranked", ranked)
    searched(Images(), monkeypatch)
    ((role, planned),) = found[0].programs.items()
    facts, row = (
        replace(planned.facts, streams=streams, critical_path_us=path_us),
        replace(found[0].row, replay_us=100.0),
    )
    assert replace(found[0], row=row, programs={role: replace(planned, facts=facts)}).crowded == crowded


def test_packed_weights_are_tried_without_folding_if_folded_ones_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folded weights may not fit a narrow type; here the model asks for what folding takes away."""
    source = Source(kernels="onednn", layout="given", folded=FOLDED.folded)
    built = searched(Images("reads"), monkeypatch, source)
    assert row(built, source.name).replay_us is None
    assert row(built, "oneDNN kernels over packed weights, 1 stream").replay_us is not None


def test_a_cpu_has_layouts_and_folding_to_choose_from() -> None:
    """No streams, no compilers; whatever is chosen agrees with eager."""
    torch.manual_seed(0)
    module, x = Images().eval(), torch.randn(2, 3, 8, 8)
    expected = module(x).detach()
    built = build_best(module, {"x": x}, "key", BuildOptions(fold=True, streams=1), CPU)
    names = [c.name for c in built.schedule.candidates if c.replay_us is not None]
    kernels = "eager kernels"
    assert names == [
        "eager",
        f"{kernels}, 1 stream",
        f"{kernels}, channels-last, 1 stream",
        f"{kernels}, channels-last, folded, 1 stream",
        "oneDNN kernels over packed weights, channels-last, folded, 1 stream",
    ]
    built.instance.inputs["x"].copy_(x)
    built.instance.replay()
    torch.testing.assert_close(built.instance.outputs["output"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "precedent", "loads"),
    [
        ({}, None, True),
        ({"fuse": "off"}, None, False),
        ({"quick": True}, None, False),
        ({}, "eager", False),
        ({}, "epilogues", True),
    ],
)
def test_compilers_are_loaded_beside_the_first_call_if_the_search_will_want_them(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], precedent: str | None, loads: bool
) -> None:
    """They are there when the search begins, which ends them; before that, whatever ends the build does."""
    steps: list[Any] = []

    @contextmanager
    def loading(wanted: bool) -> Iterator[Callable[[], object]]:
        steps.append(wanted)
        yield lambda: steps.append("loaded")
        steps.append("left to the search")

    def run(*_: Any) -> Any:
        raise CannotRecord("enough")

    built = build_best(nn.ReLU().eval(), {"x": torch.zeros(2)}, "key", BuildOptions(), CPU)
    like = precedent and Precedent(schedule=replace(built.schedule, kernels=precedent), batch="another")
    able = replace(devices.able(CPU), compilers=True)
    monkeypatch.setattr(devices, "able", lambda _: able)
    for name, step in (("loading_compilers", loading), ("time_calls", lambda *_, **__: steps.append("timed") or 1.0)):
        monkeypatch.setattr(f"nimble_jobs.planner.forward.build.{name}", step)
    monkeypatch.setattr("nimble_jobs.planner.forward.build._Build.run", run)
    with pytest.raises(CannotRecord, match="enough"):
        build_best(nn.ReLU(), {"x": torch.zeros(2)}, "key", BuildOptions(**options), CPU, precedent=like or None)
    assert steps == [loads, "loaded", "timed", "left to the search"]
