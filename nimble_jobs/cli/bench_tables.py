"""How results of the benchmark look: tables on a terminal, one for each dtype and batch size, every row in a pipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nimble_jobs.cli import output, render
from nimble_jobs.cli.listing import Column, Row, print_rows

if TYPE_CHECKING:
    from nimble_jobs import bench
    from nimble_jobs.bench import Comparison, Results

MEANS = "geometric mean"


def show(results: Results, comparisons: Sequence[Comparison]) -> None:
    """Print everything that was found out."""
    if not output.on_terminal():
        rows = [dataclasses.asdict(row) for row in results.rows]
        print_rows(rows, _RAW, id_key="model", json=False, quiet=False, empty="no results")
        return
    from nimble_jobs.bench.plot import TITLES, caption

    groups: dict[tuple[str, str, int], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.mode, comparison.dtype, comparison.batch), []).append(comparison)
    console = output.console()
    for (mode, dtype, batch), members in groups.items():
        tf32 = " (TF32)" if dtype == "fp32" and "TF32" in str(results.environment.get("fp32")) else ""
        console.print(f"\n{TITLES[mode]}, {dtype}{tf32}, batch {batch}", style="bold")
        print_rows(_rows(members), _COLUMNS, id_key="model", json=False, quiet=False, empty="")
        if mode == "inference":
            _flights(results, dtype, batch)
    errors = [row for comparison in comparisons for row in comparison.errors]
    if errors:
        console.print("\nWithout a figure", style="bold")
        for line in _reasons(errors):
            console.print(line, soft_wrap=False, markup=False)
    if groups:
        dtypes, batches = list(dict.fromkeys(d for _, d, _ in groups)), sorted({b for _, _, b in groups})
        console.print(f"\n{caption(results.environment, dtypes, batches)}", style="dim", markup=False)


def _rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """A row a model, and one of geometric means."""
    from nimble_jobs import bench

    rows: list[Row] = []
    for c in comparisons:
        ours = c.ours
        facts = ours.facts if ours else {}
        rows.append(
            {
                "model": c.model,
                "eager": c.us("eager"),
                "graph": c.us("cuda-graph"),
                "compile": c.best_compile.replay_us if c.best_compile else None,
                "mode": _mode(c),
                "one": c.us("ours-1-stream"),
                "ours": c.us("ours"),
                "over_eager": c.over_eager,
                "over_compile": c.over_compile,
                "over_one": c.over_one_stream,
                "idle": c.best["eager"].idle_share if "eager" in c.best else None,
                "streams": facts.get("streams"),
                "peak_bytes": ours.peak_bytes if ours else None,
                "memory": c.memory_over_compile,
                "prepare_s": ours.prepare_s if ours else None,
            }
        )
    if len(rows) > 1:
        means = bench.geometric_means(comparisons)
        rows.append(
            {
                "model": MEANS,
                "over_eager": means["over_eager"][0],
                "over_compile": means["over_compile"][0],
                "over_one": means["over_one_stream"][0],
            }
        )
    return rows


def _mode(comparison: Comparison) -> str:
    best = comparison.best_compile
    if best is None:
        return "-"
    last = ", CL" if best.layout == "channels-last" else ""
    return best.system.removeprefix("compile-") + last


def _flights(results: Results, dtype: str, batch: int) -> None:
    rows = [r for r in results.rows if r.in_flight is not None and (r.dtype, r.batch) == (dtype, batch)]
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.in_flight is not None and row.records_per_s:
            found.setdefault(row.model, {})[row.in_flight] = row.records_per_s
    if not found:
        return
    numbers = sorted({number for by_number in found.values() for number in by_number})
    columns = [Column(header="replays in flight", cell=lambda row: str(row["model"]))]
    columns += [_rate(n) for n in numbers]
    output.emit("")
    table: list[Row] = [{"model": m} | {str(n): rate for n, rate in by.items()} for m, by in found.items()]
    print_rows(table, columns, id_key="model", json=False, quiet=False, empty="")


def _reasons(errors: Sequence[bench.Row]) -> list[str]:
    """One line for each reason, with what it befell."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in errors:
        where.setdefault((row.system, row.error or ""), []).append(f"{row.model} {row.dtype} {row.batch}")
    lines = []
    for (system, error), places in where.items():
        count = f"{places[0]} and {len(places) - 1} more" if len(places) > 1 else places[0]
        lines.append(f"  {system}: {error} ({count})")
    return lines


def _times(name: str) -> Column:
    header = {"over_eager": "× eager", "over_compile": "× compile", "over_one": "× 1 str."}[name]
    return Column(
        header=header,
        cell=lambda row: "-" if row.get(name) is None else f"{row[name]:.2f}",
        style=lambda row: _ratio_style(row.get(name)),
        justify="right",
    )


def _ratio_style(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return "green" if ratio >= 1.02 else "red" if ratio < 0.98 else ""


def _rate(number: int) -> Column:
    return Column(header=str(number), cell=lambda row: render.rate(row.get(str(number))), justify="right")


def _raw(name: str) -> Column:
    return Column(header=name, cell=lambda row: _plain(row[name]))


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _micros(header: str, name: str, from_width: int = 0) -> Column:
    return Column(header=header, cell=lambda row: render.micros(row.get(name)), justify="right", from_width=from_width)


_COLUMNS = (
    Column(
        header="model",
        cell=lambda row: str(row["model"]),
        style=lambda row: "bold" if row["model"] == MEANS else "",
        flexible=True,
    ),
    _micros("eager", "eager"),
    _micros("graph", "graph", 110),
    _micros("compile", "compile"),
    Column(header="its mode", cell=lambda row: str(row.get("mode", "")), from_width=110),
    _micros("ours", "ours"),
    _times("over_eager"),
    _times("over_compile"),
    _times("over_one"),
    Column(
        header="eager idle",
        cell=lambda row: "-" if row.get("idle") is None else f"{row['idle']:.0%}",
        justify="right",
        from_width=120,
    ),
    Column(header="streams", cell=lambda row: str(row.get("streams") or "-"), justify="right", from_width=124),
    Column(header="peak", cell=lambda row: render.size(row.get("peak_bytes")), justify="right", from_width=130),
    Column(header="prepare", cell=lambda row: render.duration(row.get("prepare_s")), justify="right", from_width=140),
)
_RAW_NAMES = (
    "model",
    "system",
    "dtype",
    "batch",
    "layout",
    "mode",
    "in_flight",
    "replay_us",
    "with_copies_us",
    "records_per_s",
    "prepare_s",
    "peak_bytes",
    "idle_share",
    "relative_norm",
    "error",
)
_RAW = tuple(_raw(name) for name in _RAW_NAMES)
