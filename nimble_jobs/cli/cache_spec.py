"""Commands about the schedules that a spec needs: cache why, build."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nimble_jobs.cli import options, output, render
from nimble_jobs.cli.cache_rows import removed_for_room, shape, with_reason
from nimble_jobs.cli.telling import telling
from nimble_jobs.cli.ticked import as_of_a_tick
from nimble_jobs.errors import JobFailed, ModelError, UsageError
from nimble_jobs.kernel_switches import PART
from nimble_jobs.views import figures
from nimble_jobs.views.schedules import brief, rows_of

if TYPE_CHECKING:
    from nimble_jobs.planner.jobs.ahead import Ahead
    from nimble_jobs.planner.lookup.why import Difference, Why
    from nimble_jobs.store import Store


def register(app: typer.Typer) -> None:
    app.command()(why)
    app.command()(build)


def why(
    ctx: typer.Context,
    spec: options.SpecFile,
    overrides: options.Overrides = None,
    gpu_memory: options.GpuMemory = None,
    json: options.Json = False,
) -> None:
    """Say whether a spec's schedule is stored; if not, how its key differs from the nearest stored one.

    The nearest schedule is one for the same model, if there is any, whose key differs in the fewest parts. Nothing is
    built. Exits 0 for a hit and for a miss.
    """
    from nimble_jobs.spec import load

    loaded = as_of_a_tick(load(spec, overrides or ()))
    settings = options.configured(ctx, gpu_memory=gpu_memory)
    with options.store(ctx) as store:
        from nimble_jobs.workloads.ahead import why as ask  # loads torch: the key names the device

        answer = ask(loaded, store=store, memory_bytes=settings.gpu_memory)
        if answer.nearest is not None and answer.nearest.key == answer.key:
            answer = replace(answer, nearest=None)  # set aside: the reason says all
        near = rows_of(store, [answer.nearest])[0] if answer.nearest else None
    if json:
        row: dict[str, Any] = {
            "key": answer.key,
            "hit": answer.hit,
            "reason": answer.reason,
            "key_parts": answer.parts,
        }
        row |= {"nearest": near, "differences": [asdict(d) for d in answer.differences]}
        output.emit_json(row | {"changed_files": answer.changed_files})
        return
    render.sections(_sections(answer))


def build(
    ctx: typer.Context,
    spec: options.SpecFile,
    overrides: options.Overrides = None,
    batch_size: Annotated[
        list[str] | None,
        typer.Option("--batch-size", metavar="N,N", help="Batch sizes to use instead of the spec's. Repeatable."),
    ] = None,
    gpu_memory: options.GpuMemory = None,
    allow_python: options.AllowPython = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Build and store the schedules that a spec's jobs will need. No job is queued."""
    from nimble_jobs.client import permitted
    from nimble_jobs.models import permission
    from nimble_jobs.spec import load

    sizes = _sizes(batch_size or ())
    settings = options.configured(ctx, gpu_memory=gpu_memory)
    loaded = as_of_a_tick(load(spec, overrides or ()))
    allowed = permitted(loaded, allow_python or (), settings=settings)
    try:
        permission.check(loaded.model, allowed)
    except ModelError as e:
        raise UsageError(str(e)) from e
    made: list[Ahead] = []
    with options.store(ctx) as store, telling(quiet=quiet) as tell:

        def told(doing: str) -> None:
            tell(f"{len(made) + 1} of {len(sizes)}: {doing}" if len(sizes) > 1 else doing)

        from nimble_jobs.workloads.ahead import build as ahead  # loads torch

        capped = settings.cache.size is not None
        before = _keys(store) if capped else []
        for each in ahead(
            loaded, store=store, batch_sizes=sizes, allowed_python=allowed, memory_bytes=settings.gpu_memory, say=told
        ):
            made.append(each)
            if not json:
                output.emit(_line(each))
        stored = [*before, *(each.key for each in made if not each.fallback)]
        gone = set(stored).difference(_keys(store)) if capped else set()
    if gone:
        output.note(removed_for_room([key for key in dict.fromkeys(stored) if key in gone]))
    if json:
        output.emit_json([asdict(each) for each in made])
    failed = [each for each in made if each.fallback]
    if failed:
        raise JobFailed("\n".join(f"{each.input}: jobs will run in eager: {each.fallback}" for each in failed))


def _keys(store: Store) -> list[str]:
    return [entry.key for entry in store.schedules.list()]


def _sizes(texts: Sequence[str]) -> tuple[int, ...]:
    sizes = [word.strip() for text in texts for word in text.split(",")]
    for word in sizes:
        if not (word.isascii() and word.isdigit() and int(word) > 0):
            raise UsageError(f"--batch-size: found {word!r}; expected whole numbers above 0 such as 1,8,32")
    return tuple(dict.fromkeys(int(word) for word in sizes))


def _line(made: Ahead) -> str:
    head = f"{made.key[:12]}  {shape(made.input)}"
    if made.fallback:
        return with_reason(f"{head}  no schedule", made.fallback, sys.stdout)
    took = figures.duration(made.build_s)
    measured = {"replay_us": made.replay_us, "eager_us": made.eager_us, "runs": made.runs, "device": made.device}
    state = f"hit, built before in {took}" if made.hit else f"built in {took}"
    state += f", taken over from {made.taken_from['batch']}" if made.taken_from else ""
    return with_reason(f"{head}  {state}", figures.speedup(measured), sys.stdout)


def _sections(answer: Why) -> list[render.Section]:
    head = [("key", answer.key[:16]), ("answer", "hit" if answer.hit else f"miss: {answer.reason}")]
    near = answer.nearest
    if near is None:
        return [("Schedule", head)]
    said = f"{near.key[:16]} {near.model}, {near.state.value}" + (
        f": {brief(near.key, near.reason)}" if near.reason else ""
    )
    head.append(("nearest", said))
    if answer.changed_files:
        head.append(("changed", f"file {', '.join(answer.changed_files)}"))
    lines = [(d.part, _difference(d)) for d in answer.differences]
    return [("Schedule", head), ("Differs from the nearest stored key", lines)] if lines else [("Schedule", head)]


def _difference(difference: Difference) -> str:
    def short(value: str | None) -> str:
        if value is None:
            return "with all" if difference.part == PART else "absent"
        return value[:16] if ".file:" in difference.part else value

    return f"{short(difference.wanted)}; stored: {short(difference.stored)}"
