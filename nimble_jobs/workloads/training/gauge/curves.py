"""A picture of a training: loss and accuracy by step. Needs matplotlib, which is an extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SMOOTH = 50  # points of a smoothed curve, roughly
_DRAWN = 1000  # pieces of a long training; the smallest and largest loss of each are drawn


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, loss: np.ndarray, epochs: Sequence[dict[str, Any]], *, title: str) -> None:
    """Write a PNG with the loss of each step, its running mean, and the measures of epochs and validations.

    `loss` is float64 [steps].
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    classes = any("accuracy" in e for e in epochs)
    figure = Figure(figsize=(9, 3.6 if classes else 4), layout="constrained")
    axes = figure.subplots(1, 2 if classes else 1, squeeze=False, sharex=True)[0]
    width = max(1, len(loss) // _SMOOTH)
    if width > 1:
        axes[0].plot(*envelope(loss), color="#9aa7b5", linewidth=0.6, label="each step")
    smooth = running_mean(loss, width)
    label = f"mean of {width:,} steps" if width > 1 else "each step"
    marker = "o" if len(loss) == 1 else None  # a line of one point would not show
    axes[0].plot(np.arange(width, len(loss) + 1), smooth, color="#5b84b1", marker=marker, markersize=3, label=label)
    _points(axes[0], epochs, "val_loss", "held out")
    axes[0].set(ylabel="loss")
    axes[0].legend(frameon=False, loc="upper right")
    if classes:
        _points(axes[1], epochs, "accuracy", "training")
        _points(axes[1], epochs, "val_accuracy", "held out")
        axes[1].set(ylabel="accuracy (share)")
        axes[1].legend(frameon=False, loc="lower right")
    for axis in axes:
        axis.set(xlabel="step", xlim=(0, 1.03 * len(loss)))
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})  # equal trainings give equal bytes


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of each `width` consecutive values: [n] to [n - width + 1]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray((sums[width:] - sums[:-width]) / width)


def envelope(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values to draw. If there are many, the smallest and largest of each piece: the line looks the same."""
    if len(values) <= 2 * _DRAWN:
        return np.arange(1, len(values) + 1), values
    starts = np.linspace(0, len(values), _DRAWN, endpoint=False).astype(np.int64)
    ends = np.stack([np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)], axis=1)
    return np.repeat(starts + 1, 2), ends.ravel()


def _points(axis: Any, epochs: Sequence[dict[str, Any]], metric: str, label: str) -> None:
    points = [(e["step"], e[metric]) for e in epochs if e.get(metric) is not None]
    if points:
        colour = "#5b84b1" if label == "training" else "#d1495b"
        axis.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=label)
