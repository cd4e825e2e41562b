"""Commands that carry schedules to machines with equal GPUs: cache export, import."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.cache_rows import KeyList, found, removed_for_room, shape, with_reason
from nimble_jobs.plural import count
from nimble_jobs.views import figures


def register(app: typer.Typer) -> None:
    app.command()(export)
    app.command("import")(import_)


def export(
    ctx: typer.Context,
    keys: KeyList,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write; it must not exist yet.", show_default=False)
    ],
) -> None:
    """Write schedules, and everything they need, into one file for machines with the same GPU and software."""
    with options.store(ctx) as store:
        from nimble_jobs.store.bundle import write_bundle

        chosen = [entry.key for entry in found(store, keys)]
        nbytes = write_bundle(store, chosen, file, time.time())
    output.note(f"{file}: {count(len(chosen), 'schedule')}, {figures.size(nbytes)}")


def import_(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that `cache export` wrote.", show_default=False)],
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
) -> None:
    """Import schedules from a file, all or none.

    Every digest, key and plan is checked first; a schedule for another device or made with other software is refused. A
    schedule that is stored already is left alone. Kernels in the file are machine code that jobs will run: import only
    files that you trust.
    """

    def agreed(code_bytes: int) -> bool:
        question = f"{file} holds {figures.size(code_bytes)} of machine code that jobs will run. Import it?"
        return options.confirmed(question, yes=yes)

    with options.store(ctx) as store:
        from nimble_jobs.planner.lookup.transfer import (
            import_schedules,  # loads torch: only it knows this machine's devices
        )

        taken = import_schedules(file, store=store, now=time.time(), agreed=agreed, dry_run=dry_run)
    if taken.removed:
        output.note(removed_for_room([entry.key for entry in taken.removed]))
    if json:
        output.emit_json([asdict(each) for each in taken.schedules])
        return
    for each in taken.schedules:
        output.note(with_reason(f"{each.key[:12]}  {each.model} {shape(each.input)}", each.said, sys.stderr))
    what = count(sum(each.taken for each in taken.schedules), "schedule")
    output.note(f"would import {what}" if dry_run else f"imported {what}")
