"""The command ls: lists jobs, and says why queued ones do not run yet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output, render
from nimble_jobs.cli.filters import Condition, Keys, Kind, parse, span_of
from nimble_jobs.cli.listing import Column, Selection, print_rows
from nimble_jobs.cli.matches import matches_of
from nimble_jobs.job import Job, JobState
from nimble_jobs.plural import count
from nimble_jobs.views import figures, waits
from nimble_jobs.views import jobs as job_view
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.store import Store
    from nimble_jobs.store.listed import Match

TABLE_ROWS = 100  # on a terminal, unless --limit says otherwise
SHORTHANDS = ("since", "until", "text")  # names for filters in addition to the keys
_SPAN = re.compile(r"\s*(since|until)\s*=(.*)", re.DOTALL)
_SEARCH = re.compile(r"\s*text\s*=(.*)", re.DOTALL)

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
    "urgency": Kind.NUMBER,
    "held": Kind.FLAG,
    "group": Kind.TEXT,
    "array": Kind.TEXT,
    "array_index": Kind.NUMBER,
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
    Column(header="STATE", cell=lambda row: job_view.state_text(row), style=_state_style),
    Column(header="RECORDS", cell=job_view.progress, justify="right"),
    Column(header="RATE", cell=lambda row: figures.rate(row["records_per_s"]), justify="right"),
    Column(header="TIME", cell=lambda row: figures.duration(row["elapsed_s"]), justify="right"),
    Column(
        header="SCHEDULE", cell=lambda row: "eager" if row["runs"] == "eager" else row["hit"] or "-", from_width=100
    ),
    Column(header="NOTE", cell=_note, style=_note_style, flexible=True, from_width=110),
)


def register(app: typer.Typer) -> None:
    app.command()(ls)


def ls(
    ctx: typer.Context,
    array: Annotated[
        str | None, typer.Argument(metavar="ARRAY", help="Show only the jobs of this array.", show_default=False)
    ] = None,
    filters: options.Filters = None,
    sort: options.Sort = None,
    limit: options.Limit = None,
    quiet: options.IdsOnly = False,
    json: options.Json = False,
) -> None:
    """List jobs, the newest first.

    A terminal shows a hundred, unless --limit says otherwise. --filter knows every key of the JSON rows, and also
    since=7d, since=2026-01-31, until=… and text=WORDS, which searches names and errors.
    """
    table = output.on_terminal() and not (json or quiet)
    shown = TABLE_ROWS if table and limit is None else limit
    from nimble_jobs import client

    with options.store(ctx) as store:
        client.recover(store)  # without a worker, nothing else notices jobs whose process died
        only = () if array is None else (f"array={store.jobs.array_of(array)}",)
        selection = Selection(filters=(*only, *(filters or ())), sort=sort, limit=shown)
        rows = job_rows(store, selection, ids_only=quiet and not json)
        total = _total(store, selection) if shown is not None and len(rows) == shown else None
        empty = "no job matches" if rows or any(store.jobs.counts().values()) else "no jobs"
    print_rows(
        rows, COLUMNS, id_key="id", json=json, quiet=quiet, empty=f"{empty}; submit one with: nimble-jobs submit SPEC"
    )
    if not table:
        return
    _note_waits(rows)
    if wrong := [row["id"] for row in rows if row["error"] or row["records_bad"]]:
        output.note(f"errors in {figures.few(wrong)}; see them with: nimble-jobs show ID")
    if total is not None and total > len(rows):
        output.note(f"{len(rows):,} of {count(total, 'job')}; more with: --limit {total}")


def job_rows(store: Store, selection: Selection, *, ids_only: bool = False) -> list[Row]:
    """The rows of `ls`. The database filters, sorts and limits as far as it can. Raises UsageError.

    With `ids_only` rows may hold nothing but their `id`.
    """
    from nimble_jobs.store.listed import COLUMNS as STORED
    from nimble_jobs.store.listed import Match, Wanted

    now = selection.now
    matches, conditions = _conditions(selection)
    sort = selection.sort_key(KEYS)
    asks_why = [condition for condition in conditions if condition.key == "waits"]
    if any(condition.compare == "=" and condition.operand.lower() != "null" for condition in asks_why):
        matches.append(Match(column="state", compare="=", value=JobState.QUEUED.value))
    if asks_why or (sort is not None and sort not in STORED):  # known only once the jobs are
        jobs = store.jobs.listed(Wanted(matches=matches, now=now))
        return selection.chosen(_rows(store, jobs, now), conditions, sort)

    def keep(job: Job) -> bool:
        row = job_view.job_row(job, now)
        return all(condition.holds(row[condition.key]) for condition in conditions)

    wanted = Wanted(matches=matches, sort=sort, descending=selection.descending, limit=selection.limit, now=now)
    if ids_only and not conditions:
        return [{"id": job_id} for job_id in store.jobs.ids(wanted)]
    return _rows(store, store.jobs.listed(wanted, keep=keep if conditions else None), now)


def _conditions(selection: Selection) -> tuple[list[Match], list[Condition]]:
    """The conditions for the database, and those left for the rows. Raises UsageError."""
    from nimble_jobs.store.listed import TEXT, Match

    matches: list[Match] = []
    left: list[Condition] = []
    for text in selection.filters:
        if words := _SEARCH.fullmatch(text):
            matches.append(Match(column=TEXT, compare="contains", value=words[1].strip()))
            continue
        condition = parse(_span(text, selection.now), KEYS, selection.now, more=SHORTHANDS)
        found = matches_of(condition, KEYS, selection.now)
        matches += found
        if not found or not all(match.exact for match in found):
            left.append(condition)
    return matches, left


def _span(text: str, now: float) -> str:
    """`since=7d` as a condition on created_at; any other text unchanged. Raises UsageError."""
    matched = _SPAN.fullmatch(text)
    if matched is None:
        return text
    _, age = span_of(matched[1], matched[2].strip(), now)
    later = (matched[1] == "since") != age  # a smaller age is a later time
    return f"created_at{'>=' if later else '<='}{matched[2]}"


def _total(store: Store, selection: Selection) -> int | None:
    """How many jobs match the filters; None if only the rows can tell."""
    matches, left = _conditions(selection)
    return None if left else store.jobs.count(matches, selection.now)


def _rows(store: Store, jobs: Sequence[Job], now: float) -> list[Row]:
    why = waits.reasons(store, jobs, now)
    return [job_view.job_row(job, now, why.get(job.id)) for job in jobs]


def _note_waits(rows: Sequence[Row]) -> None:
    """Print each reason once on stderr, with the jobs that it holds back."""
    held: dict[str, list[str]] = {}
    for row in rows:
        if row["waits"]:
            held.setdefault(row["waits"], []).append(row["id"])
    for reason, ids in held.items():
        output.note(f"queued ({figures.few(ids)}): {reason}")
