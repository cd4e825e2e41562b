"""Commands about timers: cron add, ls, show, next. Commands that change a timer are in `cron_change.py`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import cron_change, cron_health, cron_rows, options, output, render
from nimble_jobs.cli.listing import Selection, print_rows
from nimble_jobs.views import figures, timers

if TYPE_CHECKING:
    from nimble_jobs.cron import Added

app = typer.Typer(name="cron", help="Add, list and control timers, which submit jobs.", no_args_is_help=True)

_TICKS_SHOWN, _AHEAD = 10, 5


@app.command()
def add(
    ctx: typer.Context,
    spec: options.SpecFile,
    overrides: options.Overrides = None,
    allow_python: options.AllowPython = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Add a timer for a spec with a cron part, and print its name. An existing timer of that name is changed.

    The next five ticks are shown. A changed timer submits nothing for times that have passed. Adding the same spec
    again changes nothing.
    """
    from nimble_jobs import client, cron
    from nimble_jobs.spec import load

    now = time.time()
    loaded = load(spec, overrides or (), home=options.chosen_home(ctx), now=now)
    if dry_run:
        client.permitted(loaded, allow_python or (), settings=options.configured(ctx))
        _say_added(cron.look(loaded, file=spec, now=now), now, json=json)
        return
    with options.store(ctx) as store:
        _say_added(cron.add(loaded, store=store, file=spec, allow_python=allow_python or (), now=now), now, json=json)
        cron_health.warn(store)


def _say_added(added: Added, now: float, *, json: bool) -> None:
    rows = timers.due_rows(added.name, added.zone, added.next, now)
    change = added.change.value if added.change else None
    if json:
        told = {"name": added.name, "change": change, "changed": added.changed, "file_before": added.file_before}
        output.emit_json(told | {"words": added.words, "next": rows})
        return
    if change:
        output.emit(added.name)
    fields = f": {figures.few(added.changed)}" if added.changed else ""
    before = f"; it was added from {added.file_before} before" if added.file_before else ""
    lines = [f"{added.name}: {change or 'would be added (dry run)'}{fields}{before}", f"  {added.words}; next:"]
    output.note("\n".join(lines + [f"  {cron_rows.line(row)}" for row in rows]))


@app.command()
def ls(
    ctx: typer.Context,
    filters: options.Filters = None,
    sort: options.Sort = None,
    limit: options.Limit = None,
    quiet: options.IdsOnly = False,
    json: options.Json = False,
) -> None:
    """List timers, with the outcome of the last tick, the time of the next one, and how late it is."""
    from nimble_jobs import cron

    selection = Selection(filters=filters or (), sort=sort, limit=limit)
    with options.store(ctx) as store:
        found = cron.timers(store=store, now=selection.now)
        rows = [timers.timer_row(watched, selection.now) for watched in found]
        empty = "no timer matches" if rows else "no timers; add one with: nimble-jobs cron add SPEC"
        rows = selection.apply(rows, cron_rows.KEYS)
        print_rows(rows, cron_rows.COLUMNS, id_key="name", json=json, quiet=quiet, empty=empty)
        if any(watched.timer.state == "active" for watched in found):
            cron_health.warn(store)


@app.command()
def show(ctx: typer.Context, name: cron_rows.Name, json: options.Json = False) -> None:
    """Show a timer, its next ticks, and the outcome of the last ten."""
    from nimble_jobs import cron

    now = time.time()
    with options.store(ctx) as store:
        watched = cron.show(name, store=store, now=now)
        row = timers.timer_row(watched, now)
        zone = timers.zone_of(watched.timer)
        ticks = cron.history(name, store=store, limit=_TICKS_SHOWN)
        ahead = [due for _, due in cron.upcoming(name, _AHEAD, store=store, now=now)] if watched.cron else []
        past = [timers.tick_row(tick, zone, cron.job_of(store, tick)) for tick in ticks]
        coming = timers.due_rows(name, zone, ahead, now)
        if json:
            spec = watched.timer.spec
            output.emit_json(
                row | {"allow_python": watched.timer.allow_python, "spec": spec, "next": coming, "ticks": past}
            )
        else:
            render.sections(cron_rows.panels(row, watched, coming, past))
        if watched.timer.state == "active":
            cron_health.warn(store)


@app.command(name="next")
def next_(
    ctx: typer.Context,
    name: cron_rows.MaybeName = None,
    count: Annotated[int, typer.Option("--number", "-n", min=1, max=1000, help="How many ticks to show.")] = 10,
    json: options.Json = False,
) -> None:
    """Show the next ticks of a timer, or of all that are not paused, the earliest first."""
    from nimble_jobs import cron

    now = time.time()
    with options.store(ctx) as store:
        ticks = cron.upcoming(name, count, store=store, now=now)
        if name is not None and store.timers.get(name).state == "paused":
            output.note(f"{name} is paused; if you resume it, its next ticks are:")
        rows = [row for timer, due in ticks for row in timers.due_rows(timer.name, timers.zone_of(timer), [due], now)]
        print_rows(rows, cron_rows.DUE_COLUMNS, id_key="name", json=json, quiet=False, empty="no more ticks")
        if rows:
            cron_health.warn(store)


cron_change.register(app)
