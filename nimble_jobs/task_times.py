"""How long each way to run a kind of task takes, as measured. Schedules hold these values, and the store keeps them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

Parts = Mapping[str, str]  # all that decides the time of a kind of task: operation, shapes, ways, device, software


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """The times of all ways to run a kind of task, and the way that was chosen."""

    task: str  # in words
    times_us: tuple[tuple[str, float], ...]  # by way
    chosen: str  # one of the ways
    failed: tuple[tuple[str, str], ...] = ()  # ways that do not work here, each with the reason
    measured_for: str | None = None  # the model whose build measured this; None: the current build
    measured_at: float | None = None  # Unix seconds; None: in the current build

    @classmethod
    def from_plain(cls, raw: Mapping[str, Any]) -> Self:
        """From parsed JSON. Raises ValueError if it is not sound."""
        try:
            times_us = tuple((str(way), float(us)) for way, us in raw["times_us"])
            failed = tuple((str(way), str(why)) for way, why in raw.get("failed", ()))
            made = cls(**{**raw, "times_us": times_us, "failed": failed})
            said = (text for pair in failed for text in pair)
            said = (text for pair in failed for text in pair)
            texts = (made.task, made.chosen, made.measured_for or "", *(way for way, _ in made.times_us), *said)
            times = (made.measured_at or 0.0, *(us for _, us in made.times_us))
            printable = all(isinstance(text, str) and text.isprintable() for text in texts)
            if not (printable and all(math.isfinite(time) and time >= 0 for time in times)):
                raise ValueError("not the times of a kind of task")
            if made.chosen not in dict(made.times_us):
                raise ValueError(f"the chosen way, {made.chosen}, was not measured")
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"not the times of a kind of task: {type(e).__name__}: {e}") from e
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """The way in which a program runs a kind of task."""

    times: TaskTimes
    tasks: int  # how many of this kind the program has

    @classmethod
    def from_plain(cls, raw: Mapping[str, Any]) -> Self:
        """From the JSON of a schedule. Raises KeyError, TypeError, ValueError."""
        return cls(times=TaskTimes.from_plain(raw["times"]), tasks=int(raw["tasks"]))


def task_key(parts: Parts) -> str:
    """The key of a kind of task: SHA-256, in hex."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True, separators=(",", ":")).encode()).hexdigest()
