"""What the search works on: a forward pass, a training step, or a forward pass with its backward.

A target knows its programs, and how to record and capture them; what it captured can be checked and timed. The search
knows which sources and plans to try, in which order, and when to stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nimble_jobs.engine.recorder import Recording
from nimble_jobs.graph import Analysis
from nimble_jobs.graph.memory import MemoryPlan
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.sources.source import Kernels, Source
from nimble_jobs.schedule import GraphFacts, Plan


@dataclass(frozen=True, kw_only=True)
class PlannedProgram:
    """One program of a candidate, with everything that it takes to capture it."""

    recording: Recording
    analysis: Analysis
    plan: Plan
    memory: MemoryPlan
    facts: GraphFacts
    durations_us: tuple[float, ...]  # measured time of each task alone, by task index
    replay_us: float = 0.0  # once it was measured


Programs = Mapping[Role, PlannedProgram]


class Captured(Protocol):
    """All programs of a candidate over the live tensors."""

    @property
    def bytes(self) -> int:
        """Device memory beyond the module's state."""

    def check(self, *, thorough: bool) -> float:
        """The largest relative norm of a difference from eager. Raises CheckFailed."""

    def times_us(self) -> dict[Role, float]:
        """The time of a replay of each program."""

    def close(self) -> None: ...


class Target(Protocol):
    """What the search works on."""

    @property
    def device(self) -> torch.device: ...

    @property
    def runs(self) -> Mapping[Role, int]:
        """The programs in the order in which they run, each with how often it runs until all is done once."""

    @property
    def records(self) -> int:
        """How many records that works through."""

    @property
    def first(self) -> Source:
        """The source that is always tried, and must work."""

    @property
    def must_agree(self) -> bool:
        """Whether the search ends when the first candidate disagrees with eager. If not, another one may agree."""

    @property
    def captures_take_long(self) -> bool:
        """Whether few plans of a source are worth a capture, and only the fastest of them a check."""

    @property
    def available_bytes(self) -> int | None:
        """The memory whose free share is weighed against time; None: time alone decides."""

    def further(self, first: Programs, kernels: Sequence[Kernels]) -> list[Source]:
        """Sources to try after the first, whose programs are given, with these compilers at most."""

    def use(self, source: Source) -> None:
        """Lay the module's weights out as a source needs them. `AS_GIVEN` undoes that."""

    def record(self, source: Source) -> Iterator[tuple[Role, Recording]]:
        """Record the programs one after the other. Raises CannotRecord."""

    def task_times_us(self, source: Source, role: Role, recording: Recording, plan: Plan) -> tuple[float, ...]:
        """The time of each task alone, by task index. Raises EngineError, OutOfMemory."""

    def capture(self, source: Source, programs: Programs) -> Captured:
        """Capture all programs. Raises EngineError, OutOfMemory."""

    def alone_us(self, source: Source, role: Role, recording: Recording, plan: Plan) -> float:
        """The time of a replay of one program by itself, in microseconds, which is not checked. Raises EngineError,
        OutOfMemory.
        """


def name_of(source: Source, programs: Programs) -> str:
    """As a candidate is called: the source's name, and the streams of its programs."""
    streams = " and ".join(str(p.plan.streams) for p in programs.values())
    return f"{source.name}, {streams} stream{'' if streams == '1' else 's'}"


def most_streams(programs: Programs) -> int:
    """The streams of the plan that has the most."""
    return max(planned.plan.streams for planned in programs.values())


def whole_us(target: Target, times_us: Mapping[Role, float]) -> float:
    """The time of all programs together, each as often as it runs."""
    return sum(count * times_us[role] for role, count in target.runs.items())
