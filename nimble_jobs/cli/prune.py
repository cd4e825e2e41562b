"""The command prune: removes jobs that ended long ago and their traces. Outputs stay."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.listing import Column, print_rows
from nimble_jobs.cli.steps import steps
from nimble_jobs.errors import JobFailed
from nimble_jobs.plural import count
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.retention import Done, Rules
    from nimble_jobs.store import Store

COLUMNS = (
    Column(header="KIND", cell=lambda row: row["kind"]),
    Column(header="COUNT", cell=lambda row: f"{row['count']:,}", justify="right"),
    Column(header="SIZE", cell=lambda row: figures.size(row["bytes"]), justify="right"),
)


def register(app: typer.Typer) -> None:
    app.command()(prune)


def prune(
    ctx: typer.Context,
    keep: Annotated[
        str | None,
        typer.Option("--keep", metavar="TIME", help="Keep succeeded and cancelled jobs for this long, such as 30d."),
    ] = None,
    keep_failed: Annotated[
        str | None,
        typer.Option(
            "--keep-failed", metavar="TIME", help="Keep failed and quarantined jobs for this long, such as 90d."
        ),
    ] = None,
    per_name: Annotated[
        int | None,
        typer.Option(
            "--per-name",
            metavar="N",
            min=1,
            help="Keep the newest N jobs of each name, besides the jobs that --keep and --keep-failed keep.",
        ),
    ] = None,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
) -> None:
    """Remove jobs that ended long ago, with their attempts, events, logs, ticks and hidden folders.

    Outputs always stay, and so do jobs that another job waits for. config.yaml sets the defaults. The command asks
    first; without a terminal, give --yes. Exits 100 if something could not be removed.
    """
    from nimble_jobs.retention import Sweep, rules_of
    from nimble_jobs.settings import read_settings

    with options.store(ctx) as store:
        rules = rules_of(
            read_settings(store.home),
            keep_s=options.duration(keep, "--keep"),
            keep_failed_s=options.duration(keep_failed, "--keep-failed"),
            per_name=per_name,
        )
        now = time.time()
        if dry_run or not yes:
            looked = Sweep(store, rules, now, remove=False).run()
            if dry_run or not _confirmed(looked, json=json):
                _print(looked, removed=False, json=json)
                return
        done = _carry_out(store, rules, now)
    _print(done, removed=True, json=json)
    if done.trouble:
        raise typer.Exit(JobFailed.exit_code)


def _confirmed(looked: Done, *, json: bool) -> bool:
    if not looked.rows:
        return False
    if not json:
        _print(looked, removed=False, json=False)
    return options.confirmed(f"Remove {_summary(looked)}?", yes=False)


def _carry_out(store: Store, rules: Rules, now: float) -> Done:
    from nimble_jobs.retention import Sweep

    sweep = Sweep(store, rules, now, remove=True)

    def jobs() -> Iterator[None]:
        for step in sweep.paced():
            yield from [None] * step.tally.counts.get("jobs", 0)

    total = sum(store.jobs.counts().values()) if sys.stderr.isatty() else 0
    for _ in steps(jobs(), total, "prune"):
        pass
    return sweep.done


def _print(done: Done, *, removed: bool, json: bool) -> None:
    rows = [_row(kind, number, nbytes) for kind, number, nbytes in done.rows]
    if json:
        output.emit_json(
            {
                "removed": removed,
                "rows": rows,
                "count": sum(row["count"] for row in rows),
                "bytes": sum(row["bytes"] for row in rows),
                "given_back_bytes": done.given_back_bytes,
                "trouble": list(done.trouble),
            }
        )
        return
    print_rows(rows, COLUMNS, id_key="kind", json=False, quiet=False, empty="nothing to remove")
    for reason in done.trouble:
        output.note(f"not removed: {reason}")
    if rows:
        said = f"removed {_summary(done)}" if removed else f"would remove {_summary(done)}"
        back = done.given_back_bytes
        output.note(said + (f"; the database's file is {figures.size(back)} smaller" if back else ""))


def _summary(done: Done) -> str:
    jobs = sum(number for kind, number, _ in done.rows if kind == "jobs")
    others = sum(number for kind, number, _ in done.rows if kind != "jobs")
    size = figures.size(sum(nbytes for *_, nbytes in done.rows))
    return f"{count(jobs, 'job')} and {others:,} other rows and files, {size}"


def _row(kind: str, number: int, nbytes: int) -> Row:
    return {"kind": kind, "count": number, "bytes": nbytes}
