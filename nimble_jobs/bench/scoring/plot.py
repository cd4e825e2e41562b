"""A bar chart of images a second, one bar a system; for arrays, of jobs and bare replays. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nimble_jobs.bench.plot import require_matplotlib
from nimble_jobs.bench.scoring.arrays import SYSTEM as ARRAYS
from nimble_jobs.bench.scoring.request import System
from nimble_jobs.bench.scoring.results import ScoringResults, ScoringRow
from nimble_jobs.errors import UsageError

LABELS = {
    System.OURS_GPU: "ours, decode: gpu",
    System.OURS_CPU: "ours, decode: cpu",
    System.EAGER: "DataLoader, Pillow,\neager",
    System.COMPILED: "DataLoader, Pillow,\ntorch.compile",
    System.TORCHVISION: "DataLoader, torchvision,\ntorch.compile",
    System.GPU_DECODE: "torchvision on the GPU,\ntorch.compile",
    System.RAY: "Ray Data, one actor,\ntorch.compile",
}
_OURS, _LOOP, _RAY, _BARE = "#d1495b", "#5b84b1", "#a2b88f", "#c9c9c9"


def caption(results: ScoringResults) -> str:
    """Device, versions, model, files, date: what a figure is worth nothing without."""
    environment = results.environment
    versions = environment.get("versions", {})
    models = ", ".join(dict.fromkeys(row.model for row in results.rows))
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in results.rows))
    files = "; ".join(dict.fromkeys(row.files for row in results.rows if row.files)) or "not read"
    counts = ", ".join(f"{n:,}" for n in dict.fromkeys(row.records for row in results.rows if row.trials))
    about = environment.get("files") or {}
    kind = f"JPEGs of {about['pixels']}" if about.get("pixels") else "records"
    cores = f" with {environment['cpus']} CPU cores" if environment.get("driver") not in (None, "none") else ""
    return (
        f"{environment.get('device')}{cores}, torch {versions.get('torch')}; "
        f"{models}, {dtypes}; {counts} {kind}, files {files}; {environment.get('date', '')[:10]}"
    )


def draw(results: ScoringResults, path: Path) -> None:
    """Write the chart. Raises UsageError where there is nothing to draw."""
    require_matplotlib("--png")
    rows = [row for row in results.rows if row.records_per_s]
    if not rows:
        raise UsageError("--png: nothing to draw: no system has a result")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 1.4 + 0.55 * len(rows)))
    try:
        if rows[0].system == ARRAYS:
            _arrays(axis, rows)
        else:
            _pictures(axis, rows, results)
        axis.invert_yaxis()
        axis.margins(x=0.3)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.spines[["top", "right"]].set_visible(False)
        figure.text(0.5, 0.01, caption(results), ha="center", va="bottom", fontsize=6.5, wrap=True)
        figure.tight_layout(rect=(0, 0.15 / figure.get_figheight(), 1, 1))
        figure.savefig(path, dpi=140, format="png")
    finally:
        plt.close(figure)


def _pictures(axis: Any, rows: list[ScoringRow], results: ScoringResults) -> None:
    best = results.best_by_hand()
    colours = [_OURS if System(r.system).ours else _RAY if r.system == System.RAY else _LOOP for r in rows]
    rates = [row.records_per_s or 0.0 for row in rows]
    bars = axis.barh([LABELS[System(row.system)] for row in rows], rates, color=colours)
    texts = []
    for row, rate in zip(rows, rates, strict=True):
        over = results.over(row, best)
        texts.append(f"{rate:,.0f}" + (f"  ({over:.2f}× best loop)" if over and System(row.system).ours else ""))
    axis.bar_label(bars, texts, fontsize=8, padding=3)
    axis.set_xlabel("images/s, from the first to the last record")
    axis.set_title("From JPEG files to Parquet")


def _arrays(axis: Any, rows: list[ScoringRow]) -> None:
    names = [f"{row.model}, batch {row.batch}" for row in rows]
    places = range(len(rows))
    bare = [row.bare_records_per_s or 0.0 for row in rows]
    jobs = [row.records_per_s or 0.0 for row in rows]
    above = axis.barh([p - 0.2 for p in places], jobs, 0.38, color=_OURS, label="job, from npy to Parquet")
    below = axis.barh([p + 0.2 for p in places], bare, 0.38, color=_BARE, label="bare replay")
    shares = [f"{row.records_per_s or 0:,.0f}" + (f"  ({row.of_bare:.0%})" if row.of_bare else "") for row in rows]
    axis.bar_label(above, shares, fontsize=8, padding=3)
    axis.bar_label(below, [f"{rate:,.0f}" if rate else "" for rate in bare], fontsize=8, padding=3)
    axis.set_yticks(list(places), names)
    axis.set_xlabel("records/s")
    axis.set_title("Jobs over uint8 arrays, and the replay of their schedules alone", pad=22)
    axis.legend(fontsize=7, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
