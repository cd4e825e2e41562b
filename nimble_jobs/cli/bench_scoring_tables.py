"""How results of `bench scoring` look: a table on a terminal, every row in a pipe, and why a row has no figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nimble_jobs.cli import output
from nimble_jobs.cli.bench_columns import figure, ratio, raw, text
from nimble_jobs.cli.listing import Column, print_rows
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.bench.scoring import ScoringResults


def show(results: ScoringResults) -> None:
    """Print everything that was found out."""
    from nimble_jobs.bench.scoring.plot import caption

    rows: list[Row] = results.to_json()["results"]
    if not output.on_terminal():
        print_rows(rows, _RAW, id_key="system", json=False, quiet=False, empty="no results")
        return
    arrays = any(row["system"] == "ours-npy" for row in rows)
    good = [row for row in rows if row["records_per_s"]]
    print_rows(good, _ARRAYS if arrays else _PICTURES, id_key="system", json=False, quiet=False, empty="no results")
    failed = [row for row in rows if row["error"]]
    console = output.console()
    if failed:
        console.print("\nWithout a figure", style="bold")
        for row in failed:
            console.print(f"  {row['system']}: {row['error']}", soft_wrap=False, markup=False)
    console.print(f"\n{caption(results)}", style="dim", markup=False)


def _spread(row: Row) -> str:
    low, high = row.get("records_per_s_low"), row.get("records_per_s_high")
    return "-" if low is None or high is None else f"{low:,.0f} to {high:,.0f}"


_COMMON = (
    figure("batch", "batch"),
    figure("first to last", "records_per_s", figures.rate),
    Column(header="spread", cell=_spread, justify="right", from_width=130),
)
_PICTURES = (
    text("system", "system", flexible=True),
    *_COMMON,
    figure("workers", "workers", from_width=90),
    figure("× best loop", "over_best_loop", ratio),
    figure("process", "wall_s", figures.duration, from_width=100),
    figure("beside", "outside_s", figures.duration, from_width=110),
    figure("same top-1", "same_top1", "{:.1%}".format),
    text("files", "files", from_width=100),
)
_ARRAYS = (
    text("model", "model", flexible=True),
    *_COMMON,
    figure("bare replay", "bare_records_per_s", figures.rate),
    figure("job / bare", "of_bare", ratio),
    figure("process", "wall_s", figures.duration),
    text("files", "files", from_width=100),
)
_RAW = tuple(
    raw(name)
    for name in (
        "model",
        "system",
        "dtype",
        "batch",
        "workers",
        "records",
        "records_per_s",
        "records_per_s_low",
        "records_per_s_high",
        "wall_s",
        "outside_s",
        "prepare_s",
        "over_best_loop",
        "bare_records_per_s",
        "of_bare",
        "same_top1",
        "probability_difference",
        "files",
        "error",
    )
)
