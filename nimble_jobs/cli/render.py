"""How values look to people: durations, rates, sizes, states, and the rows and panels made of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nimble_jobs.cli import file_counts, output
from nimble_jobs.cli.listing import Row
from nimble_jobs.job import Attempt, Event, Job, JobState

STATE_STYLE: dict[str, str] = {
    JobState.QUEUED: "cyan",
    JobState.RUNNING: "bold yellow",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "magenta",
    JobState.QUARANTINED: "bold red",
}

_LISTED = 8  # of a list, or of events of one kind in a row; JSON has all

Section = tuple[str, list[tuple[str, str]]]  # a title, and lines of name and value


def duration(seconds: float | None) -> str:
    """Two units at most: 0.4s, 12s, 3m 20s, 2h 05m, 4d 03h."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24:02d}h"


def micros(us: float | None) -> str:
    """A replay time with three digits: 85.2µs, 1.24ms."""
    if us is None:
        return "-"
    if us < 1000:
        return f"{us:.1f}µs"
    return f"{us / 1e3:.2f}ms" if us < 1e5 else f"{us / 1e3:.0f}ms"


def size(nbytes: float | None) -> str:
    """Binary units: 512 B, 1.5 MiB."""
    if nbytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def clock(at: float | None) -> str:
    """A time in UTC, to the second."""
    return str(output.iso(at))[:19].replace("T", " ") + " UTC" if at else "-"


def rate(records_per_s: float | None) -> str:
    """Records a second: 3.4/s, 1,204/s."""
    if not records_per_s:
        return "-"
    return f"{records_per_s:,.1f}/s" if records_per_s < 100 else f"{records_per_s:,.0f}/s"


def job_row(job: Job, now: float, waits: str | None = None) -> Row:
    """The JSON row of a job in `ls`; `waits` is why it does not run yet."""
    elapsed = None if job.started_at is None else max(0.0, (job.finished_at or now) - job.started_at)
    return {
        "id": job.id,
        "name": job.name,
        "kind": job.kind,
        "state": job.state.value,
        "attempt": job.attempt,
        "created_at": output.iso(job.created_at),
        "started_at": output.iso(job.started_at),
        "finished_at": output.iso(job.finished_at),
        "elapsed_s": None if elapsed is None else round(elapsed, 3),
        "records_done": job.records_done,
        "records_total": job.records_total,
        "records_bad": job.records_bad,
        "records_per_s": records_per_s(job, now),
        "phase": job.phase,
        "hit": job.schedule.get("hit"),
        "runs": job.schedule.get("runs"),
        "device": job.device,
        "priority": job.priority,
        "urgency": job.urgency,
        "held": job.held,
        "group": job.group,
        "array": job.array,
        "array_index": job.array_index,
        "worker": job.worker,
        "error": job.error,
        "waits": waits,
    }


def counts(jobs: Sequence[Job]) -> dict[str, int]:
    """How many jobs are in each state."""
    found = Counter(job.state for job in jobs)
    return {state.value: found[state] for state in JobState}


def records_per_s(job: Job, now: float) -> float | None:
    """What the job measured, else a mean since its attempt began."""
    measured = job.timings.get("records_per_s")
    if measured:
        return round(float(measured), 3)
    if job.state is not JobState.RUNNING or job.started_at is None or not job.records_done:
        return None
    return round(job.records_done / max(now - job.started_at, 1e-3), 3)


def job_json(
    job: Job, attempts: Sequence[Attempt], events: Sequence[Event], now: float, waits: str | None = None
) -> Row:
    """The JSON of `show`."""
    return job_row(job, now, waits) | {
        "max_attempts": job.max_attempts,
        "key": job.key,
        "after": list(job.after),
        "after_when": {parent: when.value for parent, when in job.after_when.items()},
        "skipped_by": job.skipped_by,
        "queued_at": output.iso(job.queued_at),
        "attempts_before": job.attempts_before,
        "not_before": output.iso(job.not_before) if job.not_before else None,
        "timeout_s": job.timeout_s,
        "cancel_requested": job.cancel_requested,
        "foreground": job.foreground,
        "spec": job.spec,
        "schedule": job.schedule,
        "timings": job.timings,
        "outputs": job.outputs,
        "only_new": file_counts.only_new(job, events),
        "attempts": [
            {
                "number": attempt.number,
                "worker": attempt.worker,
                "started_at": output.iso(attempt.started_at),
                "finished_at": output.iso(attempt.finished_at),
                "outcome": attempt.outcome,
                "error": attempt.error,
            }
            for attempt in attempts
        ],
        "events": [event_json(event) for event in events],
    }


def event_json(event: Event) -> dict[str, Any]:
    return {
        "at": output.iso(event.at),
        "attempt": event.attempt,
        "kind": event.kind,
        "message": event.message,
        "data": event.data,
    }


def progress(row: dict[str, Any]) -> str:
    """640/1437 44%; the total is unknown until the input is opened."""
    done, total = row["records_done"], row["records_total"]
    if total == 0:
        return "empty"
    if total is None:
        return str(done) if done else "-"
    return f"{done}/{total} {100 * done // total:>3}%"


def state_text(row: Row) -> str:
    """The state of a job's row; of one that prepares its run, what it does."""
    if row["held"] and row["state"] == JobState.QUEUED:
        return "queued held"
    if row["state"] == JobState.RUNNING and row["phase"] not in (None, "run"):
        return f"running {row['phase']}"
    return str(row["state"])


_BEGUN = {  # where a job stands that began in eager
    "eager": "not built, in eager",
    "quick": "not built, eager's kernels captured",
    "building": "being built beside the job",
    "moved": "built beside the job",
}


def first_run(job: Job) -> list[tuple[str, str]]:
    """What a job that began in eager decided, why, and what each move brought."""
    found = job.schedule.get("first_run") or {}
    lines = [("first run", str(found["why"]))] if found.get("why") else []
    for move in found.get("moves", ()):
        to = "eager's kernels, captured" if move["to"] == "quick" else "the stored schedule"
        took = f"in {duration(move['took_s'])}" if move.get("took_s") is not None else ""
        before, after = move.get("record_s_before"), move.get("record_s")
        gain = f": {rate(1 / before)} before, {rate(1 / after)} after" if before and after else ""
        lines.append(("moved", f"before record {move['record']:,} to {to} {took}{gain}"))
    return lines


def schedule_state(job: Job) -> str:
    """How the job came by its schedule, in words; empty before it is known."""
    if fallback(job):
        return "eager"
    begun = _BEGUN.get(str(job.schedule.get("progress")))
    if begun is not None and job.schedule.get("first_run"):
        return begun
    hit = job.schedule.get("hit")
    return {"miss": "built", "stored": "stored hit", "resident": "resident hit"}.get(str(hit), "")


def phase(job: Job) -> str | None:
    """What a running job does right now; of a build, the candidate that is tried: build: eager kernels, 2 streams."""
    trying = job.schedule.get("trying")
    return f"build: {trying}" if job.phase == "build" and trying else job.phase


def fallback(job: Job) -> str | None:
    """Why the job ran in eager instead of its schedule, if it did."""
    reason = job.schedule.get("fallback")
    return str(reason) if reason else None


def weights(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Where weights come from that no file holds, as the job said it last; nothing for others."""
    said = [event.message for event in events if event.kind == "weights"]
    return [("weights", text) for text in said[-1:]]


def speedup(values: dict[str, Any]) -> str:
    """Replay against eager, with the device that both were measured on; empty where nothing was measured."""
    replay_us, eager_us = values.get("replay_us"), values.get("eager_us")
    if not replay_us or not eager_us:
        return ""
    device = values.get("device_name") or values.get("device")
    text = f"replay {micros(replay_us)}, eager {micros(eager_us)}, {eager_us / replay_us:.2f}×"
    if values.get("runs") == "eager" and not values.get("fallback"):
        text = f"eager is faster here: {text}"
    return f"{text} on {device}" if device else text


def candidates(found: Sequence[dict[str, Any]]) -> list[Section]:
    """One panel with a line for each way to run the model that was built and measured; none where there were none."""
    lines = []
    for candidate in found:
        parts = []
        if candidate.get("replay_us") is not None:
            parts.append(micros(candidate["replay_us"]))
        if candidate.get("peak_bytes") is not None:
            parts.append(size(candidate["peak_bytes"]))
        if candidate.get("error") is not None:
            parts.append(f"error {candidate['error']:.2g}")
        chosen = "chosen, " if candidate.get("chosen") else ""
        measured = f"{', '.join(parts)}; " if parts else ""
        lines.append((str(candidate["name"]), f"{measured}{chosen}{candidate['reason']}"))
    return [("Candidates", lines)] if lines else []


def summary(job: Job) -> str:
    """One line on how a job ended."""
    head = f"{job.name} {job.id} {job.state.value}"
    if job.state is not JobState.SUCCEEDED:
        return f"{head}: {job.error}" if job.error else head
    elapsed = None if job.started_at is None or job.finished_at is None else job.finished_at - job.started_at
    if job.outputs.get("empty"):
        return f"{head}: empty, no new files"
    parts = [f"{job.records_done:,} records in {duration(elapsed)}"]
    if job.records_bad:
        parts.append(f"{job.records_bad:,} bad")
    measured = job.timings.get("records_per_s")
    if measured:
        parts.append(rate(measured))
    if job.schedule.get("eager_is_faster", job.schedule.get("runs") == "eager") and not fallback(job):
        parts.append("eager is faster here")
    elif schedule_state(job):
        parts.append(f"schedule: {schedule_state(job)}")
    path = job.outputs.get("path")
    return f"{head}: {', '.join(parts)}" + (f"; {short_path(path)}" if path else "")


def short_path(path: str) -> str:
    """Relative where it lies in the current folder."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def sections(parts: Sequence[Section]) -> None:
    """Panels on a terminal, `title.name: value` lines in a pipe."""
    if not output.on_terminal():
        for title, lines in parts:
            for name, value in lines:
                output.emit(f"{title.lower()}.{name}: {value}")
        return
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = output.console()
    for title, lines in parts:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", max_width=console.width * 2 // 5, overflow="fold")
        grid.add_column(overflow="fold")
        for name, value in lines:
            grid.add_row(Text(output.visible(name)), Text(output.visible(value), style=_value_style(name, value)))
        console.print(Panel(grid, title=title, title_align="left", border_style="dim", padding=(0, 1)))


def _value_style(name: str, value: str) -> str:
    if name == "state":
        return STATE_STYLE.get(value.split()[0], "")
    if name == "error":  # of a job, in words; a schedule's is a relative norm
        return "" if value[:1].isdigit() else "red"
    return "red" if name == "fallback" else ""


def training(timings: dict[str, Any]) -> str:
    """How a training goes: loss 0.0812, accuracy 97.5%. Empty where nothing of it was measured yet."""
    parts = []
    if "loss" in timings:
        parts.append(f"loss {timings['loss']:.3g}")
    if "accuracy" in timings:
        parts.append(f"accuracy {timings['accuracy']:.1%}")
    return ", ".join(parts)


def steps_rate(timings: dict[str, Any]) -> str:
    """Of a training: 312 steps/s. Empty where it was not measured yet."""
    found = timings.get("steps_per_s")
    return f"{rate(found).removesuffix('/s')} steps/s" if found else ""


def history(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Time and text of events; of many of one kind in a row the first and the last ones."""
    lines: list[tuple[str, str]] = []
    for kind, group in itertools.groupby(events, key=lambda event: event.kind):
        alike = [(str(output.iso(event.at))[11:19], f"{event.kind}: {event.message}") for event in group]
        if len(alike) > _LISTED + 1:
            left_out = len(alike) - _LISTED
            alike[1 : -_LISTED + 1] = [("...", f"{kind}: {left_out} more; --json has all")]
        lines += alike
    return lines


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as dotted names, nulls left out."""
    lines: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += flat(value, f"{prefix}{name}.")
        elif value is not None:
            lines.append((prefix + name, value_text(name, value)))
    return lines


def few(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def value_text(name: str, value: Any) -> str:
    """A value in the unit that its name ends with."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        shown = [value_text("", item) for item in value[:_LISTED]]
        return ", ".join(shown) + (f" and {len(value) - _LISTED:,} more" if len(value) > _LISTED else "")
    if isinstance(value, (int, float)):
        if name.endswith("_us"):
            return micros(value)
        if name.endswith("bytes"):
            return size(value)
        if name.endswith("per_s"):
            return rate(value)
        if name.endswith("_s"):
            return duration(value)
        return f"{value:.3g}" if isinstance(value, float) else f"{value:,}"
    return str(value)
