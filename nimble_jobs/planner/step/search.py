"""The fastest schedules for a whole training step: kernels and layouts in turn on one stream, then streams for
those whose critical path leaves room.

There is one program for a batch whose gradients are applied and, with accumulation, another for those that only add
up. Eager kernels on one stream are always tried, and must work.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from nimble_jobs import graph
from nimble_jobs.engine import measure
from nimble_jobs.engine.inductor import stop_compilers
from nimble_jobs.engine.private import tested_version
from nimble_jobs.engine.record import Recording
from nimble_jobs.planner.search.candidate import failed, left_out
from nimble_jobs.planner.search.half import Half, budget_used_up, streams_may_pay, with_streams
from nimble_jobs.planner.search.plans import durations_us
from nimble_jobs.planner.sources.source import Kernels, Layout, Source
from nimble_jobs.planner.step.live import LiveStep
from nimble_jobs.schedule import Candidate


@dataclass(frozen=True, kw_only=True)
class FoundStep:
    """A way to run the step that agrees with eager."""

    source: Source
    recordings: dict[bool, Recording]  # by whether they update the weights
    halves: dict[bool, Half]
    error: float
    candidate: Candidate

    @property
    def replay_us(self) -> float:
        assert self.candidate.replay_us is not None
        return self.candidate.replay_us


class StepSearch:
    """Tries, checks and measures. `candidates` holds what was tried."""

    def __init__(self, live: LiveStep, *, seed: int, report: Callable[..., None] = lambda **_: None) -> None:
        """`seed`: of checks that must pass again, where a training goes on with the source that it began with. `report`
        is called before each candidate, and ends the search by what it raises.
        """
        self._report = report
        self._live = live
        self._request = live.request
        self._device = live.device
        self._seed = seed
        self._batch = live.request.x.shape[0]
        self.candidates: list[Candidate] = []

    def run(self) -> FoundStep:
        """The fastest; the weights then lie as it needs them, and nothing else has changed.

        Raises CannotRecord, EngineError, OutOfMemory or CheckFailed where not even eager kernels can be used.
        """
        deadline = time.monotonic() + self._request.options.budget_s
        only = self._request.only
        source = only or Source(kernels="eager", layout="given")
        further = [] if only else self._further_sources()
        try:
            tried = [self._try(source, math.inf, must=True), *(self._try(other, deadline) for other in further)]
        finally:
            if any(each.kernels != "eager" for each in (source, *further)):
                stop_compilers()
        singles = sorted((found for found in tried if found is not None), key=lambda found: found.replay_us)
        best = singles[0]
        for single in singles:
            found = self._several(single, best, deadline)
            if found is not None and found.replay_us < best.replay_us:
                best = found
        self._live.use(best.source.layout)
        return best

    def _further_sources(self) -> list[Source]:
        options = self._request.options
        if self._device.type == "cpu":
            return []
        layouts: list[Layout] = ["given"]
        if self._live.layouts_differ and options.layout == "auto":
            layouts.append("channels-last")
        fused: list[Source] = []
        untested = tested_version()
        if options.fuse != "off" and untested is not None:
            self._left_out("inductor kernels", f"not tried: {untested}")
        elif options.fuse != "off":
            compilers: list[Kernels] = ["inductor", "max-autotune"] if options.fuse == "max" else ["inductor"]
            # in one layout: Inductor lays convolutions out as it likes anyway
            fused = [Source(kernels=kernels, layout=layouts[-1]) for kernels in compilers]
        return [*fused, *(Source(kernels="eager", layout=layout) for layout in layouts[1:])]

    def _try(self, source: Source, deadline: float, *, must: bool = False) -> FoundStep | None:
        self._report(phase="build")
        try:
            return self._on_one_stream(source, deadline)
        except Exception as e:
            if must:
                raise
            self.candidates.append(failed(source.name, e, self._device))
            return None

    def _on_one_stream(self, source: Source, deadline: float) -> FoundStep | None:
        """Recorded, measured and checked; None where the time was over before that was done."""
        if self._is_over(deadline, source.name):
            return None
        self._live.use(source.layout)
        objective = self._live.objective(source)
        recordings: dict[bool, Recording] = {}
        singles: dict[bool, Half] = {}
        for update in self._request.programs:
            if recordings and self._is_over(deadline, source.name):
                return None
            recordings[update] = self._live.record(source, objective, update=update)
        for update, recording in recordings.items():
            if self._is_over(deadline, source.name):
                return None
            singles[update] = self._single(recording)
        return self._checked(source, recordings, singles)

    def _several(self, single: FoundStep, best: FoundStep, deadline: float) -> FoundStep | None:
        """A source on several streams, where that can be faster than the best so far, and is faster than on one."""
        name, options = f"{single.source.name}, several streams", self._request.options
        if not any(streams_may_pay(half, options, self._device) for half in single.halves.values()):
            return None
        path_us = self._whole_us({u: half.facts.critical_path_us or 0.0 for u, half in single.halves.items()})
        if path_us >= best.replay_us:
            faster = f"{best.candidate.name} takes {best.replay_us:.0f} us"
            self._left_out(name, f"not tried: the critical path alone takes {path_us:.0f} us, and {faster}")
            return None
        if self._is_over(deadline, name):
            return None
        self._report(phase="build")
        try:
            return self._with_streams(single, name, deadline)
        except Exception as e:  # noqa: BLE001 - its row says it, and one stream works
            self.candidates.append(failed(name, e, self._device))
            return None

    def _with_streams(self, single: FoundStep, name: str, deadline: float) -> FoundStep | None:
        self._live.use(single.source.layout)
        chosen = {}
        for update, recording in single.recordings.items():
            chosen[update], why_not = with_streams(
                recording,
                single.halves[update],
                lambda plan, recording=recording: self._live.capture_one(recording, plan),  # type: ignore[misc]
                self._request.options,
                self._device,
                deadline,
            )
            self._live.restore()
            if why_not is not None and update:
                self._left_out(name, why_not)
        return None if chosen == single.halves else self._checked(single.source, single.recordings, chosen)

    def _is_over(self, deadline: float, name: str) -> bool:
        """Whether the time is over; then the candidate has a row that says so."""
        over = time.monotonic() > deadline
        if over:
            self._left_out(name, budget_used_up(self._request.options))
        return over

    def _whole_us(self, programs_us: Mapping[bool, float]) -> float:
        """Of all batches up to an update, from the times of the programs."""
        return programs_us[True] + (self._request.accumulate - 1) * programs_us.get(False, 0.0)

    def _single(self, recording: Recording) -> Half:
        """One program on one stream, measured."""
        plan, _ = graph.single_stream(recording.program)
        times = durations_us(recording, plan, self._live.state(), self._device, 2, {})
        self._live.restore()
        plan, facts = graph.single_stream(recording.program, durations_us=times)
        instance = self._live.capture_one(recording, plan)
        try:
            replay_us = measure.time_us(instance.replay, self._device)
        finally:
            instance.close()
            self._live.restore()
        return Half(plan=plan, facts=facts, durations_us=times, replay_us=replay_us)

    def _checked(self, source: Source, recordings: dict[bool, Recording], halves: dict[bool, Half]) -> FoundStep:
        with ExitStack() as opened:
            instances = self._live.capture(recordings, {u: h.plan for u, h in halves.items()})
            for instance in instances.values():
                opened.callback(instance.close)
            seed = secrets.randbits(31) if self._request.only is None else self._seed
            error = self._live.check(instances, seed=seed)
            nbytes = sum(i.bytes for i in instances.values())
        batches = self._request.accumulate
        replay_us = self._whole_us({update: half.replay_us for update, half in halves.items()})
        streams = " and ".join(str(halves[u].plan.streams) for u in self._request.programs)
        candidate = Candidate(
            name=f"{source.name}, {streams} stream{'s' if streams != '1' else ''}",
            replay_us=replay_us,
            records_per_s=batches * self._batch / replay_us * 1e6,
            peak_bytes=nbytes,
            error=error,
            chosen=False,
            reason="",
            streams=max(h.plan.streams for h in halves.values()),
        )
        self.candidates.append(candidate)
        return FoundStep(source=source, recordings=recordings, halves=halves, error=error, candidate=candidate)

    def _left_out(self, name: str, reason: str, *, error: float | None = None) -> None:
        self.candidates.append(left_out(name, reason, error=error))
