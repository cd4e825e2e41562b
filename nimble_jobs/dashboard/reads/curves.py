"""The curves of a training, thinned so that a page can draw them.

A long training's metrics.jsonl has millions of lines, so it is sampled: a line at each of some hundred places that are
spread evenly over the file. Lines of epochs are rarer and are told by the events of the job, which have them all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nimble_jobs.job import Event
from nimble_jobs.regular import open_regular

POINTS = 400  # most points of a series
_LINE = 4096  # bytes that surely hold a whole line behind any place
_SHORT = 1 << 20  # bytes of a file that is read whole
_LEFT_OUT = ("kind", "epoch", "skipped")


def points(path: Path | None, events: Iterable[Event]) -> list[dict[str, float]]:
    """One object for each step that is shown, by `step`: figures by name; those of held-out data begin with `val_`.

    Without the file, as of a training that failed or whose output was replaced: the means of each epoch.
    """
    found: dict[int, dict[str, float]] = {}
    for line in _sampled(path) if path is not None else ():
        _take(found, line)
    told_by_steps = {name for row in found.values() for name in row} - {"step"}
    for metrics in _thinned([event.data for event in events if event.kind == "epoch"]):
        _take(found, {name: value for name, value in metrics.items() if name not in told_by_steps})
    return [found[step] for step in sorted(found)]


def _take(found: dict[int, dict[str, float]], line: Mapping[str, Any]) -> None:
    step = line.get("step")
    if not isinstance(step, int):
        return
    row = found.setdefault(step, {"step": step})
    for name, value in line.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if name not in _LEFT_OUT and number:
            row[str(name)] = value


def _thinned(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Some hundred of the rows, the last one among them."""
    every = max(1, math.ceil(len(rows) / POINTS))
    return [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % every == 0]


def _sampled(path: Path) -> list[dict[str, Any]]:
    """Lines about steps, spread evenly over the file, the last whole one among them."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            if size <= _SHORT:
                file.seek(0)
                steps = [row for line in file.read(_SHORT).split(b"\n") if (row := _step(line)) is not None]
                return [dict(row) for row in _thinned(steps)]
            places = [round(i * (size - _LINE) / (POINTS - 1)) for i in range(POINTS)]
            rows = []
            for place in places:
                file.seek(place)
                lines = file.read(_LINE).split(b"\n")
                # The first part may be cut off on its left, the last one on its right.
                whole = [row for line in lines[1:-1] if (row := _step(line)) is not None]
                rows += whole[-1:] if place == places[-1] else whole[:1]
            return rows
    except OSError:
        return []


def _step(line: bytes) -> dict[str, Any] | None:
    """A line about a step; None for any other one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and row.get("kind") == "step" else None
