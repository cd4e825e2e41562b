"""How results of `bench scoring` look: a table on a terminal, every row in a pipe, and why a row has no figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nimble_jobs.cli import output, render
from nimble_jobs.cli.listing import Column, Row, print_rows

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


def _ratio(header: str, name: str) -> Column:
    return Column(header=header, cell=lambda row: "-" if row.get(name) is None else f"{row[name]:.2f}", justify="right")


def _rate(header: str, name: str) -> Column:
    return Column(header=header, cell=lambda row: render.rate(row.get(name)), justify="right")


def _text(header: str, name: str, *, right: bool = False, from_width: int = 0) -> Column:
    return Column(
        header=header,
        cell=lambda row: "-" if row.get(name) is None else str(row[name]),
        justify="right" if right else "left",
        from_width=from_width,
    )


def _seconds(header: str, name: str, *, from_width: int = 0) -> Column:
    return Column(
        header=header, cell=lambda row: render.duration(row.get(name)), justify="right", from_width=from_width
    )


def _raw(name: str) -> Column:
    def cell(row: Row) -> str:
        value = row.get(name)
        return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

    return Column(header=name, cell=cell)


def _spread(row: Row) -> str:
    low, high = row.get("records_per_s_low"), row.get("records_per_s_high")
    return "-" if low is None or high is None else f"{low:,.0f} to {high:,.0f}"


_COMMON = (
    _text("batch", "batch", right=True),
    _rate("first to last", "records_per_s"),
    Column(header="spread", cell=_spread, justify="right", from_width=130),
)
_PICTURES = (
    Column(header="system", cell=lambda row: str(row["system"]), flexible=True),
    *_COMMON,
    _text("workers", "workers", right=True, from_width=90),
    _ratio("× best loop", "over_best_loop"),
    _seconds("process", "wall_s", from_width=100),
    _seconds("beside", "outside_s", from_width=110),
    Column(
        header="same top-1",
        cell=lambda row: "-" if row["same_top1"] is None else f"{row['same_top1']:.1%}",
        justify="right",
    ),
    _text("files", "files", from_width=100),
)
_ARRAYS = (
    Column(header="model", cell=lambda row: str(row["model"]), flexible=True),
    *_COMMON,
    _rate("bare replay", "bare_records_per_s"),
    _ratio("job / bare", "of_bare"),
    _seconds("process", "wall_s"),
    _text("files", "files", from_width=100),
)
_RAW = tuple(
    _raw(name)
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
