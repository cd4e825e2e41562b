"""How results of the benchmark look: tables on a terminal, one for each dtype and batch size, every row in a pipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nimble_jobs.bench.request import CHANNELS_LAST, COMPILE, OURS, OURS_ONE
from nimble_jobs.cli import output
from nimble_jobs.cli.bench_columns import figure, ratio, raw, text
from nimble_jobs.cli.listing import Column, fits, print_rows
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs import bench
    from nimble_jobs.bench import Comparison, Results

MEANS = "geometric mean"
PLANNED = "1 stream, chosen: as timed by the planner"


def show(results: Results, comparisons: Sequence[Comparison]) -> None:
    """Print everything that was found out."""
    if not output.on_terminal():
        rows = [dataclasses.asdict(row) for row in results.rows]
        print_rows(rows, _RAW, id_key="model", json=False, quiet=False, empty="no results")
        return
    from nimble_jobs.bench.plot import TITLES, caption
    from nimble_jobs.bench.ratios import best_of

    groups: dict[tuple[str, str, int], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.mode, comparison.dtype, comparison.batch), []).append(comparison)
    console = output.console()
    for (mode, dtype, batch), members in groups.items():
        tf32 = " (TF32)" if dtype == "fp32" and "TF32" in str(results.environment.get("fp32")) else ""
        console.print(f"\n{TITLES[mode]}, {dtype}{tf32}, batch {batch}", style="bold")
        rows = _rows(members)
        tables = [*_tables(rows, _SPEED, _OTHERS, console.width), *_tables(rows, _OURS, _MORE_OURS, console.width)]
        for number, columns in enumerate(tables):
            if number:
                output.emit("")
            told = [row for row in rows if any(c.cell(row) != "-" for c in columns[1:])]
            note = PLANNED if any(c in columns for c in _OURS[:2]) else ""
            print_rows(told, columns, id_key="model", json=False, quiet=False, empty="", caption=note)
        for number, line in enumerate(best_of(members)):
            console.print(line if number else f"\n{line}", style="dim", markup=False, highlight=False)
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
                "best_compile": c.best_compile.replay_us if c.best_compile else None,
                "which": _which(c),
                "over_eager": c.over_eager,
                "over_best_compile": c.over_best_compile,
                "over_one": c.over_one_stream,
                "chosen": c.chosen_us,
                "with_copies": ours.with_copies_us if ours else None,
                "streams": facts.get("streams"),
                "width": facts.get("width"),
                "syncs": facts.get("syncs_used"),
                "peak_bytes": ours.peak_bytes if ours else None,
                "memory": c.memory_over_best_compile,
                "idle": ours.idle_share if ours else None,
                "eager_idle": c.best["eager"].idle_share if "eager" in c.best else None,
                "prepare_s": ours.prepare_s if ours else None,
            }
            | {system: c.us(system) for system in _TIMED}
        )
    if len(rows) > 1:
        means = bench.geometric_means(comparisons)
        rows.append(
            {
                "model": MEANS,
                "over_eager": means["over_eager"][0],
                "over_best_compile": means["over_best_compile"][0],
                "over_one": means["over_one_stream"][0],
            }
        )
    return rows


def _tables(rows: list[Row], main: Sequence[Column], more: Sequence[Column], width: int) -> list[list[Column]]:
    """The columns that have a figure: of one table where the terminal is wide enough for them, else of two."""
    main, more = (
        [c for c in columns if c.from_width <= width and any(c.cell(row) != "-" for row in rows)]
        for columns in (main, more)
    )
    whole = [_MODEL, *main, *more]
    tables = [whole] if fits(rows, whole, width) else [[_MODEL, *main], [_MODEL, *more]]
    return [columns for columns in tables if len(columns) > 1]


def _which(comparison: Comparison) -> str | None:
    """The mode and the memory format of the fastest torch.compile."""
    best = comparison.best_compile
    if best is None:
        return None
    last = ", channels-last" if best.layout == CHANNELS_LAST else ""
    return best.system.removeprefix(COMPILE) + last


def _flights(results: Results, dtype: str, batch: int) -> None:
    rows = [r for r in results.rows if r.in_flight is not None and (r.dtype, r.batch) == (dtype, batch)]
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.in_flight is not None and row.records_per_s:
            found.setdefault(row.model, {})[row.in_flight] = row.records_per_s
    if not found:
        return
    numbers = sorted({number for by_number in found.values() for number in by_number})
    columns = [text("replays in flight", "model")]
    columns += [figure(str(n), str(n), figures.rate) for n in numbers]
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


def _times(header: str, name: str) -> Column:
    """A ratio, green if ours is faster and red if it is slower."""
    return dataclasses.replace(figure(header, name, ratio), style=lambda row: _ratio_style(row.get(name)))


def _ratio_style(value: float | None) -> str:
    if value is None:
        return ""
    return "green" if value >= 1.02 else "red" if value < 0.98 else ""


_TIMED = ("eager", "torchscript", "cuda-graph", "onnxruntime", "tensorrt", OURS_ONE, OURS)
_MODEL = Column(
    header="model",
    cell=lambda row: str(row["model"]),
    style=lambda row: "bold" if row["model"] == MEANS else "",
    flexible=True,
)
_SPEED = (
    figure("eager", "eager", figures.micros),
    figure("best compile", "best_compile", figures.micros),
    figure("ours", OURS, figures.micros),
    _times("× eager", "over_eager"),
    _times("× best compile", "over_best_compile"),
)
_OTHERS = (
    text("best compile is", "which"),
    figure("script", "torchscript", figures.micros),
    figure("graph", "cuda-graph", figures.micros),
    figure("ONNX RT", "onnxruntime", figures.micros),
    figure("TensorRT", "tensorrt", figures.micros),
)
_OURS = (
    figure("1 stream", OURS_ONE, figures.micros),
    figure("chosen", "chosen", figures.micros),
    _times("× 1 str.", "over_one"),
    figure("streams", "streams", "{:,}".format),
    figure("width", "width", "{:,}".format),
    figure("syncs", "syncs", "{:,}".format),
)
_MORE_OURS = (
    figure("with copies", "with_copies", figures.micros),
    figure("memory", "peak_bytes", figures.size),
    figure("× compile's", "memory", ratio),
    figure("idle", "idle", "{:.0%}".format),
    figure("eager's", "eager_idle", "{:.0%}".format),
    figure("prepare", "prepare_s", figures.duration),
)
_RAW = tuple(
    raw(name)
    for name in (
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
)
