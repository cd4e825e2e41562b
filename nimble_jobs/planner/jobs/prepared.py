"""A model that is ready to run for a job, and what the user should know about how it came to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nimble_jobs.job import Hit
from nimble_jobs.payback import Costs, Decision
from nimble_jobs.planner.jobs.loaded import Loaded
from nimble_jobs.planner.keys.request import tolerance_of


class Progress(StrEnum):
    """How far a job is that began before its schedule was built."""

    EAGER = "eager"  # began in eager, and what is built is decided once its rate is known
    QUICK = "quick"  # moved to the quick candidate, and nothing better is being built
    BUILDING = "building"
    MOVED = "moved"  # to the better schedule
    STAYS = "stays"  # none came of the build, or none pays


@dataclass(kw_only=True)
class FirstRun:
    """For a job that began in eager: what it measured, what was decided, and at which batches it moved."""

    parts: Mapping[str, str]  # of the key
    began: tuple[int, float] | None = None  # records done and seconds run, after what is slow only once
    decision: Decision | None = None
    costs: Costs | None = None
    why: str = ""  # what was decided, in words
    moves: list[dict[str, Any]] = field(default_factory=list)
    asked_s: float = 0.0  # when the store was asked last for what others may have built
    wanted: bool = False  # the store knows that this job did without

    def summary(self) -> dict[str, Any]:
        """What the job's schedule says about its first run."""
        decided = self.decision
        return {
            "why": self.why or None,
            "plan": decided.plan.value if decided is not None else None,
            "cost_s": decided.cost_s if decided is not None else None,
            "saving_s": decided.saving_s if decided is not None else None,
            "later": decided.later if decided is not None else True,
            "moves": list(self.moves),
        }


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model that is ready to run, and how it came to be."""

    loaded: Loaded
    hit: Hit
    load_s: float  # from the request to the module on the device
    build_s: float  # recording, capturing, checking, measuring
    miss_reason: str | None = None
    progress: Progress | None = None  # of a progressive job that missed; until it moved, `loaded` is this job's alone
    stays_because: str | None = None  # why the better schedule could not be loaded, though it is stored
    first_run: FirstRun | None = None  # of a job that began in eager

    def summary(self) -> dict[str, Any]:
        """What `show` prints of the schedule."""
        schedule, loaded = self.loaded.schedule, self.loaded
        summary: dict[str, Any] = {
            "key": loaded.key,
            "hit": self.hit.value,
            "runs": "schedule" if loaded.instances else "eager",
            "fallback": loaded.fallback,
            "spared": loaded.spared,
            "eager_is_faster": loaded.ready and not loaded.instances,
            "miss_reason": self.miss_reason,
            "progress": self.progress.value if self.progress is not None else None,
            "first_run": self.first_run.summary() if self.first_run is not None else None,
        }
        if schedule is not None:
            summary |= {"device": schedule.device, "in_flight": schedule.in_flight, **schedule.summary()}
            summary["tolerance"] = tolerance_of(loaded.request)
        return summary
