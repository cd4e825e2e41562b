"""Commands that delete schedules: cache rm, prune."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.cache_rows import KeyList, found, named, with_reason
from nimble_jobs.errors import StoreError, UsageError
from nimble_jobs.plural import count
from nimble_jobs.views import figures

if TYPE_CHECKING:
    from nimble_jobs.store import Store
    from nimble_jobs.store.prune import Removals


def register(app: typer.Typer) -> None:
    app.command()(rm)
    app.command()(prune)


def rm(
    ctx: typer.Context,
    keys: KeyList,
    force: Annotated[
        bool, typer.Option("--force", help="Also remove schedules that a running worker holds on its device.")
    ] = False,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
) -> None:
    """Remove stored schedules. Jobs that need one build it again.

    Without --force, the command refuses a schedule that a running worker holds on its device.
    """
    with options.store(ctx) as store:
        from nimble_jobs.store.prune import Wish, look

        chosen = [entry.key for entry in found(store, keys)]
        removals = look(store, Wish(), time.time(), keys=chosen, force=force)
        if removals.kept:
            held = ", ".join(r.entry.key[:12] for r in removals.kept)
            raise UsageError(f"a running worker holds {held} on its device; stop the worker, or add --force")
        _carry_out(store, removals, dry_run=dry_run, yes=yes, json=json)


def prune(
    ctx: typer.Context,
    unused_for: Annotated[
        str | None,
        typer.Option(
            "--unused-for", metavar="TIME", help="Remove schedules not used for this long, such as 12h or 30d."
        ),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            "--max-size",
            metavar="SIZE",
            help="Remove the least recently used until the rest fits this size, such as 10GB.",
        ),
    ] = None,
    stale: Annotated[
        bool,
        typer.Option(
            "--stale", help="Remove schedules for this machine's devices that were made with other software versions."
        ),
    ] = False,
    quarantined: Annotated[bool, typer.Option("--quarantined", help="Remove quarantined schedules.")] = False,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
) -> None:
    """Remove schedules that you no longer want to keep, and artifacts that no schedule needs.

    Artifacts are files with kernels and constants. Without options, only artifacts that no schedule needs are removed.
    With --unused-for, --stale and --quarantined, measurements of single tasks go by the same rule.
    A schedule that a running worker holds on its device always stays. The database file shrinks afterwards.
    """
    with options.store(ctx) as store:
        from nimble_jobs.store.prune import Wish, look

        wish = Wish(
            quarantined=quarantined,
            stale=stale,
            unused_for_s=options.duration(unused_for, "--unused-for"),
            max_bytes=options.size(max_size, "--max-size"),
        )
        if _carry_out(store, look(store, wish, time.time()), dry_run=dry_run, yes=yes, json=json):
            _compact(store)


def _compact(store: Store) -> None:
    try:
        store.compact()
    except StoreError as e:  # the rows are removed, and new schedules will reuse their space in the file
        output.note(f"the database's file did not shrink: {e}")


def _carry_out(store: Store, removals: Removals, *, dry_run: bool, yes: bool, json: bool) -> bool:
    """List what would be removed, ask, and remove it. Returns whether anything was removed."""
    from nimble_jobs.store.prune import remove

    what = count(len(removals.schedules), "schedule")
    if removals.artifacts:
        what += f" and {count(len(removals.artifacts), 'artifact')}"
    if removals.task_times:
        what += f" and {count(len(removals.task_times), 'measured kind')} of tasks"
    what += f", {figures.size(removals.bytes)}"
    if not json:
        for removal in removals.schedules:
            output.note(with_reason(named(removal.entry), removal.why, sys.stderr))
        for removal in removals.kept:
            why = f"{removal.why}; kept, because a running worker holds it"
            output.note(with_reason(named(removal.entry), why, sys.stderr))
    nothing = not removals.schedules and not removals.artifacts and not removals.task_times
    done = not dry_run and not nothing and options.confirmed(f"Remove {what}?", yes=yes)
    if done:
        remove(store, removals)
    if json:
        output.emit_json(_json(removals, removed=done))
    elif nothing:
        output.note("nothing to remove")
    else:
        output.note(f"would remove {what}" if dry_run else f"removed {what}" if done else "nothing was removed")
    return done


def _json(removals: Removals, *, removed: bool) -> dict[str, Any]:
    return {
        "removed": removed,
        "schedules": [
            {"key": r.entry.key, "model": r.entry.model, "bytes": r.entry.bytes, "why": r.why}
            for r in removals.schedules
        ],
        "artifacts": list(removals.artifacts),
        "task_times": len(removals.task_times),
        "bytes": removals.bytes,
        "kept": [{"key": r.entry.key, "why": r.why} for r in removals.kept],
    }
