"""A bar chart of speed-ups over eager execution. Needs matplotlib, which is an extra."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nimble_jobs.bench.ratios import Comparison
from nimble_jobs.bench.request import OURS, OURS_ONE
from nimble_jobs.errors import UsageError

TITLES = {"inference": "Inference", "training": "Training step"}

# name in the legend, the system (None: the best of torch.compile), colour
_BARS: tuple[tuple[str, str | None, str], ...] = (
    ("TorchScript", "torchscript", "#c9c9c9"),
    ("CUDA graph of eager", "cuda-graph", "#9aa7b5"),
    ("ONNX Runtime", "onnxruntime", "#c8b6a0"),
    ("TensorRT", "tensorrt", "#a2b88f"),
    ("best torch.compile", None, "#5b84b1"),
    ("ours, one stream", OURS_ONE, "#f3b562"),
    ("ours, chosen", OURS, "#d1495b"),
)
_ENTRY_IN = 1.5  # room for an entry of the legend


def require_matplotlib(option: str = "--plot") -> None:
    """Raises UsageError, with what to install, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option}: matplotlib is not installed; install it with: pip install 'nimble-jobs[plots]'")


def caption(environment: dict[str, Any], dtypes: Sequence[str], batches: Sequence[int]) -> str:
    """Device, driver, torch, dtypes and batches: what a figure is worth nothing without."""
    versions = environment.get("versions", {})
    cuda = f", CUDA {versions['cuda']}" if versions.get("cuda") else ""
    fp32 = f"; fp32: {environment['fp32']}" if "fp32" in dtypes and environment.get("fp32") else ""
    return (
        f"{environment.get('device')}, driver {environment.get('driver')}, torch {versions.get('torch')}{cuda}; "
        f"{', '.join(dtypes)}; batch {', '.join(map(str, batches))}{fp32}; {environment.get('date', '')[:10]}"
    )


def draw(comparisons: Sequence[Comparison], environment: dict[str, Any], path: Path) -> None:
    """Write the chart: a panel a mode, dtype and batch size. Raises UsageError where there is nothing to draw."""
    require_matplotlib()
    panels: dict[tuple[str, str, int], list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.us("eager"):
            panels.setdefault((comparison.mode, comparison.dtype, comparison.batch), []).append(comparison)
    if not panels:
        raise UsageError("--plot: nothing to draw: eager has no row without an error")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    most = max(map(len, panels.values()))
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(max(6.5, 1.5 + 1.15 * most), 3.4 * len(panels) + 0.7), squeeze=False
    )
    try:
        for axis, ((mode, dtype, batch), members) in zip(axes[:, 0], panels.items(), strict=True):
            _panel(axis, f"{TITLES[mode]}, {dtype}, batch {batch}", members)
        dtypes = list(dict.fromkeys(dtype for _, dtype, _ in panels))
        batches = sorted({batch for _, _, batch in panels})
        figure.suptitle("Speed-up over eager PyTorch")
        figure.text(0.5, 0.006, caption(environment, dtypes, batches), ha="center", va="bottom", fontsize=7, wrap=True)
        inch = 1 / figure.get_figheight()
        figure.tight_layout(rect=(0, 0.2 * inch, 1, 1 - 0.1 * inch))
        figure.savefig(path, dpi=140, format="png")
    finally:
        plt.close(figure)


def _panel(axis: Any, title: str, members: Sequence[Comparison]) -> None:
    shown = [bar for bar in _BARS if any(_speedup(c, bar[1]) for c in members)]
    width = 0.84 / max(1, len(shown))
    for position, (name, system, colour) in enumerate(shown):
        heights = [_speedup(c, system) or 0.0 for c in members]
        places = [i + (position - (len(shown) - 1) / 2) * width for i in range(len(members))]
        bars = axis.bar(places, heights, width, label=name, color=colour)
        if system == OURS:
            axis.bar_label(bars, [f"{h:.1f}×" if h else "" for h in heights], fontsize=7, padding=1)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(members)), [c.model for c in members], rotation=20, ha="right", fontsize=8)
    axis.set_ylabel("× eager")
    columns = min(len(shown), int(axis.figure.get_figwidth() / _ENTRY_IN)) or 1
    axis.set_title(title, fontsize=10, pad=6 + 13 * math.ceil(len(shown) / columns))  # the legend is below it
    axis.margins(x=0.01, y=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    if shown:
        axis.legend(fontsize=7, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)


def _speedup(comparison: Comparison, system: str | None) -> float | None:
    row = comparison.best_compile if system is None else comparison.best.get(system)
    eager = comparison.us("eager")
    return eager / row.replay_us if row and row.replay_us and eager else None
