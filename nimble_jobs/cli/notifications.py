"""Commands about notifications: notifications ls, retry, test."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.filters import Kind
from nimble_jobs.cli.listing import Column, Selection, print_rows
from nimble_jobs.errors import JobFailed, UsageError
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.store.notices import Notice

app = typer.Typer(name="notifications", help="See, retry and test notifications about jobs.", no_args_is_help=True)

KEYS = {
    "id": Kind.TEXT,
    "event": Kind.TEXT,
    "name": Kind.TEXT,
    "job": Kind.TEXT,
    "channel": Kind.TEXT,
    "target": Kind.TEXT,
    "state": Kind.TEXT,
    "attempts": Kind.NUMBER,
    "created_at": Kind.TIME,
    "next_at": Kind.TIME,
    "sent_at": Kind.TIME,
    "error": Kind.TEXT,
}
_STYLES = {"sent": "green", "given_up": "bold red", "pending": "yellow"}
COLUMNS = (
    Column(header="ID", cell=lambda row: row["id"]),
    Column(header="EVENT", cell=lambda row: row["event"]),
    Column(header="NAME", cell=lambda row: row["name"], flexible=True),
    Column(header="CHANNEL", cell=lambda row: row["channel"]),
    Column(header="STATE", cell=lambda row: row["state"], style=lambda row: _STYLES[row["state"]]),
    Column(header="TRIES", cell=lambda row: str(row["attempts"]), justify="right"),
    Column(header="AGE", cell=lambda row: figures.duration(row["age_s"]), justify="right", from_width=100),
    Column(header="TARGET", cell=lambda row: row["target"], flexible=True, gives_first=True, from_width=120),
    Column(header="ERROR", cell=lambda row: row["error"] or "-", flexible=True, gives_first=True),
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
    """List notifications, newest first: sent, pending with the last error, or given up."""
    now = time.time()
    with options.store(ctx) as store:
        rows = [_row(notice, now) for notice in store.outbox.list()]
        waiting = any(row["state"] == "pending" for row in rows)
        nobody = waiting and not store.workers.live()
        problem = store.settings.problem if waiting else None
    chosen = Selection(filters=filters or (), sort=sort, limit=limit).apply(rows, KEYS)
    if nobody:
        output.note(
            "pending notifications are not sent, because no worker is running; start one, or run: nimble-jobs "
            "cron serve"
        )
    if problem is not None:
        output.note(f"config.yaml is not valid, so its targets are not used:\n{problem}")
    shown = [{key: row[key] for key in KEYS} for row in chosen] if json else chosen
    print_rows(shown, COLUMNS, id_key="id", json=json, quiet=quiet, empty="no notifications")


@app.command()
def retry(
    ctx: typer.Context,
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Ids, or their first characters.", show_default=False),
    ] = None,
    given_up: Annotated[bool, typer.Option("--given-up", help="Retry all notifications that were given up.")] = False,
) -> None:
    """Send notifications again now. If that fails, keep trying for as long as with a new one."""
    if bool(ids) == given_up:
        raise UsageError("no notifications named; give their ids, or --given-up")
    with options.store(ctx) as store:
        again = store.outbox.retry(None if given_up else ids, time.time())
    for notice_id in again:
        output.emit(notice_id)
    if not again:
        output.note("no notification was given up")


@app.command("test")
def send_test(
    ctx: typer.Context,
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="SPEC", help="A spec with notify; default: config.yaml.", show_default=False),
    ] = None,
) -> None:
    """Send a test notification to each target now, and print the results. Exits 100 if one failed.

    Variables such as ${HOOK_URL} come from the environment of this command. Workers use their own environment.
    """
    from nimble_jobs.courier.trial import try_all
    from nimble_jobs.spec import dump, load

    loaded = None if spec is None else load(spec, check_files=False)
    settings = options.configured(ctx)
    results = try_all(settings.notify, dump(loaded)["notify"] if loaded else None)
    if not results:
        raise UsageError("nothing to send: neither config.yaml nor the spec names a webhook, command or ping")
    for channel, target, error in results:
        output.emit(f"{channel} {target}: {error or 'delivered'}")
    if any(error for _, _, error in results):
        raise JobFailed("some targets did not accept the test notification")


def _row(notice: Notice, now: float) -> Row:
    return {
        "id": notice.id,
        "event": notice.event,
        "name": notice.name,
        "job": notice.job_id,
        "channel": notice.channel,
        "target": notice.target,
        "state": notice.state.value,
        "attempts": notice.attempts,
        "created_at": figures.iso(notice.created_at),
        "next_at": figures.iso(notice.next_at) if notice.state == "pending" else None,
        "sent_at": figures.iso(notice.sent_at),
        "error": notice.error,
        "age_s": now - notice.created_at,
    }
