"""A forward pass as what the search works on."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure, verify
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.contents import state_of
from nimble_jobs.engine.inputs import Below
from nimble_jobs.engine.observe import Observed
from nimble_jobs.engine.record import Recording
from nimble_jobs.kernel_switches import Kernel
from nimble_jobs.kernels.onednn_pass import packs_weights
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.search.plans import capture_several, durations_us
from nimble_jobs.planner.search.target import PlannedProgram, Programs
from nimble_jobs.planner.sources.fold import foldable
from nimble_jobs.planner.sources.merge import mergeable
from nimble_jobs.planner.sources.source import AS_GIVEN, Kernels, Layout, Source, Variants, record_source
from nimble_jobs.schedule import Plan, Port

_BRIEFLY_S = 0.03
_SAMPLES = 4  # of random input: a device computes some numbers faster than others


@dataclass(frozen=True, kw_only=True)
class Example:
    """The inputs of a module that is searched for."""

    inputs: Mapping[str, torch.Tensor]  # what it is recorded with
    batch: int
    below: Below  # what random input is drawn from
    integers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what checks use in place of random integers
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the caller's own, which checks use too


class Samples:
    """A few random inputs that take turns. They lie on the host: on the device they would take what is measured."""

    def __init__(
        self,
        ports: tuple[Port, ...],
        below: Below,
        integers: Mapping[str, torch.Tensor],
        put_back: Callable[[], object] = lambda: None,
    ) -> None:
        """`put_back` undoes what replays write into the state; it is called with each input."""
        host = torch.device("cpu")
        made = [verify.random_inputs(ports, host, seed, below, integers) for seed in range(_SAMPLES)]
        self._put_back = put_back
        self._turns = itertools.cycle(made)

    def fill(self, instance: Instance) -> None:
        """Give the instance the next input."""
        self._put_back()
        for name, value in next(self._turns).items():
            instance.inputs[name].copy_(value)


class ForwardTarget:
    """A module without gradients, on one device."""

    runs: Mapping[Role, int] = MappingProxyType({Role.FORWARD: 1})
    first = AS_GIVEN
    must_agree = False
    captures_take_long = False

    def __init__(
        self,
        module: nn.Module,
        example: Example,
        options: BuildOptions,
        device: torch.device,
        *,
        tolerance: float,
        observed: Observed,
    ) -> None:
        """`observed`: what the module was before its first call; each recording, check and timing begins there."""
        self.device = device
        self.example = example
        self.tolerance = tolerance
        self.observed = observed
        self.variants = Variants(module)
        self.module = module  # whose weights programs read: the given one, or a copy with some folded or merged
        self.eager = module
        self.budget_s = _BRIEFLY_S if options.quick else measure.figure_s(device)  # of one figure
        self._options = options
        self._samples: Samples | None = None
        self._kept: Instance | None = None  # of a quick build: its only candidate, checked and timed
        limit = options.memory_bytes
        self.available_bytes = devices.memory_bytes(device) if limit is None else limit

    @property
    def records(self) -> int:
        return self.example.batch

    def further(self, first: Programs, kernels: Sequence[Kernels]) -> list[Source]:
        images = self.variants.have_layouts and self._options.layout == "auto"
        layout: Layout = "channels-last" if images else "given"
        program = first[Role.FORWARD].recording.program
        fold, without = self._options.fold, self._options.without
        pairs = foldable(program, self.eager) if fold and Kernel.FOLDED not in without else ()
        groups = mergeable(program, self.eager) if fold and Kernel.MERGED not in without else ()
        # Where compilers are, eager's kernels are tried in channels-last only once: folded, they do less work.
        once = bool(pairs) and "epilogues" in kernels
        eager = [Source(kernels="eager", layout="channels-last")] if images and not once else []
        if pairs or groups:
            eager.append(Source(kernels="eager", layout=layout, folded=pairs, merged=groups))
        sources: list[Source] = []
        for each in kernels:  # the same kernels do less work over folded weights
            if each == "inductor" and "epilogues" in kernels and self._options.fuse != "max":
                continue  # with ours, they are faster nearly always, and to compile both takes twice as long
            if each == "onednn" and not (self._may_pack and packs_weights(program)):
                continue
            merged = groups if each in ("epilogues", "onednn") else ()
            sources.append(Source(kernels=each, layout=layout, folded=pairs, merged=merged, without=without))
        return [*sources, *eager] if "epilogues" in kernels else [*eager, *sources]

    @property
    def _may_pack(self) -> bool:
        """Whether weights stay what they are, so that a copy of them in another layout may be kept."""
        allowed = self._options.fold and Kernel.PACKED not in self._options.without
        return allowed and not self.observed.changing

    def use(self, source: Source) -> None:
        self.module = self.variants.use(source)

    def record(self, source: Source) -> Iterator[tuple[Role, Recording]]:
        self._put_back()
        yield Role.FORWARD, record_source(self.module, source, self.example.inputs, self.device)

    def task_times_us(self, source: Source, role: Role, recording: Recording, plan: Plan) -> tuple[float, ...]:
        if self._options.quick:
            return (0.0,) * len(recording.program.tasks)
        state, example = state_of(self.module), self.example
        return durations_us(recording, plan, state, self.device, example.below, example.integers, self._put_back)

    def capture(self, source: Source, programs: Programs) -> CapturedForward:
        planned = programs[Role.FORWARD]
        self.observed.put_back()
        (instance,) = self.capture_several(planned, 1)
        return CapturedForward(self, instance, planned.recording.program.inputs)

    def capture_several(self, planned: PlannedProgram, count: int) -> tuple[Instance, ...]:
        """Instances of a program over the weights as they lie now. Raises OutOfMemory, EngineError."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return (kept,)
        return capture_several(planned.recording, planned.plan, self.module, self.device, count, planned.memory)

    def let_go(self, instance: Instance) -> None:
        """The search is done with an instance. A quick build tries no other, so it takes this one."""
        if self._options.quick:
            self._kept = instance
        else:
            instance.close()

    def close(self) -> None:
        """Close what a build did not take."""
        if self._kept is not None:
            self._kept.close()

    def compare(self, instance: Instance, ports: tuple[Port, ...], *, thorough: bool = False) -> float:
        """The relative norm against eager, on fresh input. Raises CheckFailed."""
        return verify.check(
            instance,
            self.eager,
            ports,
            self.device,
            tolerance=self.tolerance,
            seed=secrets.randbits(32),
            below=self.example.below,
            integers=self.example.integers,
            observed=self.observed,
            example=self.example.given,
            thorough=thorough,
        )

    def time_us(self, instance: Instance, ports: tuple[Port, ...]) -> float:
        """The time of a replay, over several random inputs."""
        turns = self.turns() | {"before": lambda: self.fill(instance, ports), "budget_s": self.budget_s}
        return measure.time_us(instance.replay, self.device, **turns)

    def turns(self) -> dict[str, Any]:
        """How calls are timed that change the module's state: each sample is one call, from the same state."""
        return {"before": self.observed.put_back, "most": 1} if self.observed.changing else {}

    def alone_us(self, source: Source, role: Role, recording: Recording, plan: Plan) -> float:
        self._put_back()
        (instance,) = capture_several(recording, plan, self.module, self.device, 1)
        try:
            return self.time_us(instance, recording.program.inputs)
        finally:
            instance.close()
            self._put_back()

    def fill(self, instance: Instance, ports: tuple[Port, ...]) -> None:
        """Give an instance the next of several random inputs, the same ones for all sources: their inputs differ only
        in their layout.
        """
        if self._samples is None:
            example = self.example
            self._samples = Samples(ports, example.below, example.integers, self.observed.put_back)
        self._samples.fill(instance)

    def _put_back(self) -> None:
        if self.observed.changing:
            self.observed.put_back()


class CapturedForward:
    """An instance of the forward pass."""

    def __init__(self, target: ForwardTarget, instance: Instance, ports: tuple[Port, ...]) -> None:
        self._target = target
        self._instance = instance
        self._ports = ports

    @property
    def bytes(self) -> int:
        return self._instance.bytes

    def check(self, *, thorough: bool) -> float:
        return self._target.compare(self._instance, self._ports, thorough=thorough)

    def times_us(self) -> dict[Role, float]:
        return {Role.FORWARD: self._target.time_us(self._instance, self._ports)}

    def close(self) -> None:
        self._target.let_go(self._instance)
