"""Shows on stderr what a long command is doing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nimble_jobs.cli import output


@contextmanager
def telling(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Messages passed to the function appear beside the elapsed time, in one line that vanishes at the end. If stderr
    is no terminal, each change gets its own line. With `quiet` nothing is printed.
    """
    if quiet:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (SpinnerColumn(), TimeElapsedColumn(), text)
    redirect = sys.stdout.isatty()  # output to a file or a pipe must stay
    with Progress(*columns, console=output.error_console(), transient=True, redirect_stdout=redirect) as progress:
        task = progress.add_task("starting")
        yield lambda doing: progress.update(task, description=doing)


class _Lines:
    """A line for each change."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, doing: str) -> None:
        if doing != self._last:
            output.note(doing)
        self._last = doing
