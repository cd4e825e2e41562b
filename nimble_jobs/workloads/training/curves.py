"""A picture of a training: loss and accuracy by step. Needs matplotlib, which is an extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_SMOOTH = 50  # points that a smoothed curve has about


def available() -> bool:
    """Is matplotlib installed?"""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, steps: Iterable[Mapping[str, Any]], epochs: list[dict[str, Any]], *, title: str) -> None:
    """Write a PNG: the loss of each step and its running mean, and what epochs and validations measured."""
    from matplotlib.figure import Figure

    rows = list(steps)
    loss = np.array([row["loss"] for row in rows], dtype=np.float64)
    classes = any("accuracy" in e for e in epochs)
    figure = Figure(figsize=(9, 3.6 if classes else 4), layout="constrained")
    axes = figure.subplots(1, 2 if classes else 1, squeeze=False)[0]
    number = np.arange(1, len(loss) + 1)
    axes[0].plot(number, loss, color="#9aa7b5", linewidth=0.6, label="each step")
    width = max(1, len(loss) // _SMOOTH)
    smooth = np.convolve(loss, np.full(width, 1 / width), mode="valid")
    axes[0].plot(number[width - 1 :], smooth, color="#5b84b1", label=f"mean of {width} steps")
    _points(axes[0], epochs, "val_loss", "held out")
    axes[0].set(xlabel="step", ylabel="loss")
    if classes:
        _points(axes[1], epochs, "accuracy", "training")
        _points(axes[1], epochs, "val_accuracy", "held out")
        axes[1].set(xlabel="step", ylabel="accuracy (share)")
    for axis in axes:
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})  # equal trainings give equal bytes


def _points(axis: Any, epochs: list[dict[str, Any]], metric: str, label: str) -> None:
    found = [(e["step"], e[metric]) for e in epochs if e.get(metric) is not None]
    if found:
        colour = "#5b84b1" if label == "training" else "#d1495b"
        axis.plot(*zip(*found, strict=True), color=colour, marker="o", markersize=3, label=label)
