"""The one search: build candidates for a target, check each against eager, measure it on the device, keep the best.

Sources (kernels and layout) are tried in turn on one stream; then several streams, for the fastest source first, and
then for those whose bounds leave them a chance. A candidate that fails is a row in the table of candidates and ends
nothing, except the first one: eager kernels on one stream must work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from nimble_jobs.engine import choices, measure
from nimble_jobs.engine import device as devices
from nimble_jobs.engine.bind import arena_plan, planned_bytes
from nimble_jobs.engine.inductor import stop_compilers
from nimble_jobs.engine.private.runtime import tested_version
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.engine.workspace import workspace_bytes
from nimble_jobs.errors import CheckFailed, OutOfMemory
from nimble_jobs.graph import Analysis
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.search.candidate import PAYS, Found, failed, left_out
from nimble_jobs.planner.search.clock import Clock
from nimble_jobs.planner.search.plans import few_plans, may_have_streams, plans_with_streams
from nimble_jobs.planner.search.target import Captured, Planned, Programs, Target, most_streams, name_of, whole_us
from nimble_jobs.planner.sources.source import AS_GIVEN, Kernels, Source
from nimble_jobs.schedule import Candidate

_HOPELESS = 0.9  # share of the critical path that a replay can take: tasks that are timed alone take a little longer


class Search:
    """The search for the fastest schedules of one target. `candidates` lists what was tried or left out, and why."""

    def __init__(self, target: Target, options: BuildOptions, *, told: Callable[[str], None] = lambda _: None) -> None:
        """`told` is called with the name of each source and each candidate before its turn. What it raises ends the
        search.
        """
        self._target = target
        self._options = options
        self._told = told
        self._deadline = math.inf
        self.clock = Clock()
        self.candidates: list[Candidate] = []
        self.passed: list[Found] = []
        self._best: Found | None = None
        self._refused: Found | None = None  # the first that disagrees with eager, in case none agrees

    def run(self, *, only_first: bool = False) -> Found:
        """The best candidate, or one with a `failure` if none agrees with eager. The weights then have its layout.

        With `only_first` no other source is tried. Raises CannotRecord, EngineError, OutOfMemory, and CheckFailed for a
        target that `must_agree`, if the first candidate cannot be used; the weights then lie as they were given.
        """
        self._deadline = time.monotonic() + self._options.budget_s
        try:
            singles = self._sources(only_first=only_first)
            for single in sorted(singles, key=lambda found: found.replay_us):
                self._several_streams(single)
            found = self._best or self._refused
            assert found is not None
            self._target.use(found.source)
            return found
        except BaseException:
            self._target.use(AS_GIVEN)
            raise

    def run_one(self, source: Source, streams: int) -> Found | None:
        """Only the candidate of a source on so many streams. If it does not work or disagrees with eager, the answer is
        None, its row says why, and the weights lie as they were given. Raises DeviceFault.
        """
        self._deadline = time.monotonic() + self._options.budget_s
        try:
            found = self._try(source, streams=streams)
            self._target.use(AS_GIVEN if found is None else source)
            return found
        except BaseException:
            self._target.use(AS_GIVEN)
            raise
        finally:
            if source.compiled:
                stop_compilers()

    def _sources(self, *, only_first: bool) -> list[Found]:
        """Every source on one stream: those that work and agree with eager. No compiler is left running."""
        first, compiling = self._target.first, False
        try:
            compiling = first.compiled
            singles = [self._try(first, must=True)]
            waiting = [] if only_first else self._further()
            tried: set[Kernels] = set()
            while waiting:
                source = waiting.pop(0)
                if self._spent(source.name):
                    continue
                compiling = compiling or source.compiled
                tried.add(source.kernels)
                singles.append(self._try(source))
                if singles[-1] is None and source.folded and source.kernels != "eager":
                    waiting.insert(0, replace(source, folded=()))  # folded weights may not fit a narrow type
                elif singles[-1] is None and source.kernels == "epilogues" and "inductor" not in tried:
                    waiting.insert(0, replace(source, kernels="inductor", merged=()))  # without what we add to them
        finally:
            if compiling:
                stop_compilers()
        return [found for found in singles if found is not None]

    def _further(self) -> list[Source]:
        first = self._best or self._refused
        assert first is not None
        kernels: list[Kernels] = []
        able = devices.able(self._target.device)
        if (able.compilers or able.packed_weights) and self._options.fuse != "off":
            kernels += ["inductor", "epilogues"] if able.compilers else ["onednn"]
            kernels += ["max-autotune"] if able.compilers and self._options.fuse == "max" else []
            untested = tested_version()
            if untested is not None:
                self._left_out(f"{kernels[0]} kernels", f"not tried: {untested}")
                kernels.clear()
        return self._target.further(first.programs, kernels)

    def _try(self, source: Source, *, must: bool = False, streams: int | None = None) -> Found | None:
        """Measure a source; None if it does not work, disagrees with eager, or time runs out. It has one stream, or
        `streams` if its candidate is the only one that is tried.
        """
        self._told(source.name)
        try:
            programs = self._recorded(source, must=must, timed=streams != 1)
            if programs is not None and streams is not None and streams > 1:
                with self.clock.time("plan"):
                    programs = {role: _on_streams(planned, streams) for role, planned in programs.items()}
        except Exception as e:
            choices.current().doubt()
            if must:
                raise
            self.candidates.append(failed(source.name, e, self._target.device))
            return None
        one = self._measure(source, programs, must=must) if programs is not None else None
        if one is not None and one.failure is not None:
            choices.current().doubt()
        return one if one is not None and one.failure is None else None

    def _recorded(self, source: Source, *, must: bool, timed: bool = True) -> Programs | None:
        """A source's programs, planned on one stream, with each task timed, which only plans with more of them need;
        None if time or memory runs out first.
        """
        target = self._target
        recordings: dict[Role, Recording] = {}
        with self.clock.time("record"):
            target.use(source)
            choices.current().begin()
            for role, recording in target.record(source):
                recordings[role] = replace(recording, choices=choices.current().made())
                if not must and self._spent(source.name):
                    return None
        with self.clock.time("plan"):
            programs = {role: _on_one_stream(recording) for role, recording in recordings.items()}
        if self._too_large(name_of(source, programs), programs, must=must):  # timing tasks takes that memory, too
            return None
        for role, planned in programs.items() if timed else ():
            if not must and self._spent(source.name):
                return None
            with self.clock.time("measure"):
                times = target.task_times_us(source, role, planned.recording, planned.plan)
            with self.clock.time("plan"):
                _, facts = planned.analysis.single_stream(times)
            programs[role] = replace(planned, facts=facts, durations_us=times)
        return programs

    def _several_streams(self, one: Found) -> None:
        """Measure the plans of a source on several streams, unless its bounds say that they cannot pay."""
        target, name = self._target, f"{one.source.name}, several streams"
        assert self._best is not None
        if not any(may_have_streams(p.facts, self._options, target.device) for p in one.programs.values()):
            return
        path_us = whole_us(target, {role: p.facts.critical_path_us or 0.0 for role, p in one.programs.items()})
        if path_us * _HOPELESS > self._best.replay_us:
            faster = f"{self._best.candidate.name} takes {self._best.replay_us:.0f} us"
            self._left_out(name, f"not tried: the critical path alone takes {path_us:.0f} us, and {faster}")
            return
        for programs in self._on_several_streams(one, name):
            if not self._spent(name_of(one.source, programs), most_streams(programs)):
                self._measure(one.source, programs, single=one)

    def _on_several_streams(self, one: Found, name: str) -> list[Programs]:
        """The plans to try for a source that works on one stream: each plan of its program or, if captures take long,
        the fastest plans of its programs.
        """
        target = self._target
        try:
            with self.clock.time("record"):
                target.use(one.source)
            if target.captures_take_long:
                programs = self._fastest_plans(one, name)
                return [programs] if programs is not None else []
            ((role, single),) = one.programs.items()
            return [{role: planned} for planned in self._plans(single, name)]
        except Exception as e:  # noqa: BLE001 - its row says it, and one stream works
            self.candidates.append(failed(name, e, target.device))
            return []

    def _fastest_plans(self, one: Found, name: str) -> Programs | None:
        """For each program, the fastest of a few plans, timed alone. None if one stream is fastest for all programs."""
        chosen: dict[Role, Planned] = {}
        for role, single in one.programs.items():
            chosen[role] = single
            for planned in self._plans(single, name, few=True):
                if self._spent(name):
                    break
                with (
                    self.clock.time("measure"),
                    self._target.alone(one.source, role, planned.recording, planned.plan) as replay,
                ):
                    replay_us = measure.time_us(replay, self._target.device)
                if replay_us < chosen[role].replay_us * PAYS:
                    chosen[role] = replace(planned, replay_us=replay_us)
        return None if chosen == one.programs else chosen

    def _plans(self, single: Planned, name: str, *, few: bool = False) -> list[Planned]:
        """The plans of a program on several streams that are worth trying."""
        with self.clock.time("plan"):
            plans, why_not = plans_with_streams(single, self._options, self._target.device)
            if why_not is not None:
                self._left_out(name, why_not)
            if few:
                plans = few_plans(single, plans)
            program = single.recording.program
            return [replace(single, plan=plan, facts=facts, memory=arena_plan(program, plan)) for plan, facts in plans]

    def _measure(
        self, source: Source, programs: Programs, *, must: bool = False, single: Found | None = None
    ) -> Found | None:
        """Capture, check and time one candidate. It becomes the best if it costs less than all earlier ones.

        With several streams, it must also cost clearly less than `single`, the same source on one stream.
        """
        name, target = name_of(source, programs), self._target
        streams = most_streams(programs)
        self._told(name)
        if self._too_large(name, programs, must=must):
            return None
        try:
            with self.clock.time("capture"):
                captured = target.capture(source, programs)
            try:
                error, failure = self._checked(captured, must=must)
                with self.clock.time("measure"):
                    times_us = captured.times_us()
                nbytes = captured.bytes
            finally:
                captured.close()
        except Exception as e:
            if must:
                raise
            self.candidates.append(failed(name, e, target.device, streams=streams))
            return None
        over = self._over(nbytes)
        if must and over is not None:
            raise OutOfMemory(f"{name}: {over}")
        replay_us = whole_us(target, times_us)
        found = Found(
            candidate=Candidate(
                name=name,
                replay_us=replay_us,
                records_per_s=target.records / replay_us * 1e6,
                peak_bytes=nbytes,
                error=error,
                chosen=False,
                reason=failure or over or "",
                streams=streams,
            ),
            source=source,
            programs={role: replace(p, replay_us=times_us[role]) for role, p in programs.items()},
            error=error,
            failure=failure,
            available_bytes=target.available_bytes,
        )
        self.candidates.append(found.candidate)
        return self._judged(found, single) if over is None or failure is not None else None

    def _checked(self, captured: Captured, *, must: bool) -> tuple[float | None, str | None]:
        """The relative norm against eager, and the reason if it is too large."""
        try:
            with self.clock.time("check"):
                return captured.check(thorough=not self.passed and self._refused is None), None
        except CheckFailed as e:
            if must and self._target.must_agree:
                raise
            return e.error, str(e)

    def _judged(self, found: Found, single: Found | None) -> Found:
        """Note whether a candidate is usable, and whether it is the best so far."""
        if found.failure is not None:
            self._refused = self._refused or found
            return found
        self.passed.append(found)
        pays = single is None or found.cost <= single.cost * PAYS
        if pays and (self._best is None or found.cost < self._best.cost):
            self._best = found
        return found

    def _over(self, nbytes: int) -> str | None:
        limit = self._options.memory_bytes
        if limit is None or nbytes <= limit:
            return None
        return f"needs {nbytes} bytes, more than the {limit} that it may use"

    def _too_large(self, name: str, programs: Programs, *, must: bool) -> bool:
        """Whether plans need more memory than they may use. Raises OutOfMemory for a candidate that must work."""
        limit, device = self._options.memory_bytes, self._target.device
        if limit is None:
            return False
        planned = sum(planned_bytes(p.recording.program, p.plan, p.memory, device) for p in programs.values())
        if planned <= limit:
            return False
        workspaces = sum(workspace_bytes(p.recording.program, p.plan, device) for p in programs.values())
        products = f", {workspaces} of them as workspaces of matrix products" if workspaces else ""
        reason = f"its memory plan needs {planned} bytes{products}, more than the {limit} that it may use"
        if must:
            raise OutOfMemory(f"{name}: {reason}")
        self.candidates.append(left_out(name, f"not captured: {reason}", streams=most_streams(programs)))
        return True

    def _spent(self, name: str, streams: int | None = None) -> bool:
        """Whether the time is used up. If so, adds a row for this candidate that says so."""
        if time.monotonic() <= self._deadline:
            return False
        reason = f"not tried: the budget of {self._options.budget_s:.0f} s was used up"
        self.candidates.append(left_out(name, reason, streams=streams))
        return True

    def _left_out(self, name: str, reason: str) -> None:
        self.candidates.append(left_out(name, reason))


def _on_one_stream(recording: Recording) -> Planned:
    analysis = Analysis.of(recording.program)
    plan, facts = analysis.single_stream()
    memory = arena_plan(recording.program, plan)
    return Planned(recording=recording, analysis=analysis, plan=plan, memory=memory, facts=facts, durations_us=())


def _on_streams(single: Planned, streams: int) -> Planned:
    plan, facts = single.analysis.plan(durations_us=single.durations_us, max_streams=streams)
    return replace(single, plan=plan, facts=facts, memory=arena_plan(single.recording.program, plan))
