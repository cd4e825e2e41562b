"""Drawings on disk: what a file name asks for, refused early, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nimble_jobs.draw.dot import to_dot
from nimble_jobs.draw.timeline import to_html, to_svg
from nimble_jobs.draw.trace import to_chrome_trace
from nimble_jobs.errors import UsageError
from nimble_jobs.schedule import Schedule
from nimble_jobs.whole import write_whole

_TIMELINES: dict[str, Callable[[Schedule], str]] = {
    ".html": to_html,
    ".htm": to_html,
    ".svg": to_svg,
    ".json": to_chrome_trace,
}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One file to be drawn, known to be writable when it was asked for."""

    path: Path
    draw: Callable[[Schedule], str]

    @classmethod
    def timeline(cls, path: Path) -> Drawing:
        """The drawing for a suffix: .html, .svg, or .json for a trace.

        Raises UsageError for another suffix or an unwritable path.
        """
        draw = _TIMELINES.get(path.suffix.lower())
        if draw is None:
            raise UsageError(f"--timeline: {path}: unknown suffix {path.suffix!r}; expected .html, .svg or .json")
        return cls(path=writable("--timeline", path), draw=draw)

    @classmethod
    def trace(cls, path: Path) -> Drawing:
        """A Chrome trace, whatever the suffix. Raises UsageError for an unwritable path."""
        return cls(path=writable("--trace", path), draw=to_chrome_trace)

    @classmethod
    def dot(cls, path: Path) -> Drawing:
        """Graphviz DOT, whatever the suffix. Raises UsageError for an unwritable path."""
        return cls(path=writable("--dot", path), draw=to_dot)

    def save(self, schedule: Schedule) -> None:
        """Draw and write. Raises PlanError for a schedule that cannot be drawn, UsageError where writing fails."""
        write(self.path, self.draw(schedule))


def write(path: Path, text: str) -> None:
    """Replace a file by this text, in one step. Raises UsageError where that is not possible."""
    try:
        write_whole(path, text.encode(), mode=0o666)
    except OSError as e:
        raise UsageError(f"{path}: cannot be written: {e.strerror or e}") from e


def writable(option: str, path: Path) -> Path:
    """The path of a file to be written. Raises UsageError naming the option where its folder does not allow it."""
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder; expected a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option}: {path}: the folder {path.parent} does not exist; expected one that does")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: {path}: the folder {path.parent} cannot be written to")
    return path
