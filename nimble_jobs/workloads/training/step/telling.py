"""What a training records on the job about its schedules: what several buckets have in common is said once."""

from __future__ import annotations

from collections.abc import Sequence

from nimble_jobs.planner.search.contest import faster_in_eager
from nimble_jobs.planner.step.prepare import PreparedStep
from nimble_jobs.planner.step.validation import PreparedForward
from nimble_jobs.plural import count
from nimble_jobs.workloads.context import Event
from nimble_jobs.workloads.training.step.setup import Setup


def tell_steps(
    setups: Sequence[Setup], steps: Sequence[PreparedStep], event: Event, *, load_s: float, build_s: float
) -> None:
    """Record where the steps' schedules came from, or why there are none. The seconds are those of all together."""
    took = f": loading took {load_s:.3f} s" + (f", building {build_s:.3f} s" if build_s > 0 else "")
    for alike in _alike([_outcome(one) for one in steps]):
        first, which = steps[alike[0]], _which(setups, alike)
        data = {"key": first.key}
        if first.step.fallback is not None:
            verb = "run" if len(alike) > 1 else "runs"
            event("fallback", f"{which + ' ' if which else ''}{verb} in eager: {first.step.fallback}", data)
            continue
        schedule = first.step.schedule
        if len(alike) == 1:
            said = f"{_hit(first)}{took}{faster_in_eager(schedule)}"
        else:
            said = f"{_hit(first, named=False)}{took}"
            said += "; eager is faster here" if schedule is not None and schedule.runs == "eager" else ""
        event("schedule", f"{which + ': ' if which else ''}{said}", data | {"hit": first.hit.value})
        took = ""


def tell_validations(setups: Sequence[Setup], found: Sequence[PreparedForward], event: Event) -> None:
    """Record where the schedules of validations came from, or why there are none."""
    for alike in _alike([_outcome_of_validation(one) for one in found]):
        first, which = found[alike[0]], _which(setups, alike)
        data, what = {"key": first.key}, f"validation of texts, {which}" if which else "validation"
        if first.failure is not None:
            event("fallback", f"{what}{',' if which else ''} runs in eager: {first.failure}", data)
            continue
        said = "eager is faster here" if first.instance is None else _hit(first, named=len(alike) == 1)
        event("schedule", f"{what}: {said}", data | {"hit": first.hit.value})


def _outcome(one: PreparedStep) -> object:
    if one.step.fallback is not None:
        return one.step.fallback
    return one.hit, one.miss_reason, one.step.schedule is not None and one.step.schedule.runs


def _outcome_of_validation(one: PreparedForward) -> object:
    return one.failure, one.hit, one.miss_reason, one.instance is None


def _alike(outcomes: Sequence[object]) -> list[list[int]]:
    """The places of equal outcomes, in the order of their first ones."""
    found: dict[object, list[int]] = {}
    for place, outcome in enumerate(outcomes):
        found.setdefault(outcome, []).append(place)
    return list(found.values())


def _which(setups: Sequence[Setup], alike: Sequence[int]) -> str:
    """Which buckets these are; empty if there are no buckets."""
    tokens = setups[alike[0]].tokens
    if tokens is None:
        return ""
    if len(alike) == 1:
        return f"up to {tokens} tokens"
    return f"{len(alike)} of {count(len(setups), 'bucket')}"


def _hit(prepared: PreparedStep | PreparedForward, *, named: bool = True) -> str:
    key = f" {prepared.key[:12]}" if named else ""
    reason = f" ({prepared.miss_reason})" if prepared.miss_reason else ""
    return f"{prepared.hit.value}{key}{reason}"
