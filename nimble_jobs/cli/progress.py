"""Live views of running jobs on stderr, read from the database, for `run`, `wait` and `submit --wait`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nimble_jobs.cli import output
from nimble_jobs.errors import NotFinishedInTime
from nimble_jobs.job import Job, JobState
from nimble_jobs.views import figures, waits
from nimble_jobs.views import jobs as job_view

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

    from nimble_jobs.store import Store

_POLL_S = 0.2
_RECOVER_S = 2.0  # how often to recover jobs whose process died; without a worker nothing else does
_MANY = 8  # with more jobs than this, ended ones are hidden
_WIDE = 100  # columns of a terminal with room for a long bar and counts


class View(Protocol):
    """A view of jobs' progress."""

    def update(self, jobs: Sequence[Job]) -> None: ...

    def close(self) -> None: ...


class Silent:
    """Shows nothing."""

    def update(self, jobs: Sequence[Job]) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line for each change, for logs and pipes."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def update(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            text = job.state.value
            if job.state is JobState.RUNNING:
                text = " ".join(filter(None, ["running", job_view.phase(job), job_view.schedule_state(job)]))
            if self._seen.get(job.id) != text and not job.state.final:
                output.note(f"{job.name} {job.id} {text}")
            self._seen[job.id] = text

    def close(self) -> None: ...


class Bars:
    """One bar a job, with rate, remaining time and schedule state. They vanish at the end; a summary stays."""

    def __init__(self) -> None:
        from rich.progress import Progress

        console = output.error_console()
        self._progress: Progress = Progress(*_columns(console.width), console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._overall: TaskID | None = None
        self._progress.start()

    def update(self, jobs: Sequence[Job]) -> None:
        many = len(jobs) > _MANY
        if many:
            ended = sum(job.state.final for job in jobs)
            if self._overall is None:
                self._overall = self._progress.add_task("all jobs", total=len(jobs), rate="", state="")
            self._progress.update(self._overall, completed=ended)
        for job in jobs:
            wanted = job.state is JobState.RUNNING if many else True
            if not wanted:
                if (old := self._tasks.pop(job.id, None)) is not None:
                    self._progress.remove_task(old)
                continue
            if job.id not in self._tasks:
                self._tasks[job.id] = self._progress.add_task(job.name, total=None, rate="", state="")
            self._progress.update(
                self._tasks[job.id],
                completed=job.records_done,
                total=job.records_total,
                rate=job_view.steps_rate(job.timings) if job.state is JobState.RUNNING else "",
                state=_state(job),
            )

    def close(self) -> None:
        self._progress.stop()


def view(*, quiet: bool) -> View:
    if quiet:
        return Silent()
    return Bars() if sys.stderr.isatty() else Lines()


def watch(
    store: Store,
    ids: Sequence[str],
    *,
    timeout_s: float | None,
    quiet: bool,
    attend: Callable[[Job], None] | None = None,
) -> list[Job]:
    """Wait for the jobs and return them; `attend` is called repeatedly with unfinished ones, to ensure a worker.

    Raises NotFinishedInTime after `timeout_s` seconds.
    """
    from nimble_jobs import client

    shown = view(quiet=quiet)
    started = time.monotonic()
    silent = quiet or attend is not None
    recover_at = started
    done: dict[str, Job] = {}
    try:
        while True:
            if time.monotonic() >= recover_at:
                recover_at = time.monotonic() + _RECOVER_S
                client.recover(store)
            jobs = [done.get(job_id) or store.jobs.get(job_id) for job_id in ids]
            done |= {job.id: job for job in jobs if job.state.final}
            shown.update(jobs)
            open_jobs = [job for job in jobs if not job.state.final]
            if not open_jobs:
                return jobs
            if attend:
                for job in open_jobs:
                    attend(job)
            waited = time.monotonic() - started
            if timeout_s is not None and waited >= timeout_s:
                raise NotFinishedInTime(_late(open_jobs, timeout_s))
            if not silent and waited > 2 and all(job.state is JobState.QUEUED for job in open_jobs):
                silent = True
                if not client.live_workers(store=store):
                    output.note(f"no worker is running; {waits.START}")
            time.sleep(_POLL_S if timeout_s is None else max(0.0, min(_POLL_S, timeout_s - waited)))
    except KeyboardInterrupt:
        shown.close()
        output.note(f"no longer waiting, but the job continues; wait again with: nimble-jobs wait {' '.join(ids)}")
        raise
    finally:
        shown.close()


@contextmanager
def beside(home: Path, job_id: str, *, quiet: bool) -> Iterator[None]:
    """Show a job of this process, from a thread with its own connection."""
    if quiet:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_show, args=(home, job_id, stop), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _show(home: Path, job_id: str, stop: threading.Event) -> None:
    from nimble_jobs.store import open_store

    store = open_store(home)
    shown = view(quiet=False)
    try:
        while not stop.wait(_POLL_S):
            shown.update([store.jobs.get(job_id)])
    finally:
        shown.close()
        store.close()


def _late(jobs: Sequence[Job], timeout_s: float) -> str:
    names = ", ".join(f"{job.name} {job.id} is {job.state.value}" for job in jobs[:5])
    more = f" and {len(jobs) - 5} more" if len(jobs) > 5 else ""
    return f"not finished after {figures.duration(timeout_s)}: {names}{more}"


def _state(job: Job) -> str:
    if job.state is not JobState.RUNNING:
        return "starting" if job.foreground and not job.state.final else job.state.value
    if job.phase not in (None, "run"):
        return str(job_view.phase(job))
    return job_view.training(job.timings) or job_view.schedule_state(job) or "running"


def _columns(width: int) -> list[ProgressColumn]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column
    from rich.text import Text

    wide = width >= _WIDE

    class Rate(ProgressColumn):
        """Steps a second of a training, otherwise records or jobs."""

        def render(self, task: Task) -> Text:
            return Text((task.fields["rate"] or figures.rate(task.speed or task.finished_speed)).rjust(8))

    def whole(**options: Any) -> Column:
        return Column(no_wrap=True, overflow="ellipsis", **options)

    return [
        TextColumn("{task.description}", table_column=whole(min_width=8, max_width=20 if wide else 12)),
        BarColumn(bar_width=18 if wide else 6),
        MofNCompleteColumn(table_column=whole()) if wide else TaskProgressColumn(table_column=whole()),
        Rate(table_column=whole()),
        TimeRemainingColumn(compact=True, table_column=whole()),
        TextColumn("{task.fields[state]}", style="cyan", table_column=whole()),
    ]
