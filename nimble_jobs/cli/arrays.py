"""Many jobs at once: what `submit --from` and `submit --grid` do, and how an array is shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nimble_jobs.cli import options, output, progress
from nimble_jobs.cli.jobs import conclude
from nimble_jobs.errors import UsageError
from nimble_jobs.job import After, Job
from nimble_jobs.plural import count
from nimble_jobs.views import jobs as job_view
from nimble_jobs.views import waits

if TYPE_CHECKING:
    from nimble_jobs.spec import JobSpec
    from nimble_jobs.store import Store


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of `submit` that matter for several jobs."""

    lines: Path | None  # --from
    grid: Sequence[str]  # --grid
    spec: Path | None
    overrides: Sequence[str] = ()
    priority: int | None = None
    after: Sequence[After] = ()
    delay_s: float = 0.0
    timeout_s: float | None = None
    allow_python: Sequence[Path] = ()
    wait: bool = False
    dry_run: bool = False
    quiet: bool = False
    json: bool = False

    @property
    def given(self) -> bool:
        """Whether the options ask for several jobs."""
        return self.lines is not None or bool(self.grid)


def submit(ctx: typer.Context, wanted: Wanted, attend: Callable[[Store], Callable[[Job], None]]) -> None:
    """Queue the jobs and print the id of their array."""
    from nimble_jobs import client, queue

    specs = _load(wanted, options.chosen_home(ctx))
    if wanted.dry_run:
        _show(ctx, specs, wanted)
        return
    with options.store(ctx) as store:
        array = queue.queue_array(
            specs,
            store=store,
            priority=wanted.priority,
            after=wanted.after,
            delay_s=wanted.delay_s,
            allow_python=wanted.allow_python,
        )
        jobs = array.jobs
        mine = [job for job in jobs if job.array == array.id]
        if not wanted.json:
            output.emit(array.id)
        elif not wanted.wait:
            output.emit_json(array_json(array.id, jobs, time.time()))
        sys.stdout.flush()
        if not wanted.quiet:
            existing = len(jobs) - len(mine)
            known = f"; {count(existing, 'job')} with the same run.key existed already" if existing else ""
            output.note(f"{count(len(mine), 'job')} queued as array {array.id}{known}")
            for text in waits.changed_groups(store, mine):
                output.note(text)
        if not wanted.wait:
            live = client.live_workers(store=store)
            if without := [job for job in mine if not any(waits.takes(worker, job) for worker in live)]:
                output.note(waits.no_worker(without[0], live))
            return
        ended = progress.watch(
            store,
            list(dict.fromkeys(job.id for job in jobs)),
            timeout_s=wanted.timeout_s,
            quiet=wanted.quiet,
            attend=attend(store),
        )
        if wanted.json:
            output.emit_json(array_json(array.id, ended, time.time()))
        conclude(ended, quiet=wanted.quiet)


def _load(wanted: Wanted, home: Path) -> list[JobSpec]:
    from nimble_jobs.spec import many
    from nimble_jobs.spec.grid import parse_grid

    overrides = list(wanted.overrides)
    check_files = not wanted.after
    if wanted.lines is not None:
        if wanted.grid:
            raise UsageError("--from and --grid cannot be combined; give one of them")
        if wanted.spec is not None:  # an override in the place of the spec
            if "=" not in str(wanted.spec):
                raise UsageError(f"--from and SPEC {wanted.spec} cannot be combined; give one of them")
            overrides.insert(0, str(wanted.spec))
        return many.load_lines(wanted.lines, overrides, check_files=check_files, home=home)
    if wanted.spec is None:
        raise UsageError("--grid needs a spec; give SPEC")
    return many.load_grid(wanted.spec, parse_grid(wanted.grid), overrides, check_files=check_files, home=home)


def _show(ctx: typer.Context, specs: Sequence[JobSpec], wanted: Wanted) -> None:
    from nimble_jobs import client
    from nimble_jobs.settings.allowed import check_targets
    from nimble_jobs.spec import code, dump

    settings = options.configured(ctx)
    folders = client.allowed_python(wanted.allow_python, settings=settings)
    for spec in specs:
        code.check(spec, folders)
        check_targets(spec.notify, settings, f"job {spec.name}")
    output.emit_json([dump(spec) for spec in specs])
    output.note(f"{count(len(specs), 'job')} would be queued (dry run)")


def array_json(array: str, jobs: Sequence[Job], now: float) -> dict[str, object]:
    """The JSON of an array."""
    return {"array": array, "counts": job_view.counts(jobs), "jobs": [job_view.job_row(job, now) for job in jobs]}
