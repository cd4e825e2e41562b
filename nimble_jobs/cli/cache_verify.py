"""The command cache verify: checks that stored bytes have not changed and that replays still agree with eager."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.cache_rows import found, shape, with_reason
from nimble_jobs.cli.steps import steps
from nimble_jobs.errors import JobFailed
from nimble_jobs.plural import count
from nimble_jobs.views import figures

if TYPE_CHECKING:
    from nimble_jobs.store import ScheduleEntry, Store

Row = dict[str, Any]


def register(app: typer.Typer) -> None:
    app.command()(verify)


def verify(
    ctx: typer.Context,
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY...]", help="Keys, or their first characters; default: all.", show_default=False),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Also load the schedules for this machine's devices and compare them with eager."
        ),
    ] = False,
    allow_python: options.AllowPython = None,
    json: options.Json = False,
) -> None:
    """Hash every stored schedule and artifact again. Exits 0 if all schedules are sound, 100 if any is not."""
    from nimble_jobs.client import allowed_python

    allowed = allowed_python(allow_python or (), settings=options.configured(ctx))
    with options.store(ctx) as store:
        entries = found(store, keys) if keys else store.schedules.list()
        rows = _hashed(store, entries)
        leftovers = [] if keys else _leftovers(store)
        if replay:
            sound = {row["key"] for row in rows if row["sound"]}
            _replayed(store, [entry for entry in entries if entry.key in sound], rows, allowed)
    if json:
        output.emit_json(rows)
    else:
        _tell(rows, leftovers, replay=replay)
    unsound = sum(not row["sound"] for row in rows)
    if unsound:
        text = f"{unsound:,} of {count(len(rows), 'schedule')} not sound; jobs do not use quarantined schedules"
        raise JobFailed(f"{text}; `nimble-jobs cache prune --quarantined` removes them")


def _hashed(store: Store, entries: list[ScheduleEntry]) -> list[Row]:
    from nimble_jobs.store.verify import verify as hashed

    return [
        {
            "key": verdict.entry.key,
            "model": verdict.entry.model,
            "input": verdict.entry.input,
            "sound": verdict.sound,
            "quarantined_now": verdict.found_now,
            "said": verdict.said,
            "hashed_bytes": verdict.hashed_bytes,
            "replayed": None,
        }
        for verdict in steps(hashed(store, entries, time.time()), len(entries), "verifying")
    ]


def _leftovers(store: Store) -> list[str]:
    from nimble_jobs.store.verify import damaged_leftovers

    return damaged_leftovers(store)


def _replayed(store: Store, entries: list[ScheduleEntry], rows: list[Row], allowed: Any) -> None:
    from nimble_jobs.workloads.ahead import replay_stored  # loads torch

    by_key = {row["key"]: row for row in rows}
    for entry, result in steps(replay_stored(entries, store=store, allowed_python=allowed), len(entries), "replaying"):
        row = by_key[entry.key]
        row |= {"replayed": result.agrees is not None, "said": result.said}
        if result.agrees is False:
            row |= {"sound": False, "quarantined_now": True}


def _tell(rows: list[Row], leftovers: list[str], *, replay: bool) -> None:
    for row in rows:
        if not row["sound"] or replay:
            if row["sound"]:
                verdict = "replayed" if row["replayed"] else "not replayed"
            else:
                verdict = "quarantined now" if row["quarantined_now"] else "quarantined before"
            head = f"{row['key'][:12]}  {row['model']} {shape(row['input'])}"
            output.emit(with_reason(f"{head}  {verdict}", row["said"], sys.stdout))
    for line in leftovers:
        output.note(f"damaged, and not needed by any schedule: {line}; `cache prune` removes it")
    sound = sum(row["sound"] for row in rows)
    hashed = figures.size(sum(row["hashed_bytes"] for row in rows))
    replayed = f", {sum(bool(row['replayed']) and row['sound'] for row in rows):,} replayed" if replay else ""
    output.note(f"{sound:,} of {count(len(rows), 'schedule')} sound, {hashed} hashed{replayed}")
