"""The command cache stats: how often schedules are hit, why they are missed, and how much time hits saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from nimble_jobs.cli import options, output, render
from nimble_jobs.plural import count
from nimble_jobs.views import figures

if TYPE_CHECKING:
    from nimble_jobs.store import Store


def register(app: typer.Typer) -> None:
    app.command()(stats)


def stats(ctx: typer.Context, json: options.Json = False) -> None:
    """Show hit rates, reasons for misses, build time saved, and sizes.

    Uses by jobs, by `Nimble` in programs and by `cache build` count from the day the state folder was created, also
    for schedules that have been removed since.
    """
    with options.store(ctx) as store:
        found = _statistics(store)
    if json:
        output.emit_json(found)
    else:
        render.sections(_sections(found))


def _statistics(store: Store) -> dict[str, Any]:
    """Of the stored schedules: how many in each state, hits, bytes, artifacts. Of all uses since the state folder was
    made: how many of each kind, misses by reason, and the seconds of building that the hits saved.
    """
    from nimble_jobs.store import ScheduleState
    from nimble_jobs.store.prune import aged, stored_bytes

    entries = aged(store.schedules.list())
    artifacts = store.schedules.artifacts()
    uses = store.schedules.uses()
    return {
        "schedules": len(entries),
        **{state.value: sum(entry.state == state for entry in entries) for state in ScheduleState},
        "hits": sum(entry.hits for entry in entries),
        "resident_hits": sum(entry.resident_hits for entry in entries),
        "bytes": stored_bytes(entries, artifacts),
        "artifacts": len({ref.name for refs in artifacts.values() for ref in refs}),
        "uses": {
            "resident": uses.resident,
            "stored": uses.stored,
            "miss": sum(uses.misses.values()),
            "total": uses.total,
        },
        "misses": uses.misses,
        "saved_s": uses.saved_s,
    }


def _sections(found: dict[str, Any]) -> list[render.Section]:
    states = [f"{found[state]:,} {state}" for state in ("ready", "stale", "quarantined") if found[state]]
    uses = found["uses"]
    schedules = [
        ("stored", count(found["schedules"], "schedule") + (f": {', '.join(states)}" if states else "")),
        ("size", f"{figures.size(found['bytes'])} with {count(found['artifacts'], 'artifact')}"),
        ("hits", f"{found['hits']:,} by jobs that used these schedules"),
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
