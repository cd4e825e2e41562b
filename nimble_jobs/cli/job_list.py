"""The command ls: which jobs there are, and why those that wait do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from nimble_jobs.cli import options, output, render, waits
from nimble_jobs.cli.filters import Keys, Kind
from nimble_jobs.cli.listing import Column, Row, Selection, print_rows
from nimble_jobs.cli.matches import match_of
from nimble_jobs.job import Job, JobState

if TYPE_CHECKING:
    from nimble_jobs.store import Store

KEYS: Keys = {
    "id": Kind.TEXT,
    "name": Kind.TEXT,
    "kind": Kind.TEXT,
    "state": tuple(JobState),
    "attempt": Kind.NUMBER,
    "created_at": Kind.TIME,
    "started_at": Kind.TIME,
    "finished_at": Kind.TIME,
    "elapsed_s": Kind.SECONDS,
    "records_done": Kind.NUMBER,
    "records_total": Kind.NUMBER,
    "records_bad": Kind.NUMBER,
    "records_per_s": Kind.NUMBER,
    "phase": Kind.TEXT,
    "hit": Kind.TEXT,
    "runs": Kind.TEXT,
    "device": Kind.TEXT,
    "priority": Kind.NUMBER,
    "worker": Kind.TEXT,
    "error": Kind.TEXT,
    "waits": Kind.TEXT,
}


def _state_style(row: Row) -> str:
    return render.STATE_STYLE.get(row["state"], "")


def _note(row: Row) -> str:
    return str(row["error"] or row["waits"] or "")


def _note_style(row: Row) -> str:
    return "red" if row["error"] else "dim"


COLUMNS = (
    Column(header="ID", cell=lambda row: row["id"]),
    Column(header="NAME", cell=lambda row: row["name"], flexible=True),
    Column(header="KIND", cell=lambda row: row["kind"], from_width=110),
    Column(header="STATE", cell=lambda row: render.state_text(row), style=_state_style),
    Column(header="RECORDS", cell=render.progress, justify="right"),
    Column(header="RATE", cell=lambda row: render.rate(row["records_per_s"]), justify="right"),
    Column(header="TIME", cell=lambda row: render.duration(row["elapsed_s"]), justify="right"),
    Column(
        header="SCHEDULE", cell=lambda row: "eager" if row["runs"] == "eager" else row["hit"] or "-", from_width=100
    ),
    Column(header="NOTE", cell=_note, style=_note_style, flexible=True, from_width=110),
)


def register(app: typer.Typer) -> None:
    app.command()(ls)


def ls(
    ctx: typer.Context,
    filters: options.Filters = None,
    sort: options.Sort = None,
    limit: options.Limit = None,
    quiet: options.IdsOnly = False,
    json: options.Json = False,
) -> None:
    """List jobs, the newest first."""
    selection = Selection(filters=filters or (), sort=sort, limit=limit)
    from nimble_jobs import client

    with options.store(ctx) as store:
        client.recover(store)  # a process that died says nothing; without a worker nobody else would
        rows = job_rows(store, selection)
        empty = "no job matches" if rows or any(store.jobs.counts().values()) else "no jobs"
    print_rows(
        rows, COLUMNS, id_key="id", json=json, quiet=quiet, empty=f"{empty}; submit one with: nimble-jobs submit SPEC"
    )
    if output.on_terminal() and not (json or quiet):
        waits.note(rows)
        if wrong := [row["id"] for row in rows if row["error"] or row["records_bad"]]:
            output.note(f"errors ({render.few(wrong)}): nimble-jobs show ID")


def job_rows(store: Store, selection: Selection) -> list[Row]:
    """The rows that `ls` shows. The database filters, sorts and cuts as far as it can. Raises UsageError."""
    from nimble_jobs.store.listed import COLUMNS as STORED

    now = selection.now
    conditions, sort = selection.conditions(KEYS), selection.sort_key(KEYS)
    found = [match_of(condition, KEYS, now) for condition in conditions]
    matches = [match for match in found if match is not None]
    if "waits" in (sort, *(condition.key for condition in conditions)):  # known only once the jobs are
        jobs = store.jobs.listed(matches=matches)
        return selection.apply(_rows(store, jobs, now), KEYS)
    if sort is not None and sort not in STORED:
        jobs = store.jobs.listed(matches=matches)
        by_id = {job.id: job for job in jobs}
        rows = selection.apply([render.job_row(job, now) for job in jobs], KEYS)
        return _rows(store, [by_id[row["id"]] for row in rows], now)

    def keep(job: Job) -> bool:
        row = render.job_row(job, now)
        return all(condition.holds(row[condition.key]) for condition in conditions)

    exact = all(match is not None and match.exact for match in found)
    jobs = store.jobs.listed(
        matches=matches,
        keep=None if exact else keep,
        sort=sort,
        descending=selection.descending,
        limit=selection.limit,
    )
    return _rows(store, jobs, now)


def _rows(store: Store, jobs: Sequence[Job], now: float) -> list[Row]:
    why = waits.reasons(store, jobs, now)
    return [render.job_row(job, now, why.get(job.id)) for job in jobs]
