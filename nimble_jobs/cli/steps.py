"""A progress bar for a known number of steps: on terminals, with rate and remaining time, gone when it is done."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from nimble_jobs.cli import output

T = TypeVar("T")


def steps(values: Iterable[T], total: int, description: str) -> Iterator[T]:
    """The values as they come; on a terminal a bar on stderr counts them."""
    if not sys.stderr.isatty():
        yield from values
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rate = TextColumn("{task.fields[rate]}")
    with Progress(*columns, rate, console=output.error_console(), transient=True) as progress:
        task = progress.add_task(description, total=total, rate="")
        for value in values:
            progress.advance(task)
            speed = progress.tasks[task].speed
            progress.update(task, rate=f"{speed:,.1f}/s" if speed else "")
            yield value
