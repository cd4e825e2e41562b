"""Commands about specs that run nothing: validate, schema, explain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output, render
from nimble_jobs.cli.explained import explained
from nimble_jobs.cli.telling import telling
from nimble_jobs.cli.ticked import as_of_a_tick, when
from nimble_jobs.errors import JobFailed, NotFound, UsageError
from nimble_jobs.views import figures

if TYPE_CHECKING:
    from nimble_jobs.spec import JobSpec


def register(app: typer.Typer) -> None:
    app.command()(validate)
    app.command()(schema)
    app.command()(explain)


def validate(
    ctx: typer.Context,
    spec: options.SpecFile,
    overrides: options.Overrides = None,
    data: Annotated[
        bool, typer.Option("--data", help="Also open the input, read a record, and check device, model and shapes.")
    ] = False,
    allow_python: options.AllowPython = None,
    json: options.Json = False,
) -> None:
    """Check a spec and list all of its mistakes. No schedule is built, not even with --data."""
    from nimble_jobs.client import permitted
    from nimble_jobs.settings import check_targets
    from nimble_jobs.spec import dump, load
    from nimble_jobs.spec.load import name_of

    loaded = load(spec, overrides or ())
    check_targets(loaded.notify, options.configured(ctx), name_of(spec))
    if data:
        allowed = permitted(loaded, allow_python or (), settings=options.configured(ctx))
        _look(as_of_a_tick(loaded), allowed, json=json)
    elif json:
        output.emit_json(dump(loaded))
    if not json:
        output.note(f"{name_of(spec)}: valid{when(loaded)}")


def _look(spec: JobSpec, allowed: tuple[Path, ...], *, json: bool) -> None:
    """Print the findings of `--data`. Raises UsageError with all problems."""
    from nimble_jobs.spec import dump
    from nimble_jobs.workloads.look import look  # loads torch

    seen = look(spec, allowed)
    if json:
        output.emit_json({"spec": dump(spec), "data": seen.found, "problems": seen.problems})
    else:
        render.sections([("Data", figures.flat(seen.found))])
    if seen.problems:
        raise UsageError("\n".join(seen.problems))


def schema() -> None:
    """Print the JSON Schema of specs, for editors that complete YAML."""
    from nimble_jobs.spec import json_schema

    output.emit_json(json_schema())


def explain(
    ctx: typer.Context,
    spec: options.SpecFile,
    overrides: options.Overrides = None,
    no_build: Annotated[bool, typer.Option("--no-build", help="Only look the schedule up; build nothing.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw streams and syncs over time, as .html, .svg or .json.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto and chrome://tracing.")
    ] = None,
    dot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the dependencies as Graphviz DOT.")] = None,
    gpu_memory: options.GpuMemory = None,
    allow_python: options.AllowPython = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Show a spec's schedule, and why it was chosen.

    Prints its key, build stages, graph, bounds, memory, and candidates with the reason for or against each.

    If the schedule is not stored yet, the command builds and stores it. Exits 100 if jobs will run in eager.
    """
    from nimble_jobs.client import allowed_python, permitted
    from nimble_jobs.draw import Drawing
    from nimble_jobs.spec import load

    asked = ((Drawing.timeline, timeline), (Drawing.trace, trace), (Drawing.dot, dot))
    drawings = [make(path) for make, path in asked if path is not None]
    loaded = as_of_a_tick(load(spec, overrides or ()))
    named, settings = allow_python or (), options.configured(ctx, gpu_memory=gpu_memory)
    # A lookup runs no code.
    allowed = allowed_python(named, settings=settings) if no_build else permitted(loaded, named, settings=settings)
    with options.store(ctx) as store, telling(quiet=quiet) as told:
        from nimble_jobs.workloads.explain import explain as plan  # loads torch

        found, schedule = plan(
            loaded,
            store=store,
            build=not no_build,
            allowed_python=allowed,
            memory_bytes=settings.gpu_memory,
            say=told,
        )
    if json:
        output.emit_json(found)
    else:
        render.sections(explained(found))
    for drawing in drawings:
        if schedule is None:
            why = found["fallback"] or found["miss_reason"] or "it was never built"
            raise NotFound(f"{drawing.path}: no schedule to draw: {why}")
        drawing.save(schedule)
        output.note(f"wrote {drawing.path}")
    if found["fallback"] is not None:
        raise JobFailed(f"jobs will run in eager: {found['fallback']}")
