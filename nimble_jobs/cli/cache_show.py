"""The command cache show: everything that is known about one schedule."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from nimble_jobs.cli import options, output, render
from nimble_jobs.cli.cache_rows import Key, brief, rows_of
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.schedule import Schedule
    from nimble_jobs.store import Store
    from nimble_jobs.store.records import ArtifactRef


def register(app: typer.Typer) -> None:
    app.command()(show)


def show(ctx: typer.Context, key: Key, json: options.Json = False) -> None:
    """Show one schedule: measurements, graph, candidates, origin, artifacts, and every part of its key.

    The state is `damaged` if the stored bytes have changed. The command changes nothing.
    """
    with options.store(ctx) as store:
        from nimble_jobs.store.prune import aged

        entry = aged([store.schedules.get(key)])[0]
        row = rows_of(store, [entry])[0]
        schedule, damage = _read(store, entry.key)
        artifacts = store.schedules.artifacts([entry.key]).get(entry.key, ())
        files = [_looked_at(store, ref) for ref in artifacts]
    damage = damage or next((file["damage"] for file in files if file["damage"]), None)
    if damage is not None and row["state"] != "quarantined":
        row |= {
            "state": "damaged",
            "reason": f"{damage}; the next job that needs it quarantines it and builds it again",
        }
    facts: dict[str, Any] = {}
    if schedule:
        facts = {
            "graph": dataclasses.asdict(schedule.facts),
            "candidates": [dataclasses.asdict(candidate) for candidate in schedule.candidates],
            "check": {"tolerance": schedule.tolerance, "error": schedule.error},
            "memory": {"peak_bytes": schedule.peak_bytes, "arena_bytes": schedule.arena_bytes},
        }
    origin = {name: entry.parts[name] for name in ("torch", "cuda", "driver", "triton") if name in entry.parts}
    facts["provenance"] = entry.provenance | origin
    if json:
        output.emit_json(row | {"sha256": entry.sha256, "key_parts": entry.parts, "artifacts": files} | facts)
        return
    render.sections(_sections(row, entry.parts, facts, files))


def _read(store: Store, key: str) -> tuple[Schedule | None, str | None]:
    """The schedule, or how it is damaged; neither if this version cannot read its format."""
    from nimble_jobs.errors import Damaged

    try:
        stored = store.schedules.verified(key)
        return (None if stored.state == "stale" else stored.load()), None
    except Damaged as e:
        return None, brief(key, str(e))


def _looked_at(store: Store, ref: ArtifactRef) -> dict[str, Any]:
    """Facts about an artifact's file; `damage` says why its bytes cannot be used."""
    from nimble_jobs.errors import Damaged, NotFound

    damage = None
    try:
        with store.artifacts.in_use():
            store.artifacts.get(ref.name)
    except (Damaged, NotFound) as e:
        damage = str(e)
    return dataclasses.asdict(ref) | {"stored": store.artifacts.has(ref.name), "damage": damage}


def _sections(
    row: Row, parts: dict[str, str], facts: dict[str, Any], files: list[dict[str, Any]]
) -> list[render.Section]:
    told = {"speedup", "created_at", "build_s", "last_used_at", "hits", "resident_hits"}
    speed = figures.speedup(row)
    if speed:
        told |= {"replay_us", "eager_us", "device"}
    head = figures.flat({name: value for name, value in row.items() if name not in told and value not in ("", [])})
    if speed:
        head.insert(1, ("speed", speed))
    hits = f"{row['hits']:,}, {row['resident_hits']:,} of them resident"
    head += [("hits", hits), ("last used", _clock(row["last_used_at"]))]
    origin = [("built", f"{_clock(row['created_at'])}, in {figures.duration(row['build_s'])}")]
    sections = [("Schedule", head), ("Origin", origin + figures.flat(facts["provenance"]))]
    sections += [
        (title.capitalize(), figures.flat(facts[title])) for title in ("graph", "check", "memory") if title in facts
    ]
    sections += render.candidates(facts.get("candidates", ()))
    if files:
        sections.append(("Artifacts", [(file["name"][:16], _file(file)) for file in files]))
    return [*sections, ("Key", figures.flat(parts))]


def _file(file: dict[str, Any]) -> str:
    unfit = (", damaged" if file["stored"] else ", missing") if file["damage"] else ""
    return f"{file['kind']}, {figures.size(file['bytes'])}{unfit}"


def _clock(iso: str) -> str:
    return iso[:19].replace("T", " ") + " UTC"
