"""The pictures of the quick start: what was read wrongly, and when each task of a schedule runs."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from tests.scripts import load
from tests.strategies import flow, network, schedule

SCRIPT = load("quickstart_pictures")


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (9, 9), (50, 40)])
def test_each_wrong_scan_stands_beside_both_digits(tmp_path: Path, count: int, shown: int) -> None:
    """The most confident mistakes come first; a sheet holds forty, and says how many there are."""
    rows = [{"id": f"s{i}", "label": 3, "top1": 5, "probability": 0.5 + i / 100} for i in range(count)]
    images = {row["id"]: np.full((8, 8), 7, dtype=np.uint8) for row in rows}
    figure = SCRIPT.sheet(rows, images, tmp_path / "wrong.png")
    assert [axis.get_title() for axis in figure.axes] == ["is 3, read as 5"] * shown
    assert figure.axes[0].get_xlabel() == f"s{count - 1}, {0.5 + (count - 1) / 100:.0%} sure"
    assert (f"{shown} of {count}" in figure.get_suptitle()) == (shown < count)
    with Image.open(tmp_path / "wrong.png") as image:
        assert image.format == "PNG"
        assert image.width <= 1440


def test_a_timeline_has_a_row_for_each_stream_and_a_bar_for_each_task(tmp_path: Path) -> None:
    """Each bar lies in the row of its stream, and each sync is a line."""
    drawn = schedule(flow(network(50, Random(1)), Random(1)), max_streams=4)
    figure = SCRIPT.timeline(drawn, "a replay", tmp_path / "timeline.png")
    (axis,) = figure.axes
    assert [round(bar.get_y() + bar.get_height() / 2) for bar in axis.patches] == list(drawn.plan.stream_of)
    assert [label.get_text() for label in axis.get_yticklabels()] == [f"stream {n}" for n in range(drawn.plan.streams)]
    assert drawn.plan.streams > 1
    assert len(axis.lines) == len(drawn.plan.syncs)
    with Image.open(tmp_path / "timeline.png") as image:
        assert image.format == "PNG"
