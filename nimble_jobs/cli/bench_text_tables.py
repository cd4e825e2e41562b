"""How results of `bench text` look: a table on a terminal, every row in a pipe, and why a row has no figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nimble_jobs.cli import output
from nimble_jobs.cli.bench_columns import figure, ratio, raw, text
from nimble_jobs.cli.listing import print_rows
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.bench.text import TextResults


def show(results: TextResults) -> None:
    """Print everything that was found out."""
    rows: list[Row] = results.to_json()["results"]
    if not output.on_terminal():
        print_rows(rows, _RAW, id_key="system", json=False, quiet=False, empty="no results")
        return
    console = output.console()
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model and row["texts_per_s"]]
        first = next(row for row in rows if row["model"] == model)
        told = f"{model}, {first['dtype']}: {first['texts']:,} texts of {first['tokens'] / first['texts']:.0f} tokens"
        console.print(told, style="bold", markup=False)
        print_rows(mine, _COLUMNS, id_key="system", json=False, quiet=False, empty="no results")
    for row in rows:
        if row["note"] and not row["error"]:
            console.print(f"  {row['model']}, {row['system']}: {row['note']}", soft_wrap=False, markup=False)
    failed = [row for row in rows if row["error"]]
    if failed:
        console.print("\nWithout a figure", style="bold")
        for row in failed:
            console.print(f"  {row['model']}, {row['system']}: {row['error']}", soft_wrap=False, markup=False)
    console.print(f"\n{caption(results)}", style="dim", markup=False)


def caption(results: TextResults) -> str:
    """Device, versions, date: what a figure is worth nothing without."""
    environment = results.environment
    versions = environment.get("versions", {})
    named = ("torch", "transformers", "sentence-transformers", "tokenizers")
    said = ", ".join(f"{name} {versions[name]}" for name in named if name in versions)
    cores = f"{environment.get('cpus')} CPU cores"
    return f"{environment.get('device')}, {cores}; {said}; {environment.get('date', '')[:10]}"


def _off(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


_COLUMNS = (
    text("system", "system", flexible=True),
    figure("batch", "batch", from_width=90),
    text("compiled", "compile_mode", from_width=130),
    figure("texts/s", "texts_per_s", figures.rate),
    figure("after start", "after_start_texts_per_s", figures.rate),
    figure("tokens/s", "tokens_per_s", figures.rate, from_width=100),
    figure("padding", "padding_share", "{:.0%}".format),
    figure("start", "start_s", figures.duration),
    figure("× best loop", "over_best_loop", ratio),
    figure("memory", "host_peak_bytes", figures.size, from_width=90),
    figure("on GPU", "peak_bytes", figures.size, from_width=110),
    figure("off by", "relative_norm", _off, from_width=100),
)
_RAW = tuple(
    raw(name)
    for name in (
        "model",
        "system",
        "dtype",
        "device",
        "batch",
        "compile_mode",
        "texts",
        "tokens",
        "texts_per_s",
        "texts_per_s_low",
        "texts_per_s_high",
        "after_start_texts_per_s",
        "tokens_per_s",
        "padding_share",
        "start_s",
        "wall_s",
        "prepare_s",
        "over_best_loop",
        "host_peak_bytes",
        "peak_bytes",
        "relative_norm",
        "note",
        "error",
    )
)
