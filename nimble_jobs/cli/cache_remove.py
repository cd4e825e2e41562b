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
    from nimble_jobs.store.shared_prune import SharedRemovals, SharedRemoved


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
        _carry_out(store, removals, None, dry_run=dry_run, yes=yes, json=json)


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
    Files of `cache.shared` that no schedule needs go too, once they are a day old.
    """
    with options.store(ctx) as store:
        from nimble_jobs.store.prune import Wish, look
        from nimble_jobs.store.shared_prune import look_shared

        wish = Wish(
            quarantined=quarantined,
            stale=stale,
            unused_for_s=options.duration(unused_for, "--unused-for"),
            max_bytes=options.size(max_size, "--max-size"),
        )
        removals = look(store, wish, time.time())
        shared = look_shared(store, going={r.entry.key for r in removals.schedules})
        removed = _carry_out(store, removals, shared, dry_run=dry_run, yes=yes, json=json)
        if removed is not None:
            _compact(store)
        trouble = (shared and shared.trouble) or (removed and removed.trouble)
        if trouble is not None:
            raise StoreError(f"cache.shared: {trouble}")


def _compact(store: Store) -> None:
    try:
        store.compact()
    except StoreError as e:  # the rows are removed, and new schedules will reuse their space in the file
        output.note(f"the database's file did not shrink: {e}")


def _carry_out(
    store: Store, removals: Removals, shared: SharedRemovals | None, *, dry_run: bool, yes: bool, json: bool
) -> SharedRemoved | None:
    """List what would be removed, ask, and remove it. None if nothing was to be removed."""
    from nimble_jobs.store.prune import remove
    from nimble_jobs.store.shared_prune import SharedRemoved, remove_shared

    here, there = _what(removals), _what_shared(shared)
    what = ", and ".join([*here, *there])
    if not json:
        for removal in removals.schedules:
            output.note(with_reason(named(removal.entry), removal.why, sys.stderr))
        for removal in removals.kept:
            why = f"{removal.why}; kept, because a running worker holds it"
            output.note(with_reason(named(removal.entry), why, sys.stderr))
        if shared is not None and shared.refused is not None:
            output.note(f"cache.shared: nothing is removed from {shared.place}: {shared.refused}")
    done = None
    if not dry_run and what and options.confirmed(f"Remove {what}?", yes=yes):
        if here:
            remove(store, removals)
        done = SharedRemoved() if shared is None else remove_shared(store, shared)
    if json:
        output.emit_json(_json(removals, shared, done))
    elif not what:
        output.note("nothing to remove")
    elif done is None:
        output.note(f"would remove {what}" if dry_run else "nothing was removed")
    elif parts := [*here, *_removed_there(shared, done)]:
        output.note(f"removed {', and '.join(parts)}")
    return done


def _what(removals: Removals) -> list[str]:
    """What the plan removes from the state folder, for people; empty if nothing."""
    if not removals.schedules and not removals.artifacts and not removals.task_times:
        return []
    what = count(len(removals.schedules), "schedule")
    if removals.artifacts:
        what += f" and {count(len(removals.artifacts), 'artifact')}"
    if removals.task_times:
        what += f" and {count(len(removals.task_times), 'measured kind')} of tasks"
    return [f"{what}, {figures.size(removals.bytes)}"]


def _what_shared(shared: SharedRemovals | None) -> list[str]:
    if shared is None or not shared.files:
        return []
    return [f"{count(len(shared.files), 'file')}, {figures.size(shared.bytes)}, in {shared.place}"]


def _removed_there(shared: SharedRemovals | None, done: SharedRemoved) -> list[str]:
    """What was removed from the shared place, which may be less than planned."""
    if shared is None or not shared.files:
        return []
    what = f"{count(done.files, 'file')}, {figures.size(done.bytes)}, in {shared.place}"
    return [f"{what}, and perhaps {done.unsure:,} more" if done.unsure else what]


def _json(removals: Removals, shared: SharedRemovals | None, done: SharedRemoved | None) -> dict[str, Any]:
    values = {
        "removed": done is not None,
        "schedules": [
            {"key": r.entry.key, "model": r.entry.model, "bytes": r.entry.bytes, "why": r.why}
            for r in removals.schedules
        ],
        "artifacts": list(removals.artifacts),
        "task_times": len(removals.task_times),
        "bytes": removals.bytes,
        "kept": [{"key": r.entry.key, "why": r.why} for r in removals.kept],
        "shared": None,
    }
    if shared is not None:
        values["shared"] = {
            "place": shared.place,
            "files": len(shared.files),
            "bytes": shared.bytes,
            "removed_files": 0 if done is None else done.files,
            "removed_bytes": 0 if done is None else done.bytes,
            "unsure_files": 0 if done is None else done.unsure,
            "problem": shared.refused or shared.trouble or (done and done.trouble),
        }
    return values
