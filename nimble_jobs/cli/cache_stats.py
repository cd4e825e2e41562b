"""The command cache stats: how often schedules are hit, why they are missed, and how much time hits saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from nimble_jobs.cli import options, output, render
from nimble_jobs.plural import count
from nimble_jobs.views import figures
from nimble_jobs.views.schedules import statistics

if TYPE_CHECKING:
    pass


def register(app: typer.Typer) -> None:
    app.command()(stats)


def stats(ctx: typer.Context, json: options.Json = False) -> None:
    """Show hit rates, reasons for misses, build time saved, and sizes.

    Counts every use by jobs, by `Nimble` in programs and by `cache build` since the state folder was created. Uses of
    schedules that have been removed count too.
    """
    with options.store(ctx) as store:
        found = statistics(store)
    if json:
        output.emit_json(found)
    else:
        render.sections(_sections(found))


def _sections(found: dict[str, Any]) -> list[render.Section]:
    states = [f"{found[state]:,} {state}" for state in ("ready", "stale", "quarantined") if found[state]]
    uses = found["uses"]
    schedules = [
        ("stored", count(found["schedules"], "schedule") + (f": {', '.join(states)}" if states else "")),
        ("size", f"{figures.size(found['bytes'])} with {count(found['artifacts'], 'artifact')}"),
        ("hits", f"{found['hits']:,} by jobs that used these schedules"),
        ("task times", f"{count(found['task_times'], 'kind')} of tasks measured, which later builds need not measure"),
    ]
    asked = [(name, _share(uses[name], uses["total"])) for name in ("resident", "stored", "miss")]
    saved = [
        (
            "build time",
            f"{figures.duration(found['saved_s'])}; each hit saves the time that its schedule took to build",
        )
    ]
    parts = [("Schedules", schedules), ("Uses", asked), ("Saved", saved)]
    if found["misses"]:
        parts.append(("Misses", [(f"{number:,}", reason) for reason, number in found["misses"].items()]))
    return parts


def _share(number: int, total: int) -> str:
    return f"{number:,} of {total:,}, {100 * number / total:.1f} %" if total else "-"
