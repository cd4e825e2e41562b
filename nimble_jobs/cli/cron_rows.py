"""How timers and ticks are shown to people and in JSON, and completion of their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import render
from nimble_jobs.cli.filters import Keys, Kind
from nimble_jobs.cli.listing import Column
from nimble_jobs.job import JobState
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.cron import Watched

OUTCOME_STYLE = {
    "submitted": "green",
    "waiting": "cyan",
    "skipped": "yellow",
    "missed": "bold red",
    "empty": "dim",
    "error": "bold red",
}

KEYS: Keys = {
    "name": Kind.TEXT,
    "state": ("active", "paused"),
    "expression": Kind.TEXT,
    "timezone": Kind.TEXT,
    "words": Kind.TEXT,
    "last_tick": Kind.TIME,
    "last_kind": ("scheduled", "catch-up", "backfill", "manual"),
    "last_outcome": tuple(OUTCOME_STYLE),
    "last_job": Kind.TEXT,
    "last_state": tuple(JobState),
    "last_reason": Kind.TEXT,
    "last_error": Kind.TEXT,
    "next_tick": Kind.TIME,
    "next_at": Kind.TIME,
    "in_s": Kind.SECONDS,
    "late_s": Kind.SECONDS,
    "overlap": Kind.TEXT,
    "catch_up": Kind.TEXT,
    "since": Kind.TIME,
    "file": Kind.TEXT,
}


def _last(row: Row) -> str:
    """The state of the last tick's job; if it has none, the outcome of the tick."""
    return str(row["last_state"] or row["last_outcome"] or "-")


def _why(reason: str | None, error: str | None) -> str:
    """Why a tick has no job, or how its job failed, in one line."""
    return reason or (error or "").partition("\n")[0]


def _in(row: Row) -> str:
    """The time until a tick may fire."""
    seconds = row["in_s"]
    if seconds is None:
        return "-"
    return figures.duration(seconds) if seconds >= 0 else f"late {figures.duration(-seconds)}"


COLUMNS = (
    Column(header="NAME", cell=lambda row: row["name"], flexible=True),
    Column(header="STATE", cell=lambda row: row["state"], style=lambda row: "dim" if row["state"] == "paused" else ""),
    Column(header="WHEN", cell=lambda row: row["words"], flexible=True, gives_first=True, from_width=100),
    Column(
        header="LAST",
        cell=_last,
        style=lambda row: (OUTCOME_STYLE | render.STATE_STYLE).get(_last(row), ""),
    ),
    Column(header="NEXT", cell=lambda row: row["next_local"] or "-"),
    Column(
        header="IN",
        cell=_in,
        style=lambda row: "bold red" if row["late_s"] else "",
        justify="right",
    ),
    Column(header="NOTE", cell=lambda row: _why(row["last_reason"], row["last_error"]), flexible=True, from_width=130),
)

DUE_COLUMNS = (
    Column(header="TIMER", cell=lambda row: row["name"], flexible=True),
    Column(header="TICK", cell=lambda row: row["local"]),
    Column(header="IN", cell=_in, justify="right"),
)


def tick_words(row: Row) -> str:
    """The outcome of a tick, in one line."""
    text = f"{row['kind']}, {row['outcome']}"
    if row["count"] > 1:
        text += f", with the next {row['count'] - 1:,} ticks"
    if row["job"]:
        text += f" as {row['job']}" + (f", {row['state']}" if row["state"] else "")
    why = _why(row["reason"], row["error"])
    return f"{text}: {why}" if why else text


def complete(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Names of timers that begin with the typed text. Silent about errors: the shell is in the middle of a line."""
    with suppress(Exception):
        from nimble_jobs.settings import choose
        from nimble_jobs.store import open_store
        from nimble_jobs.store.home import resolve

        home = ctx.find_root().params.get("home")
        if not choose(home).exists():
            return
        with closing(open_store(resolve(home), create=False)) as store:
            yield from (timer.name for timer in store.timers.list() if timer.name.startswith(incomplete))


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a timer.", show_default=False, autocompletion=complete)
]
MaybeName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="Name of a timer; default: all timers.", show_default=False, autocompletion=complete
    ),
]
Names = Annotated[
    list[str],
    typer.Argument(metavar="NAME...", help="Names of timers.", show_default=False, autocompletion=complete),
]


def panels(row: Row, watched: Watched, coming: Sequence[Row], past: Sequence[Row]) -> list[render.Section]:
    """What `cron show` prints."""
    cron = watched.cron
    about = [("name", row["name"]), ("state", row["state"]), ("when", row["words"])]
    if cron is not None:
        about += [("expression", cron.expression), ("timezone", cron.timezone), ("overlap", cron.overlap)]
        about += [
            ("catch_up", cron.catch_up),
            ("grace", "until the next tick" if cron.grace is None else figures.duration(cron.grace)),
        ]
        about += [("jitter", figures.duration(cron.jitter))] if cron.jitter else []
        about += [(name, text) for name, text in (("start", cron.start), ("end", cron.end)) if text is not None]
    about += [("since", figures.clock(watched.timer.since)), ("file", watched.timer.file)]
    spec = watched.timer.spec
    about += [
        (f"{section}.{field}", str(spec[section][field]))
        for section, field in (("input", "source"), ("output", "path"), ("run", "key"))
        if spec.get(section, {}).get(field) is not None
    ]
    return [
        ("Timer", about),
        ("Next", [(tick["local"], f"in {_in(tick)}") for tick in coming]),
        ("Ticks", [(tick["local"], tick_words(tick)) for tick in past]),
    ]


def line(row: Row) -> str:
    """A future tick, in one line."""
    return f"{row['local']}, in {_in(row)}"
