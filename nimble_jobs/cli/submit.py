"""Commands that start jobs: run in the foreground, submit to the queue."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import arrays, options, output, progress
from nimble_jobs.cli.jobs import conclude, follow_log
from nimble_jobs.errors import NimbleError, UsageError
from nimble_jobs.job import After, JobState
from nimble_jobs.views import figures, waits
from nimble_jobs.views import jobs as job_view

if TYPE_CHECKING:
    from nimble_jobs.job import Job
    from nimble_jobs.spec import JobSpec
    from nimble_jobs.store import Store
    from nimble_jobs.worker.early import Early

OptionalSpec = Annotated[
    Path | None,
    typer.Argument(metavar="SPEC", help="Job spec, a YAML file; - reads standard input.", show_default=False),
]
_WAIT_IDLE_S = 30.0  # how long a worker that `submit --wait` started stays without work
_TELL_S = 10.0  # how long `run` tries to send notifications; a worker sends what is left
_LOOK_S = 1.0  # how often to check that a worker runs for a waiting job


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command()(submit)


def run(
    ctx: typer.Context,
    spec: options.SpecFile,
    overrides: options.Overrides = None,
    allow_python: options.AllowPython = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Run a job in this process, now. No worker is needed."""
    from nimble_jobs.spec import load
    from nimble_jobs.worker.early import Early

    loaded = load(spec, overrides or (), home=options.chosen_home(ctx), once=True)
    with closing(Early(loaded)) as early:
        _run(ctx, loaded, early, allow_python=allow_python or (), quiet=quiet, json=json)


def _run(
    ctx: typer.Context, loaded: JobSpec, early: Early, *, allow_python: Sequence[Path], quiet: bool, json: bool
) -> None:
    from nimble_jobs import client

    with options.store(ctx) as store:
        job = client.submit(loaded, store=store, foreground=True, allow_python=allow_python)
        with ExitStack() as shown:
            shown.enter_context(progress.beside(store.home, job.id, quiet=quiet))
            early.join()
            from nimble_jobs.worker.foreground import run_inline  # loads torch: after the progress is on the screen

            def leave(ended: Job) -> None:
                """Ends the process at once: threads that block in a read would keep it."""
                code = 1
                try:
                    shown.close()
                    _report(store, ended, json=json, quiet=quiet)
                except NimbleError as error:
                    code = error.exit_code
                    output.refusal(error)
                finally:
                    os._exit(code)

            ended = run_inline(store, job.id, leave=leave)
        _tell(store)
        events = () if quiet else store.jobs.events(job.id)
        for name, text in job_view.weights(events):
            output.note(f"{name}: {text}; set model.weights to use trained ones")
        for event in events:
            if event.kind == "beside":
                output.note(event.message)
        _report(store, ended, json=json, quiet=quiet)


def _tell(store: Store) -> None:
    """Send the job's notifications, unless a worker does."""
    from nimble_jobs import client

    if not store.outbox.waiting(time.time()) or client.live_workers(store=store):
        return
    from nimble_jobs.courier import Courier

    Courier(store, f"run-{os.getpid()}").finish(_TELL_S)


def submit(
    ctx: typer.Context,
    spec: OptionalSpec = None,
    overrides: options.Overrides = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Wait until the job ends; start a worker if none is running.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Print the log until the job ends.")] = False,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="With --wait: give up after this time, such as 90s or 2h."),
    ] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", help="Higher runs first; replaces run.priority.")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after",
            metavar="ID[:WHEN]",
            help="Job to wait for; WHEN is how it must end: success (the default), failure or done. Repeatable.",
        ),
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="TIME", help="Do not start before this time has passed.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Idempotency key: the same key and spec give the same job.")
    ] = None,
    lines: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Queue many jobs: a file with one JSON spec per line."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=A,B",
            help="Queue one job for each value; with several --grid, for each combination. Repeatable.",
        ),
    ] = None,
    allow_python: options.AllowPython = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and show the resolved spec; queue nothing.")
    ] = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Queue a job and print its id. Exit code 0 means that the job is on disk.

    --from and --grid queue many jobs, all or none, and print the id of their array. Their outputs must differ: use
    {{ grid:KEY }} or {{ index }} in name, output.path and run.key.
    """
    waited = [After.parse(text) for text in after or ()]
    wanted = arrays.Wanted(
        lines=lines,
        grid=grid or (),
        spec=spec,
        overrides=overrides or (),
        priority=priority,
        after=waited,
        delay_s=options.duration(delay, "--delay") or 0.0,
        timeout_s=options.duration(timeout, "--timeout"),
        allow_python=allow_python or (),
        wait=wait,
        dry_run=dry_run,
        quiet=quiet,
        json=json,
    )
    if wanted.given:
        if follow or key:
            raise UsageError(
                f"{'--follow' if follow else '--key'} works with one job only; it cannot be combined with "
                "--from or --grid"
            )
        arrays.submit(ctx, wanted, partial(_Attendant, quiet=quiet))
        return
    if spec is None:
        raise UsageError("no spec given; give SPEC, or --from FILE")
    _submit_one(ctx, spec, wanted, key=key, follow=follow)


def _submit_one(ctx: typer.Context, spec: Path, wanted: arrays.Wanted, *, key: str | None, follow: bool) -> None:
    from nimble_jobs import client
    from nimble_jobs.spec import dump, load

    # The jobs that it waits for may make its files.
    loaded = load(spec, wanted.overrides, check_files=not wanted.after, home=options.chosen_home(ctx), once=True)
    if wanted.dry_run:
        client.permitted(loaded, wanted.allow_python, settings=options.configured(ctx))
        output.emit_json(dump(loaded))
        output.note(f"{loaded.name}: would be queued (dry run)")
        return
    with options.store(ctx) as store:
        job = client.submit(
            loaded,
            store=store,
            priority=wanted.priority,
            after=wanted.after,
            delay_s=wanted.delay_s,
            key=key,
            allow_python=wanted.allow_python,
        )
        if not (wanted.json and (wanted.wait or follow)):
            output.emit_json(job_view.job_row(job, time.time())) if wanted.json else output.emit(job.id)
            sys.stdout.flush()
        for text in () if wanted.quiet else waits.changed_groups(store, [job]):
            output.note(text)
        live = client.live_workers(store=store)
        if not wanted.wait and not any(waits.takes(worker, job) for worker in live):
            output.note(waits.no_worker(job, live))
        elif held := waits.paused(job, live):
            output.note(held)
        attend = _Attendant(store, quiet=wanted.quiet) if wanted.wait else None
        if follow:
            ended = follow_log(store, job.id, stream=sys.stderr, timeout_s=wanted.timeout_s, attend=attend)
        elif wanted.wait:
            ended = progress.watch(store, [job.id], timeout_s=wanted.timeout_s, quiet=wanted.quiet, attend=attend)[0]
        else:
            return
        _report(store, ended, json=wanted.json, quiet=wanted.quiet)


class _Attendant:
    """Sees to it that a worker is there for a job that is due: the one that was, or was started, may have left."""

    def __init__(self, store: Store, *, quiet: bool) -> None:
        self._store = store
        self._quiet = quiet
        self._look_at = 0.0

    def __call__(self, job: Job) -> None:
        from nimble_jobs import client

        if job.state is not JobState.QUEUED or job.not_before > time.time() or time.monotonic() < self._look_at:
            return
        if not _served(self._store, job):
            if not self._quiet:
                output.note(f"starting a worker; it stops after {figures.duration(_WAIT_IDLE_S)} without work")
            try:
                device = None if job.device == "auto" else job.device
                started = client.start_worker(store=self._store, device=device, max_idle_s=_WAIT_IDLE_S)
                if started and not any(waits.takes(worker, job) for worker in started):
                    raise UsageError(waits.no_worker(job, started))
            except UsageError as error:  # no worker of this machine could ever take the job
                self._store.jobs.cancel(job.id, now=time.time())
                raise UsageError(f"{error}; the job was cancelled") from error
        self._look_at = time.monotonic() + _LOOK_S


def _served(store: Store, job: Job) -> bool:
    """Does a worker run that takes this job?"""
    from nimble_jobs import client

    return any(waits.takes(worker, job) for worker in client.live_workers(store=store))


def _report(store: Store, job: Job, *, json: bool, quiet: bool) -> None:
    if json:
        output.emit_json(job_view.job_json(job, store.jobs.attempts(job.id), store.jobs.events(job.id), time.time()))
    conclude([job], quiet=quiet)
