"""Commands that change timers or fire them: cron pause, resume, trigger, rm, backfill, serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nimble_jobs.cli import cron_health, cron_rows, options, output
from nimble_jobs.plural import count
from nimble_jobs.views import figures, timers

if TYPE_CHECKING:
    from nimble_jobs.store import Store, Timer
    from nimble_jobs.timers import Backfill


def register(app: typer.Typer) -> None:
    for command in (pause, resume, trigger, rm, backfill, serve):
        app.command()(command)


def pause(ctx: typer.Context, names: cron_rows.Names, json: options.Json = False) -> None:
    """Stop timers from firing until they are resumed. Jobs that they submitted continue."""
    from nimble_jobs import cron

    with options.store(ctx) as store:
        _change(store, names, cron.pause, "paused", json=json)


def resume(ctx: typer.Context, names: cron_rows.Names, json: options.Json = False) -> None:
    """Let paused timers fire again. Ticks that were due meanwhile are not fired; cron backfill runs them."""
    from nimble_jobs import cron

    with options.store(ctx) as store:
        now = time.time()
        for timer in _change(store, names, cron.resume, "resumed", json=json):
            rows = timers.upcoming_rows(timer, 1, now)
            if rows and not json:
                output.note(f"  next: {cron_rows.line(rows[0])}")
        cron_health.warn(store)


def trigger(ctx: typer.Context, name: cron_rows.Name, json: options.Json = False) -> None:
    """Submit a timer's job now and print the job's id. Templates use the current time as the tick."""
    from nimble_jobs import cron

    with options.store(ctx) as store:
        tick = cron.trigger(name, store=store)
        if json:
            output.emit_json({"name": name} | timers.tick_row(tick, timers.zone_of(store.timers.get(name))))
        else:
            output.emit(str(tick.job))
        cron_health.warn_idle(store)


def rm(
    ctx: typer.Context,
    names: cron_rows.Names,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
) -> None:
    """Remove timers and the record of their ticks. Their jobs and outputs stay."""
    from nimble_jobs import cron

    with options.store(ctx) as store:
        chosen = [cron.show(name, store=store).timer for name in dict.fromkeys(names)]
        what = ", ".join(timer.name for timer in chosen)
        done = not dry_run and options.confirmed(f"Remove {what}?", yes=yes)
        if done:
            for timer in chosen:
                cron.remove(timer.name, store=store)
        if json:
            output.emit_json({"removed": done, "timers": [timer.name for timer in chosen]})
        else:
            output.note(f"would remove {what}" if dry_run else f"removed {what}" if done else "nothing was removed")


def backfill(
    ctx: typer.Context,
    name: cron_rows.Name,
    since: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Start of the time to cover: 2026-11-01 or 2026-11-01T18:00, in the timer's zone.",
        ),
    ],
    until: Annotated[
        str,
        typer.Option(
            "--to", metavar="TIME", help="End of the time to cover, as for --from; a date alone includes that day."
        ),
    ],
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, help="How many of these jobs may run at once.")
    ] = 1,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Submit jobs for a timer's past ticks that have none, the oldest first.

    These are ticks that were skipped, missed, empty or in error, and ticks from before the timer was added. The
    workers, or `cron serve`, submit the jobs.
    """
    from nimble_jobs import cron
    from nimble_jobs.ticks import local_text

    with options.store(ctx) as store:
        plan = cron.backfill(name, since, until, max_running=max_running, dry_run=dry_run, store=store)
        zone = timers.zone_of(plan.timer)
        if json:
            output.emit_json(_backfill_json(plan, zone, kept=not dry_run))
        else:
            for tick in plan.ticks:
                before = "" if tick.before is None else f"; it was {tick.before.outcome}"
                output.emit(f"{local_text(tick.due, zone)}: {'runs' if tick.runs else 'has a job'}{before}")
            verb = "would run" if dry_run else "to run"
            ticks = f"{len(plan.runs):,} of {count(len(plan.ticks), 'tick')}"
            output.note(f"{name}: {ticks} {verb}, {max_running:,} at once")
        if not dry_run and plan.runs:
            cron_health.warn(store)


def serve(ctx: typer.Context) -> None:
    """Submit the jobs of timers when they are due, until Ctrl-C or SIGTERM.

    This command runs no jobs. Workers submit the jobs of timers too, so you need it only if no worker runs all the
    time.
    """
    from nimble_jobs.worker.cron import serve as fire

    raise typer.Exit(fire(options.home(ctx)))


def _change(store: Store, names: Sequence[str], change: Callable[..., Timer], done: str, *, json: bool) -> list[Timer]:
    """Change each timer, after all names were looked up. Raises NotFound."""
    wanted = [store.timers.get(name).name for name in dict.fromkeys(names)]
    timers = [change(name, store=store) for name in wanted]
    if json:
        output.emit_json([{"name": timer.name, "state": timer.state.value} for timer in timers])
    else:
        for timer in timers:
            output.note(f"{timer.name}: {done}")
    return timers


def _backfill_json(found: Backfill, zone: str, *, kept: bool) -> dict[str, Any]:
    from nimble_jobs.ticks import local_text

    return {
        "name": found.timer.name,
        "kept": kept,
        "runs": len(found.runs),
        "ticks": [
            {
                "tick": figures.iso(tick.due),
                "local": local_text(tick.due, zone),
                "runs": tick.runs,
                "before": tick.before.outcome.value if tick.before else None,
            }
            for tick in found.ticks
        ],
    }
