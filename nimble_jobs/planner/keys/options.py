"""Options of a build: read from a spec, written into a key, and read back from a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nimble_jobs.kernel_switches import NOTHING, PART, Without, key_parts, switched_off
from nimble_jobs.spec import ScheduleSpec

BUDGET_S = 900.0  # of a search whose spec gives none


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Bounds of the search for a schedule."""

    streams: Literal["auto"] | int = "auto"  # auto: as many as measure fastest; N: at most N
    fuse: Literal["auto", "off", "max"] = "auto"  # off: eager kernels; auto: Inductor's too; max: also max-autotune
    purpose: Literal["latency", "throughput"] = "latency"  # the shortest replay, or the most records a second
    in_flight: Literal["auto"] | int = "auto"  # replays in flight at once, if the purpose is throughput
    layout: Literal["auto", "given"] = "auto"  # given: the weights stay where they lie
    fold: bool = False  # normalisations may be folded into convolutions: the weights will not change
    without: Without = NOTHING  # kernels and rewrites of our own that are switched off
    tolerance: float | None = None  # relative norm against eager; None: the default of the dtype
    budget_s: float = BUDGET_S  # no further candidate is begun after this time
    eager: Literal["candidate", "reference"] = "candidate"  # reference: a schedule is wanted even if eager is faster
    memory_bytes: int | None = None  # candidates that need more, beyond the module's state, are left out
    quick: bool = False  # only the first candidate, and only its replay is timed, briefly


def options_of(schedule: ScheduleSpec) -> BuildOptions:
    """The bounds that a spec sets."""
    return BuildOptions(
        streams=schedule.streams,
        fuse=schedule.fuse,
        in_flight=schedule.in_flight,
        without=schedule.kernels.without,
        tolerance=schedule.tolerance,
        budget_s=schedule.budget or BUDGET_S,
    )


def option_parts(options: BuildOptions) -> dict[str, str]:
    """The parts of each schedule's key that say what could be tried. Kinds of keys add parts of their own."""
    return {
        "schedule.streams": str(options.streams),
        "schedule.fuse": options.fuse,
        **key_parts(options.without),
    }


def schedule_fields(parts: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a spec's `schedule` that can be read from the parts of a key. Raises KeyError, ValueError."""
    streams, in_flight = (parts.get(f"schedule.{name}", "auto") for name in ("streams", "in_flight"))
    return {
        "streams": streams if streams == "auto" else int(streams),
        "fuse": parts["schedule.fuse"],
        "in_flight": in_flight if in_flight == "auto" else int(in_flight),
        "kernels": {kernel.value: False for kernel in switched_off(parts.get(PART))},
    }
