"""Build candidates, check each against eager, measure it on the device, keep the fastest, with an eye on scarce memory.

Sources (kernels and layout) are tried in turn on one stream; then several streams, for the fastest source first, and
then for those whose bounds leave them a chance. The first candidate, eager kernels on one stream, is always there, so
that there is a choice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure, verify
from nimble_jobs.engine.bind import arena_plan, planned_bytes
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.inputs import Below
from nimble_jobs.engine.observe import Observed
from nimble_jobs.engine.private import tested_version
from nimble_jobs.engine.record import Recording, state_of
from nimble_jobs.engine.workspace import workspace_bytes
from nimble_jobs.errors import CheckFailed, OutOfMemory
from nimble_jobs.graph.memory import MemoryPlan
from nimble_jobs.planner.forward.in_flight import InFlight
from nimble_jobs.planner.forward.samples import Samples
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.search.candidate import PAYS, Found, failed, left_out
from nimble_jobs.planner.search.clock import Clock
from nimble_jobs.planner.search.contest import CLEARLY, Contest, contest
from nimble_jobs.planner.search.plans import capture_several, durations_us, plans_with_streams
from nimble_jobs.planner.sources.fold import Pairs, foldable
from nimble_jobs.planner.sources.merge import Groups, mergeable
from nimble_jobs.planner.sources.source import Kernels, Layout, Source, Variants, record_source
from nimble_jobs.plural import count
from nimble_jobs.schedule import Candidate, GraphFacts, Plan

_BRIEFLY_S = 0.03
_RATES = 3  # of replays in flight, held against eager
_HOPELESS = 0.9  # share of the critical path that a replay can take: tasks that are timed alone take a little longer


class Search:
    """The search for the fastest schedule of one module on one device."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        options: BuildOptions,
        device: torch.device,
        *,
        batch: int,
        tolerance: float,
        below: Below,
        integers: Mapping[str, torch.Tensor] = MappingProxyType({}),
        eager_us: float | None = None,
        observed: Observed,
        given: Mapping[str, torch.Tensor] = MappingProxyType({}),
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`eager_us`: time of one call in eager, which may win; None where it may not. `told` is called with the name
        of each source of tasks, and of each candidate, as it is begun.
        """
        self._module = module
        self._inputs = inputs
        self._options = options
        self._device = device
        self._batch = batch
        self.tolerance = tolerance
        self.observed = observed
        self._given = given
        self._below = below
        self._integers = integers
        self._told = told
        self._eager_us = eager_us
        self.contest: Contest | None = None  # of eager and the best candidate
        self.clock = Clock()
        self._variants = Variants(module)
        self._samples: Samples | None = None
        self._pairs: Pairs = ()
        self._groups: Groups = ()
        limit = options.memory_bytes
        self._available_bytes = devices.memory_bytes(device) if limit is None else limit
        self._deadline = time.monotonic() + options.budget_s
        self.candidates: list[Candidate] = []
        self.best: Found | None = None
        self.passed: list[Found] = []
        self.refused: Found | None = None  # the first that failed its check, kept in case that none passes

    def run(self) -> Found:
        """The best candidate; the module's weights then lie as it needs them.

        Raises CannotRecord or EngineError where not even the first candidate can be built, OutOfMemory.
        """
        try:
            first = Source(kernels="eager", layout="given")
            singles = [self._try(first, must=True)]
            waiting = [] if self._options.quick else self._further_sources()
            while waiting:
                source = waiting.pop(0)
                if self._spent(source.name):
                    continue
                single = self._try(source)
                singles.append(single)
                if single is None and source.folded and source.kernels != "eager":
                    waiting.insert(0, replace(source, folded=()))  # folded weights may not fit a narrow type
            for one in sorted((s for s in singles if s is not None), key=lambda s: s.replay_us):
                self._try_streams(one)
            found = self.best or self.refused
            assert found is not None
            if (
                self._options.purpose == "throughput"
                and not self._options.quick
                and found.failure is None
                and self._device.type == "cuda"
            ):
                found = self._in_flight(found.recording).most_records(found, self.passed)
            self.contest = self._against_eager(found) if found.failure is None else None
            if self.contest is not None and self.contest.eager_wins:
                return replace(found, module=self._variants.use())
            found = replace(found, module=self._variants.use(found.source))
            self._variants.settle()
            return found
        except BaseException:
            self._variants.use()
            raise

    def _against_eager(self, found: Found) -> Contest | None:
        """Eager and the winner, timed in turns; None where eager may not win, or is slower beyond doubt.

        Where the winner wants the weights laid out otherwise, eager's time is that of before the search.
        """
        if self._eager_us is None:
            return None
        once_us = self._batch / found.candidate.records_per_s * 1e6 if found.candidate.records_per_s else 0.0
        if once_us < CLEARLY * self._eager_us:
            return None
        module = self._variants.use(found.source)
        count = found.in_flight
        instances = capture_several(found.recording, found.plan, module, self._device, count, found.memory)
        try:
            for instance in instances:
                for name, tensor in self._inputs.items():
                    instance.inputs[name].copy_(tensor)
            with self.clock.time("measure"), torch.no_grad():
                if count > 1:
                    rates = [measure.throughput_per_s(instances, self._device) for _ in range(_RATES)]
                    return Contest.of([self._eager_us], [1e6 / rate for rate in rates])
                if found.source.layout != "given":
                    (times,) = measure.in_turns_us([instances[0].replay], self._device, **self._turns())
                    return Contest.of([self._eager_us], times)
                return contest(
                    lambda: self._module(*self._inputs.values()), instances[0].replay, self._device, **self._turns()
                )
        finally:
            for instance in instances:
                instance.close()

    def _samples_of(self, recording: Recording) -> Samples:
        """The same for all sources, whose inputs differ in their layout alone."""
        if self._samples is None:
            self._samples = Samples(recording.program.inputs, self._below, self._integers, self.observed.put_back)
        return self._samples

    def _in_flight(self, recording: Recording) -> InFlight:
        return InFlight(
            self._options,
            self._device,
            batch=self._batch,
            variants=self._variants,
            samples=self._samples_of(recording),
            clock=self.clock,
            told=self._told,
            rows=self.candidates,
        )

    def _further_sources(self) -> list[Source]:
        images = self._variants.differ and self._options.layout == "auto"
        layout: Layout = "channels-last" if images else "given"
        sources = [Source(kernels="eager", layout="channels-last")] if images else []
        if self._pairs or self._groups:
            sources.append(Source(kernels="eager", layout=layout, folded=self._pairs, merged=self._groups))
        if self._device.type == "cpu":
            return sources
        untested = tested_version()
        if self._options.fuse != "off" and untested is not None:
            self._left_out("inductor kernels", f"not tried: {untested}")
        elif self._options.fuse != "off":
            compilers: list[Kernels] = ["inductor"]
            if layout == "channels-last" or self._groups:
                compilers.append("epilogues")
            if self._options.fuse == "max":
                compilers.append("max-autotune")
            # the same kernels do less work over folded weights
            sources += [
                Source(
                    kernels=kernels,
                    layout=layout,
                    folded=self._pairs,
                    merged=self._groups if kernels == "epilogues" else (),
                )
                for kernels in compilers
            ]
        return sources

    def _try(self, source: Source, *, must: bool = False) -> Found | None:
        """Measure a source on one stream; None where that does not work."""
        self._told(source.name)
        put_back = self.observed.put_back if self.observed.changing else lambda: None
        try:
            with self.clock.time("record"):
                put_back()
                module = self._variants.use(source)
                recording = record_source(module, source, self._inputs, self._device)
            if must and self._options.fold:
                self._pairs = foldable(recording.program, module)
                self._groups = mergeable(recording.program, module)
            with self.clock.time("plan"):
                single, facts = graph.single_stream(recording.program)
                memory = arena_plan(recording.program, single)
            if self._too_large(_name(source, single), single, recording, memory, must=must):  # timing tasks takes it
                return None
            with self.clock.time("measure"):
                durations = (
                    (0.0,) * len(recording.program.tasks)
                    if self._options.quick
                    else durations_us(
                        recording, single, state_of(module), self._device, self._below, self._integers, put_back
                    )
                )
        except Exception as e:
            if must:
                raise
            self.candidates.append(failed(source.name, e, self._device))
            return None
        with self.clock.time("plan"):
            single, facts = graph.single_stream(recording.program, durations_us=durations)
        one = self._measure(source, module, recording, single, facts, durations, must=must)
        return one if one is not None and one.failure is None else None

    def _try_streams(self, one: Found) -> None:
        """Measure the plans of a source on several streams, unless its bounds say that they cannot pay."""
        source, recording, durations = one.source, one.recording, one.durations_us
        assert self.best is not None
        path_us, best_us = one.facts.critical_path_us or 0.0, self.best.replay_us
        if self._device.type != "cpu" and self._options.streams != 1 and _HOPELESS * path_us > best_us:
            reason = f"not tried: the critical path alone takes {path_us:.0f} us"
            self._left_out(
                f"{source.name}, several streams", f"{reason}, and {self.best.candidate.name} {best_us:.0f} us"
            )
            return
        with self.clock.time("plan"):
            plans, why_not = plans_with_streams(recording.program, one.facts, durations, self._options, self._device)
        if why_not is not None:
            self._left_out(f"{source.name}, several streams", why_not)
        if not plans:
            return
        module = self._variants.use(source)
        for plan, known in plans:
            if not self._spent(_name(source, plan), plan.streams):
                self._measure(source, module, recording, plan, known, durations, single=one)

    def _measure(
        self,
        source: Source,
        module: nn.Module,
        recording: Recording,
        plan: Plan,
        facts: GraphFacts,
        durations: tuple[float, ...],
        *,
        must: bool = False,
        single: Found | None = None,
    ) -> Found | None:
        """Capture, check and time one plan. It becomes the best where it costs less than all before, and, with several
        streams, enough less than the `single` one of its source.
        """
        name = _name(source, plan)
        self._told(name)
        with self.clock.time("plan"):
            memory = arena_plan(recording.program, plan)
        if self._too_large(name, plan, recording, memory, must=must):
            return None
        try:
            with self.clock.time("capture"):
                self.observed.put_back()
                (instance,) = capture_several(recording, plan, module, self._device, 1, memory)
            try:
                error, failure = self.check(instance, recording, thorough=must)
                with self.clock.time("measure"):
                    replay_us = self._timed(instance, self._samples_of(recording))
                nbytes = instance.bytes
            finally:
                instance.close()
        except Exception as e:
            if must:
                raise
            self.candidates.append(failed(name, e, self._device, streams=plan.streams))
            return None
        limit = self._options.memory_bytes
        over = (
            f"needs {nbytes} bytes, more than the {limit} that it may use"
            if limit is not None and nbytes > limit
            else None
        )
        if must and over is not None:
            raise OutOfMemory(f"{name}: {over}")
        candidate = Candidate(
            name=name,
            replay_us=replay_us,
            records_per_s=self._batch / replay_us * 1e6,
            peak_bytes=nbytes,
            error=error,
            chosen=False,
            reason=failure or over or "",
            streams=plan.streams,
        )
        found = Found(
            candidate=candidate,
            source=source,
            recording=recording,
            plan=plan,
            memory=memory,
            facts=facts,
            durations_us=durations,
            error=error,
            failure=failure,
            available_bytes=self._available_bytes,
        )
        self.candidates.append(candidate)
        if failure is not None:
            self.refused = self.refused or found
            return found
        if over is not None:
            return None
        self.passed.append(found)
        pays = single is None or found.cost <= single.cost * PAYS
        if pays and (self.best is None or found.cost < self.best.cost):
            self.best = found
        return found

    def _timed(self, instance: Instance, samples: Samples) -> float:
        """Microseconds of a replay."""
        turns = self._turns() | {"before": lambda: samples.fill(instance)}
        if self._options.quick:
            turns["budget_s"] = _BRIEFLY_S
        return measure.time_us(instance.replay, self._device, **turns)

    def _turns(self) -> dict[str, Any]:
        """How calls are timed that change the module's state: each sample is one, from the same state."""
        return {"before": self.observed.put_back, "most": 1} if self.observed.changing else {}

    def check(
        self, instance: Instance, recording: Recording, *, thorough: bool = False
    ) -> tuple[float | None, str | None]:
        """The relative norm against eager on fresh input, and why that is too much; None where it is not."""
        try:
            with self.clock.time("check"):
                error = verify.check(
                    instance,
                    self._module,
                    recording.program.inputs,
                    self._device,
                    tolerance=self.tolerance,
                    seed=secrets.randbits(32),
                    below=self._below,
                    integers=self._integers,
                    observed=self.observed,
                    example=self._given,
                    thorough=thorough,
                )
        except CheckFailed as e:
            return e.error, str(e)
        return error, None

    def _too_large(self, name: str, plan: Plan, recording: Recording, memory: MemoryPlan, *, must: bool) -> bool:
        """Whether a plan needs more memory than it may use. Raises OutOfMemory for a candidate that must work."""
        limit, program = self._options.memory_bytes, recording.program
        planned = planned_bytes(program, plan, memory, self._device)
        if limit is None or planned <= limit:
            return False
        workspaces = workspace_bytes(program, plan, self._device)
        products = f", {workspaces} of them as workspaces of matrix products" if workspaces else ""
        reason = f"its memory plan needs {planned} bytes{products}, more than the {limit} that it may use"
        if must:
            raise OutOfMemory(f"{name}: {reason}")
        self.candidates.append(left_out(name, f"not captured: {reason}", streams=plan.streams))
        return True

    def _spent(self, name: str, streams: int | None = None) -> bool:
        """Whether the time is used up, in which case this candidate is left out."""
        if time.monotonic() <= self._deadline:
            return False
        reason = f"not tried: the budget of {self._options.budget_s:.0f} s was used up"
        self.candidates.append(left_out(name, reason, streams=streams))
        return True

    def _left_out(self, name: str, reason: str) -> None:
        self.candidates.append(left_out(name, reason))


def _name(source: Source, plan: Plan) -> str:
    return f"{source.name}, {count(plan.streams, 'stream')}"
