"""The one search: build candidates for a target, check each against eager, measure it on the device, keep the best.

Sources (kernels and layout) are tried in turn on one stream; then several streams, for the fastest source first, and
then for those whose bounds leave them a chance; last, kernels that are chosen in another way (`crowd`), if that may
pay. A candidate that fails is a row in the table of candidates and ends nothing, except the first one: eager kernels on
one stream must work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from nimble_jobs.engine import device
from nimble_jobs.engine.private.compilers import compiling
from nimble_jobs.engine.private.runtime import tested_version
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.errors import CheckFailed, OutOfMemory
from nimble_jobs.kernels import choices
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.search.candidate import PAYS, MeasuredCandidate, failed, left_out, measured_row, over_limit
from nimble_jobs.planner.search.clock import Clock
from nimble_jobs.planner.search.crowd import Crowd
from nimble_jobs.planner.search.plans import (
    eager_far_behind,
    far_behind,
    few_plans,
    instead_of,
    may_compile,
    may_have_streams,
    plan_on_one_stream,
    plan_on_streams,
    plans_with_streams,
    too_large,
    with_plan,
    with_times,
)
from nimble_jobs.planner.search.target import (
    Captured,
    PlannedProgram,
    Programs,
    Target,
    most_streams,
    name_of,
    whole_us,
)
from nimble_jobs.planner.sources.fold import Pairs
from nimble_jobs.planner.sources.source import AS_GIVEN, Source
from nimble_jobs.schedule import Candidate

_HOPELESS = 0.9  # share of the critical path that a replay can take: tasks that are timed alone take a little longer


class Search:
    """The search for the fastest schedules of one target. `candidates` lists what was tried or left out, and why."""

    def __init__(self, target: Target, options: BuildOptions, *, say: Callable[[str], None] = lambda _: None) -> None:
        """`say` is given the name of each source and candidate before its turn; what it raises ends the search."""
        self._target = target
        self._options = options
        self._say = say
        self._deadline = math.inf
        self.clock = Clock()
        self.candidates: list[Candidate] = []
        self.passed: list[MeasuredCandidate] = []
        self._best: MeasuredCandidate | None = None
        self._refused: MeasuredCandidate | None = None  # the first that disagrees with eager, in case none agrees
        self._crowd = Crowd(target, options, clock=self.clock, rows=self.candidates)

    def run(self, *, only_first: bool = False) -> MeasuredCandidate:
        """The best candidate, or one with a `failure` if none agrees with eager. The weights then have its layout.

        With `only_first` no other source is tried. Raises CannotRecord, EngineError, OutOfMemory, and CheckFailed for a
        target that `must_agree`, if the first candidate cannot be used; the weights then lie as they were given.
        """
        self._deadline = time.monotonic() + self._options.budget_s
        try:
            kernels = [] if only_first else may_compile(self._options, self._target.device)
            with compiling(self._target.first.compiled or bool(kernels)):
                singles = self._sources(only_first=only_first)
                for single in sorted(singles, key=lambda single: single.replay_us):
                    self._try_several_streams(single, singles)
                self._try_other_choice(singles)
            winner = self._best or self._refused
            assert winner is not None
            self._target.use(winner.source)
            return winner
        except BaseException:
            self._target.use(AS_GIVEN)
            raise

    def run_one(self, source: Source, streams: int) -> MeasuredCandidate | None:
        """Only the candidate of a source on so many streams. If it does not work or disagrees with eager, the answer is
        None, its row says why, and the weights lie as they were given. Raises DeviceFault.
        """
        self._deadline = time.monotonic() + self._options.budget_s
        try:
            with compiling(source.compiled):
                measured = self._try(source, streams=streams)
            self._target.use(AS_GIVEN if measured is None else source)
            return measured
        except BaseException:
            self._target.use(AS_GIVEN)
            raise

    def _sources(self, *, only_first: bool) -> list[MeasuredCandidate]:
        """Every source on one stream: those that work and agree with eager."""
        first = self._try(self._target.first, required=True)
        waiting = [] if only_first else self._further_sources()
        if first is not None and time.monotonic() <= self._deadline:
            first, waiting = self._crowd.ordered(first, waiting, self.timed)
        singles, tried, pairs = [first], {self._target.first}, Pairs()
        while waiting:
            source = waiting.pop(0)
            if self._out_of_time(source.name):
                continue
            if (behind := eager_far_behind(source, self.passed)) is not None:
                self.candidates.append(left_out(source.name, f"not tried: {behind}"))
                continue
            tried.add(source)
            pairs = source.folded or pairs
            singles.append(self._try(source))
            if singles[-1] is None and (other := instead_of(source, tried, pairs)) is not None:
                waiting.insert(0, other)
        return [single for single in singles if single is not None]

    def _further_sources(self) -> list[Source]:
        first = self._best or self._refused
        assert first is not None
        kernels = may_compile(self._options, self._target.device)
        if not kernels and self._options.fuse != "off" and device.able(self._target.device).packed_weights:
            kernels = ["onednn"]
        if kernels and (untested := tested_version()) is not None:
            self.candidates.append(left_out(f"{kernels[0]} kernels", f"not tried: {untested}"))
            kernels = []
        return self._target.further(first.programs, kernels)

    def _try(self, source: Source, *, required: bool = False, streams: int | None = None) -> MeasuredCandidate | None:
        """Record, plan and measure a source on one stream, or on `streams`. None if it does not work, disagrees with
        eager, or time runs out. Of a `required` source, errors are raised.
        """
        self._say(source.name)
        try:
            programs = self._recorded(source, required=required)
            if programs is not None and streams is not None and streams > 1:
                with self.clock.time("measure"):
                    programs = with_times(self._target, source, programs)
                with self.clock.time("plan"):
                    programs = {role: plan_on_streams(planned, streams) for role, planned in programs.items()}
        except Exception as e:
            choices.current().doubt()
            if required:
                raise
            self.candidates.append(failed(source.name, e, self._target.device))
            return None
        measured = self._measure(source, programs, required=required) if programs is not None else None
        if measured is None or measured.failure is None:
            return measured
        choices.current().doubt()
        return None

    def _recorded(self, source: Source, *, required: bool) -> Programs | None:
        """A source's programs, planned on one stream. None if time or memory runs out first."""
        recordings: dict[Role, Recording] = {}
        with self.clock.time("record"):
            self._target.use(source)
            choices.current().begin()
            for role, recording in self._target.record(source):
                recordings[role] = replace(recording, choices=choices.current().made())
                if not required and self._out_of_time(source.name):
                    return None
        with self.clock.time("plan"):
            programs = {role: plan_on_one_stream(recording) for role, recording in recordings.items()}
        return None if self._too_large(name_of(source, programs), programs, required=required) else programs

    def timed(self, one: MeasuredCandidate) -> MeasuredCandidate:
        """A candidate with the time of each task alone, which several streams need. A row says if there is none."""
        name = f"{one.row.name}, each task alone"
        if all(planned.durations_us for planned in one.programs.values()) or name in {c.name for c in self.candidates}:
            return one
        try:
            with self.clock.time("record"):
                self._target.use(one.source)
            with self.clock.time("measure"):
                timed = replace(one, programs=with_times(self._target, one.source, one.programs))
        except Exception as e:  # noqa: BLE001 - it works without
            self.candidates.append(failed(name, e, self._target.device))
            return one
        self._best = timed if self._best is one else self._best
        self.passed = [timed if each is one else each for each in self.passed]
        return timed

    def _try_several_streams(self, single: MeasuredCandidate, singles: Sequence[MeasuredCandidate]) -> None:
        """Measure the plans of a source on several streams, unless measurements say that they cannot pay."""
        target, name = self._target, f"{single.source.name}, several streams"
        assert self._best is not None
        if not any(may_have_streams(p.facts, self._options, target.device) for p in single.programs.values()):
            return
        if (behind := far_behind(single, singles)) is not None:
            self.candidates.append(left_out(name, f"not tried: {behind}"))
            return
        single = single if self._out_of_time(name) else self.timed(single)
        if any(planned.facts.critical_path_us is None for planned in single.programs.values()):
            return
        path_us = whole_us(target, {role: p.facts.critical_path_us or 0.0 for role, p in single.programs.items()})
        if path_us * _HOPELESS > self._best.replay_us:
            faster = f"{self._best.row.name} takes {self._best.replay_us:.0f} us"
            why_not = f"not tried: the critical path alone takes {path_us:.0f} us, and {faster}"
            self.candidates.append(left_out(name, why_not))
            return
        for programs in self._programs_on_several_streams(single, name):
            if not self._out_of_time(name_of(single.source, programs), most_streams(programs)):
                self._measure(single.source, programs, single=single)

    def _try_other_choice(self, singles: Sequence[MeasuredCandidate]) -> None:
        """Kernels that are chosen by their time beside others, or alone, if only the other ones were tried."""
        source = None if self._best is None else self._crowd.other([each.source for each in singles], self._best)
        single = None if source is None or self._out_of_time(source.name) else self._try(source)
        if single is not None:
            self._try_several_streams(single, singles)

    def _programs_on_several_streams(self, single: MeasuredCandidate, name: str) -> list[Programs]:
        """The plans to try for a source that works on one stream: each plan of its program or, if captures take long,
        the fastest plans of its programs.
        """
        target = self._target
        try:
            with self.clock.time("record"):
                target.use(single.source)
            if target.captures_take_long:
                programs = self._fastest_plans(single, name)
                return [programs] if programs is not None else []
            ((role, program),) = single.programs.items()
            return [{role: planned} for planned in self._plans(program, name)]
        except Exception as e:  # noqa: BLE001 - its row says it, and one stream works
            self.candidates.append(failed(name, e, target.device))
            return []

    def _fastest_plans(self, single: MeasuredCandidate, name: str) -> Programs | None:
        """For each program, the fastest of a few plans, timed alone. None if one stream is fastest for all programs."""
        chosen: dict[Role, PlannedProgram] = {}
        for role, program in single.programs.items():
            chosen[role] = program
            for planned in self._plans(program, name, few=True):
                if self._out_of_time(name):
                    break
                with self.clock.time("measure"):
                    replay_us = self._target.alone_us(single.source, role, planned.recording, planned.plan)
                if replay_us < chosen[role].replay_us * PAYS:
                    chosen[role] = replace(planned, replay_us=replay_us)
        return None if chosen == single.programs else chosen

    def _plans(self, program: PlannedProgram, name: str, *, few: bool = False) -> list[PlannedProgram]:
        """A program with each of the plans on several streams that are worth trying."""
        with self.clock.time("plan"):
            plans, why_not = plans_with_streams(program, self._options, self._target.device)
            if why_not is not None:
                self.candidates.append(left_out(name, why_not))
            if few:
                plans = few_plans(program, plans)
            return [with_plan(program, plan, facts) for plan, facts in plans]

    def _measure(
        self, source: Source, programs: Programs, *, required: bool = False, single: MeasuredCandidate | None = None
    ) -> MeasuredCandidate | None:
        """Capture, check and time one candidate. It becomes the best if it costs less than all earlier ones.

        With several streams, it must also cost clearly less than `single`, the same source on one stream.
        """
        name, target = name_of(source, programs), self._target
        streams = most_streams(programs)
        self._say(name)
        if self._too_large(name, programs, required=required):
            return None
        try:
            with self.clock.time("capture"):
                captured = target.capture(source, programs)
            try:
                error, failure = self._checked(captured, required=required)
                with self.clock.time("measure"):
                    times_us = captured.times_us()
                nbytes = captured.bytes
            finally:
                captured.close()
        except Exception as e:
            if required:
                raise
            self.candidates.append(failed(name, e, target.device, streams=streams))
            return None
        over = over_limit(nbytes, self._options.memory_bytes)
        if required and over is not None:
            raise OutOfMemory(f"{name}: {over}")
        replay_us = whole_us(target, times_us)
        measured = MeasuredCandidate(
            row=measured_row(
                name, replay_us, target.records, nbytes, error=error, reason=failure or over or "", streams=streams
            ),
            source=source,
            programs={role: replace(p, replay_us=times_us[role]) for role, p in programs.items()},
            error=error,
            failure=failure,
            available_bytes=target.available_bytes,
        )
        self.candidates.append(measured.row)
        return self._ranked(measured, single) if over is None or failure is not None else None

    def _checked(self, captured: Captured, *, required: bool) -> tuple[float | None, str | None]:
        """The relative norm against eager, and the reason if it is too large."""
        try:
            with self.clock.time("check"):
                return captured.check(thorough=not self.passed and self._refused is None), None
        except CheckFailed as e:
            if required and self._target.must_agree:
                raise
            return e.error, str(e)

    def _ranked(self, measured: MeasuredCandidate, single: MeasuredCandidate | None) -> MeasuredCandidate:
        """The same candidate, noted as refused or passed, and as the best if it is the best so far."""
        if measured.failure is not None:
            self._refused = self._refused or measured
            return measured
        self.passed.append(measured)
        pays = single is None or measured.cost <= single.cost * PAYS
        if pays and (self._best is None or measured.cost < self._best.cost):
            self._best = measured
        return measured

    def _too_large(self, name: str, programs: Programs, *, required: bool) -> bool:
        """Whether plans need more memory than they may use. Raises OutOfMemory for a candidate that must work."""
        reason = too_large(programs, self._target.device, self._options.memory_bytes)
        if reason is None:
            return False
        if required:
            raise OutOfMemory(f"{name}: {reason}")
        self.candidates.append(left_out(name, f"not captured: {reason}", streams=most_streams(programs)))
        return True

    def _out_of_time(self, name: str, streams: int | None = None) -> bool:
        """Whether the time is used up. If so, adds a row for this candidate that says so."""
        if time.monotonic() <= self._deadline:
            return False
        reason = f"not tried: the budget of {self._options.budget_s:.0f} s was used up"
        self.candidates.append(left_out(name, reason, streams=streams))
        return True
