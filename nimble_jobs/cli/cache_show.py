"""The command cache show: everything that is known about one schedule."""

from __future__ import annotations

from typing import Any

import typer

from nimble_jobs.cli import options, output, render
from nimble_jobs.cli.cache_rows import Key
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row
from nimble_jobs.views.schedules import look


def register(app: typer.Typer) -> None:
    app.command()(show)


def show(ctx: typer.Context, key: Key, json: options.Json = False) -> None:
    """Show one schedule: measurements, graph, candidates, origin, artifacts, and every part of its key.

    The state is `damaged` if the stored bytes have changed. The command changes nothing.
    """
    with options.store(ctx) as store:
        found = look(store, key)
    if json:
        output.emit_json(found.json())
    else:
        render.sections(_sections(found.row, found.parts, found.facts, found.files))


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
    sections += render.choices(facts.get("choices", ()))
    if files:
        sections.append(("Artifacts", [(file["name"][:16], _file(file)) for file in files]))
    return [*sections, ("Key", figures.flat(parts))]


def _file(file: dict[str, Any]) -> str:
    unfit = (", damaged" if file["stored"] else ", missing") if file["damage"] else ""
    return f"{file['kind']}, {figures.size(file['bytes'])}{unfit}"


def _clock(iso: str) -> str:
    return iso[:19].replace("T", " ") + " UTC"
