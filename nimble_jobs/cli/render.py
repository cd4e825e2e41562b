"""Styles of states, and panels."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from nimble_jobs.cli import output
from nimble_jobs.job import JobState
from nimble_jobs.plural import count
from nimble_jobs.views import figures

STATE_STYLE: dict[str, str] = {
    JobState.QUEUED: "cyan",
    JobState.RUNNING: "bold yellow",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "magenta",
    JobState.QUARANTINED: "bold red",
}

Section = tuple[str, list[tuple[str, str]]]  # a title, and lines of name and value


def candidates(found: Sequence[dict[str, Any]]) -> list[Section]:
    """One panel with a line for each candidate that was built and measured; none if there were none."""
    lines = []
    for candidate in found:
        parts = []
        if candidate.get("replay_us") is not None:
            parts.append(figures.micros(candidate["replay_us"]))
        if candidate.get("peak_bytes") is not None:
            parts.append(figures.size(candidate["peak_bytes"]))
        if candidate.get("error") is not None:
            parts.append(f"error {candidate['error']:.2g}")
        chosen = "chosen, " if candidate.get("chosen") else ""
        measured = f"{', '.join(parts)}; " if parts else ""
        lines.append((str(candidate["name"]), f"{measured}{chosen}{candidate['reason']}"))
    return [("Candidates", lines)] if lines else []


def choices(found: Sequence[dict[str, Any]]) -> list[Section]:
    """One panel with a line for each kind of task that can run in several ways; none if there were none."""
    lines = []
    for choice in found:
        times = choice["times"]
        others = [f"{way} {figures.micros(us)}" for way, us in times["times_us"] if way != times["chosen"]]
        chosen_us = dict(times["times_us"])[times["chosen"]]
        said = f"{count(choice['tasks'], 'task')}, {times['chosen']} {figures.micros(chosen_us)}"
        said += f", not {', '.join(others)}" if others else ""
        said += "".join(f"; {way} failed: {why}" for way, why in times.get("failed", ()))
        lines.append((times["task"], f"{said}; measured {_measured(times)}"))
    return [("Tasks", lines)] if lines else []


def _measured(times: dict[str, Any]) -> str:
    if times["measured_at"] is None:
        return "by this build"
    day = datetime.fromtimestamp(times["measured_at"], UTC).date().isoformat()
    return f"for {times['measured_for']} on {day}" if times["measured_for"] else f"on {day}"


def sections(parts: Sequence[Section]) -> None:
    """Panels on a terminal, `title.name: value` lines in a pipe. Sections without lines are left out."""
    parts = [(title, lines) for title, lines in parts if lines]
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
    if name == "error":  # a job's error is text; a schedule's is a relative norm
        return "" if value[:1].isdigit() else "red"
    return "red" if name == "fallback" else ""
