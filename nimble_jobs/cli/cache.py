"""Commands about stored schedules. Here: ls, size, dir; the others are registered from files of their own."""

from __future__ import annotations

import typer

from nimble_jobs.cli import (
    cache_move,
    cache_remove,
    cache_show,
    cache_spec,
    cache_stats,
    cache_verify,
    options,
    output,
)
from nimble_jobs.cli.cache_rows import COLUMNS, KEYS, explained, families, measured_on, wanted_line
from nimble_jobs.cli.listing import Selection, print_rows
from nimble_jobs.views import figures
from nimble_jobs.views.schedules import grouped, rows_of

_EXPLAINED = 5  # reasons under a list

app = typer.Typer(name="cache", help="Manage stored schedules.", no_args_is_help=True)


@app.command()
def ls(
    ctx: typer.Context,
    filters: options.Filters = None,
    sort: options.Sort = None,
    limit: options.Limit = None,
    quiet: options.IdsOnly = False,
    json: options.Json = False,
) -> None:
    """List the stored schedules, the oldest first.

    The schedules of a text model, one for each length that texts are padded to, are listed together.

    Examples of filters: model=*resnet*, device=*H200*, size>100MB, used>30d, replay<2ms, speedup>2x, state=stale,
    resident=yes.
    """
    with options.store(ctx) as store:
        from nimble_jobs.store.prune import aged

        rows = rows_of(store, aged(store.schedules.list()))
        wanted = store.wanted.list()
    order = "created_at" if sort is None else sort
    shown = Selection(filters=filters or (), sort=order, limit=limit).apply(rows, KEYS)
    if sort is None:
        shown = grouped(shown)
    empty = "no schedule matches" if rows else "no stored schedules; build one with: nimble-jobs cache build SPEC"
    caption = measured_on(shown)
    print_rows(shown, COLUMNS, id_key="key", json=json, quiet=quiet, empty=empty, caption=caption)
    if not (json or quiet):
        for line in [
            *families(shown)[:_EXPLAINED],
            *explained(shown)[:_EXPLAINED],
            *(wanted_line(each) for each in wanted[:_EXPLAINED]),
        ]:
            output.note(line)


cache_show.register(app)
cache_spec.register(app)
cache_stats.register(app)
cache_verify.register(app)
cache_remove.register(app)
cache_move.register(app)


@app.command()
def size(ctx: typer.Context, json: options.Json = False) -> None:
    """Print what takes up space in the state folder."""
    with options.store(ctx) as store:
        from dataclasses import asdict

        from nimble_jobs.store.sizes import sizes

        usage = sizes(store)
        values = asdict(usage) | {"total_bytes": usage.total_bytes, "limit_bytes": store.settings.now().cache.size}
    if json:
        output.emit_json(values)
    else:
        output.emit("\n".join(f"{name:<10} {text}" for name, text in _lines(values)))


@app.command("dir")
def dir_(ctx: typer.Context) -> None:
    """Print the state folder."""
    output.emit(str(options.home(ctx)))


def _lines(values: dict[str, int | None]) -> list[tuple[str, str]]:
    limit = values["limit_bytes"]
    texts = {name: figures.size(nbytes) for name, nbytes in values.items()}
    return [
        ("database", f"{texts['database_bytes']}, including {texts['schedules_bytes']} of schedules"),
        ("artifacts", f"{texts['artifacts_bytes']}, including {texts['unneeded_bytes']} that no schedule needs"),
        ("logs", texts["logs_bytes"]),
        ("total", texts["total_bytes"]),
        (
            "limit",
            "none; set cache.size in config.yaml" if limit is None else f"{figures.size(limit)} for schedules",
        ),
    ]
