"""A training step as what the search works on: one program for a batch with an update and, with accumulation, another
for a batch whose gradients only add up.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.record import Recording
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.search.plans import durations_us
from nimble_jobs.planner.search.target import Programs
from nimble_jobs.planner.sources.source import AS_GIVEN, Kernels, Source
from nimble_jobs.planner.step.live import LiveStep
from nimble_jobs.schedule import Plan


class StepTarget:
    """A whole training step. After each recording, check and timing its tensors have the values of before."""

    must_agree = True
    captures_take_long = True
    available_bytes = None

    def __init__(self, live: LiveStep, *, seed: int) -> None:
        """`seed`: of checks that must pass again when a training goes on with the source that it began with."""
        self._live = live
        self._request = live.request
        self._seed = seed
        self.device = live.device
        self.first = live.request.only or AS_GIVEN
        self.records = live.request.accumulate * live.request.x.shape[0]
        self.runs = {
            role: live.request.accumulate - 1 if role is Role.ACCUMULATE else 1 for role in live.request.programs
        }

    def further(self, first: Programs, kernels: Sequence[Kernels]) -> list[Source]:
        if not devices.able(self.device).compilers:
            return []
        images = self._live.layouts_differ and self._request.options.layout == "auto"
        last = Source(kernels="eager", layout="channels-last" if images else "given")
        # in one layout: Inductor lays convolutions out as it likes anyway
        without = self._request.options.without
        fused = [Source(kernels=each, layout=last.layout, without=without) for each in kernels if each != "epilogues"]
        return [*fused, *([last] if images else [])]

    def use(self, source: Source) -> None:
        self._live.use(source.layout)

    def record(self, source: Source) -> Iterator[tuple[Role, Recording]]:
        objective = self._live.objective(source)
        for role in self._request.programs:
            yield role, self._live.record(source, objective, role)

    def task_times_us(self, source: Source, role: Role, recording: Recording, plan: Plan) -> tuple[float, ...]:
        try:
            return durations_us(recording, plan, self._live.state(), self.device, 2, {})
        finally:
            self._live.restore()

    def capture(self, source: Source, programs: Programs) -> StepInstances:
        wanted = {role: (each.recording, each.plan, each.memory) for role, each in programs.items()}
        seed = secrets.randbits(31) if self._request.only is None else self._seed
        return StepInstances(self._live, self._live.capture(wanted), seed)

    def alone_us(self, source: Source, role: Role, recording: Recording, plan: Plan) -> float:
        instance = self._live.capture_one(recording, plan)
        try:
            return measure.time_us(instance.replay, self.device)
        finally:
            instance.close()
            self._live.restore()


class StepInstances:
    """An instance of each program, over the live tensors."""

    def __init__(self, live: LiveStep, instances: Mapping[Role, Instance], seed: int) -> None:
        self.instances = instances
        self._live = live
        self._seed = seed

    @property
    def bytes(self) -> int:
        return sum(instance.bytes for instance in self.instances.values())

    def check(self, *, thorough: bool) -> float:
        return self._live.check(self.instances, seed=self._seed)

    def times_us(self) -> dict[Role, float]:
        try:
            return {role: measure.time_us(each.replay, self._live.device) for role, each in self.instances.items()}
        finally:
            self._live.restore()

    def close(self) -> None:
        for instance in self.instances.values():
            instance.close()
