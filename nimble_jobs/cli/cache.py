"""Commands about stored schedules: cache ls, show, stats, rm, dir."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nimble_jobs.cli import options, output, render
from nimble_jobs.cli.listing import Column, Row, Selection, print_rows

if TYPE_CHECKING:
    from nimble_jobs.store import Store
    from nimble_jobs.store.records import ScheduleEntry

app = typer.Typer(name="cache", help="The schedules that this state folder holds.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="Key of a schedule, or its beginning.", show_default=False)]
KEYS = [
    "key",
    "model",
    "device",
    "input",
    "dtype",
    "mode",
    "streams",
    "syncs",
    "replay_us",
    "eager_us",
    "speedup",
    "bytes",
    "hits",
    "created_at",
    "last_used_at",
    "state",
    "reason",
    "resident",
]


def _state_style(row: Row) -> str:
    return {"ready": "green", "stale": "yellow", "quarantined": "bold red"}.get(row["state"], "")


COLUMNS = (
    Column(header="KEY", cell=lambda row: row["key"][:12]),
    Column(header="MODEL", cell=lambda row: row["model"], flexible=True),
    Column(header="INPUT", cell=lambda row: row["input"], from_width=120),
    Column(header="DTYPE", cell=lambda row: row["dtype"], from_width=100),
    Column(header="STREAMS", cell=lambda row: str(row["streams"]), justify="right", from_width=130),
    Column(header="REPLAY", cell=lambda row: render.micros(row["replay_us"]), justify="right"),
    Column(header="EAGER", cell=lambda row: render.micros(row["eager_us"]), justify="right"),
    Column(header="SIZE", cell=lambda row: render.size(row["bytes"]), justify="right", from_width=100),
    Column(header="HITS", cell=lambda row: str(row["hits"]), justify="right"),
    Column(header="STATE", cell=lambda row: _state(row), style=_state_style),
    Column(header="DEVICE", cell=lambda row: row["device"], flexible=True, from_width=150),
)


@app.command()
def ls(
    ctx: typer.Context,
    filters: options.Filters = None,
    sort: options.Sort = None,
    limit: options.Limit = None,
    quiet: options.IdsOnly = False,
    json: options.Json = False,
) -> None:
    """List the stored schedules, the oldest first."""
    with options.store(ctx) as store:
        rows = _rows(store, store.schedules.list())
    shown = Selection(filters=filters or (), sort=sort or "created_at", limit=limit).apply(rows, KEYS)
    empty = "no schedule matches" if rows else "no stored schedules; the first run of a job makes one"
    print_rows(shown, COLUMNS, id_key="key", json=json, quiet=quiet, empty=empty)


@app.command()
def show(ctx: typer.Context, key: Key, json: options.Json = False) -> None:
    """Show one schedule: measurements, graph, and every part of its key."""
    with options.store(ctx) as store:
        entry = store.schedules.get(key)
        row = _rows(store, [entry])[0]
        found = store.schedules.find(entry.key, time.time()) if entry.state == "ready" else None
    schedule = found.load() if found else None
    facts: dict[str, Any] = {}
    if schedule:
        import dataclasses

        facts = {
            "graph": dataclasses.asdict(schedule.facts),
            "candidates": [dataclasses.asdict(candidate) for candidate in schedule.candidates],
            "check": {"tolerance": schedule.tolerance, "error": schedule.error},
            "memory": {"peak_bytes": schedule.peak_bytes},
            "build_s": schedule.build_s,
        }
    if json:
        output.emit_json(row | {"sha256": entry.sha256, "key_parts": entry.parts} | facts)
        return
    parts = [("Schedule", render.flat({name: value for name, value in row.items() if name != "speedup"}))]
    speed = render.speedup(row)
    if speed:
        parts[0][1].insert(1, ("speed", speed))
    parts += [
        (title.capitalize(), render.flat(facts[title])) for title in ("graph", "check", "memory") if title in facts
    ]
    parts += render.candidates(facts.get("candidates", ()))
    parts.append(("Key", render.flat(entry.parts)))
    render.sections(parts)


@app.command()
def stats(ctx: typer.Context, json: options.Json = False) -> None:
    """Count schedules, hits and bytes."""
    with options.store(ctx) as store:
        found = store.schedules.stats()
    if json:
        output.emit_json(found)
    else:
        render.sections([("Schedules", render.flat(found))])


@app.command()
def rm(
    ctx: typer.Context,
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="Keys, or their beginnings.", show_default=False)],
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
) -> None:
    """Remove stored schedules. Jobs that need one build it again."""
    with options.store(ctx) as store:
        entries = {entry.key: entry for entry in (store.schedules.get(key) for key in keys)}
        for entry in entries.values():
            output.note(f"{entry.key[:12]} {entry.model} {entry.input} {entry.dtype}, {render.size(entry.bytes)}")
        count = f"{len(entries)} schedule{'s' if len(entries) != 1 else ''}"
        if dry_run:
            output.note(f"would remove {count}")
        elif options.confirmed(f"Remove {count}?", yes=yes):
            output.note(f"removed {store.schedules.remove(list(entries))} of {count}")
        else:
            output.note("nothing was removed")


@app.command("dir")
def dir_(ctx: typer.Context) -> None:
    """Print the state folder."""
    output.emit(str(options.home(ctx)))


def _rows(store: Store, entries: list[ScheduleEntry]) -> list[Row]:
    from nimble_jobs import client

    residents = store.schedules.residents([worker.id for worker in client.live_workers(store=store)])
    return [
        {
            "key": entry.key,
            "model": entry.model,
            "device": entry.device,
            "input": entry.input,
            "dtype": entry.dtype,
            "mode": entry.mode,
            "streams": entry.streams,
            "syncs": entry.syncs,
            "replay_us": entry.replay_us,
            "eager_us": entry.eager_us,
            "speedup": round(entry.eager_us / entry.replay_us, 3) if entry.replay_us else None,
            "bytes": entry.bytes,
            "hits": entry.hits,
            "created_at": output.iso(entry.created_at),
            "last_used_at": output.iso(entry.last_used_at),
            "state": entry.state.value,
            "reason": entry.reason,
            "resident": residents.get(entry.key, []),
        }
        for entry in entries
    ]


def _state(row: Row) -> str:
    return "resident" if row["resident"] and row["state"] == "ready" else str(row["state"])
