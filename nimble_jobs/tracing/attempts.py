"""An attempt as spans, made of what the store knows once the attempt has ended. Never imports OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from nimble_jobs.job import Attempt, Job

_WRONG = ("failed", "lost", "stalled")  # outcomes that set the span's status to error
_LINE_CHARS = 300

AttributeValue = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class SpanValues:
    """A span before it is sent. Times are Unix seconds."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    error: str | None = None  # one line; None: the status is left unset
    parent: str | None = None  # a traceparent
    children: tuple[SpanValues, ...] = ()


def attempt_span(job: Job, attempts: Sequence[Attempt], number: int, *, device: str | None = None) -> SpanValues | None:
    """The span of a job's attempt, with a child for each of its phases; None if the attempt has not ended.

    `device`: the worker's, if it is known. The spec's contents are left out, apart from kind, name and model source.
    """
    attempt = next((each for each in attempts if each.number == number), None)
    if attempt is None or attempt.finished_at is None:
        return None
    end_s = max(attempt.started_at, attempt.finished_at)
    last = number == job.attempt  # only the newest attempt's results are in the job's row
    attributes = {
        "nimble_jobs.job.id": job.id,
        "nimble_jobs.job.name": job.name,
        "nimble_jobs.job.kind": job.kind,
        "nimble_jobs.attempt": number,
        "nimble_jobs.outcome": attempt.outcome or "unknown",
        "nimble_jobs.model.source": _text(job.spec, "model", "source"),
        "nimble_jobs.device": device,
        "nimble_jobs.queue_wait_s": _waited_s(job, attempts, attempt),
        **(_results(job) if last else {}),
    }
    return SpanValues(
        name=f"{job.kind} attempt",
        start_s=attempt.started_at,
        end_s=end_s,
        attributes={name: value for name, value in attributes.items() if value is not None},
        error=_first_line(attempt.error or attempt.outcome or "") if attempt.outcome in _WRONG else None,
        parent=job.traceparent,
        children=tuple(_phases(job, attempt.started_at, end_s)) if last else (),
    )


def _results(job: Job) -> dict[str, AttributeValue | None]:
    rate = job.timings.get("records_per_s")
    return {
        "nimble_jobs.hit": _text(job.schedule, "hit"),
        "nimble_jobs.runs": _text(job.schedule, "runs"),
        "nimble_jobs.records": job.records_done,
        "nimble_jobs.records_bad": job.records_bad,
        "nimble_jobs.records_per_s": float(rate) if isinstance(rate, int | float) else None,
    }


def _waited_s(job: Job, attempts: Sequence[Attempt], attempt: Attempt) -> float:
    """Seconds for which the job could have been claimed: since it was queued, its delay, or its attempt before."""
    earlier = [each.finished_at or each.started_at for each in attempts if each.number < attempt.number]
    delay = [job.not_before] if job.not_before <= attempt.started_at else []
    return max(0.0, attempt.started_at - max([job.queued_at or job.created_at, *earlier, *delay]))


def _phases(job: Job, start_s: float, end_s: float) -> list[SpanValues]:
    """A span for each phase. The first is the claim, which lasts until the job's process reports another phase."""
    noted = job.timings.get("phases")
    marks = [("claim", start_s)]
    for each in noted if isinstance(noted, list) else []:
        match each:
            # Times before the attempt belong to an earlier one, which wrote them last.
            case {"phase": str(name), "at": int(at) | float(at)} if start_s <= at <= end_s:
                marks.append((name, max(float(at), marks[-1][1])))
    if len(marks) == 1:
        return []
    bounds = pairwise([*marks, ("", end_s)])
    return [SpanValues(name=name, start_s=at, end_s=until) for (name, at), (_, until) in bounds]


def _text(value: Mapping[str, Any], *names: str) -> str | None:
    found: Any = value
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else None


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:_LINE_CHARS]
