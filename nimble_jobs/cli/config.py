"""Commands about the configuration: config show, check, path, schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.listing import Column, print_rows
from nimble_jobs.views.figures import Row
from nimble_jobs.views.job_notes import text_of

app = typer.Typer(
    name="config",
    help="Show and check the configuration: config.yaml and what overrides it.",
    no_args_is_help=True,
)

COLUMNS = (
    Column(header="FIELD", cell=lambda row: row["field"]),
    Column(header="VALUE", cell=lambda row: row["text"], flexible=True),
    Column(header="FROM", cell=lambda row: row["from"], flexible=True, gives_first=True),
    Column(header="VARIABLE", cell=lambda row: row["variable"], from_width=140),
)


@app.command()
def show(ctx: typer.Context, json: options.Json = False) -> None:
    """Show every value in force, and its origin."""
    from nimble_jobs.settings import variable

    settings, folder = options.configured(ctx), f"{options.chosen_home(ctx)}/"
    shown = output.on_terminal()
    rows: list[Row] = [
        {
            "field": field,
            "value": value,
            "text": text_of(field, value),
            "origin": settings.origin(field),
            "from": settings.origin(field).removeprefix(folder) if shown else settings.origin(field),
            "variable": variable(field),
        }
        for field, value in settings.flat().items()
    ]
    if json:
        output.emit_json([{key: row[key] for key in ("field", "value", "origin", "variable")} for row in rows])
        return
    print_rows(rows, COLUMNS, id_key="field", json=False, quiet=False, empty="")


@app.command()
def check(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="File to check; default: config.yaml.", show_default=False),
    ] = None,
) -> None:
    """Check the configuration with everything that overrides it, or one file alone. Exits 2 and lists all mistakes."""
    from nimble_jobs.settings import FILE, check_file

    if file is not None:
        check_file(file)
        output.note(f"{file}: valid")
        return
    options.configured(ctx)
    path = options.chosen_home(ctx) / FILE
    output.note(f"{path}: valid" if path.exists() else f"{path}: no such file; every value is a default")


@app.command()
def path(ctx: typer.Context) -> None:
    """Print the path of config.yaml, which need not exist yet."""
    from nimble_jobs.settings import FILE

    output.emit(str(options.chosen_home(ctx) / FILE))


@app.command()
def schema() -> None:
    """Print the JSON Schema of config.yaml, for editors that complete YAML."""
    from nimble_jobs.settings import json_schema

    output.emit_json(json_schema())
