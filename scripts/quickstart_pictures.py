"""The pictures of the quick start: scans that were read wrongly, and when each task of a schedule runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nimble_jobs import draw
from nimble_jobs.draw import labels

if TYPE_CHECKING:
    from nimble_jobs.schedule import Schedule

_MOST = 40  # scans of one sheet
_A_ROW = 8
_COLOURS = dict(zip(labels.FAMILIES, ("#93bde3", "#c0aede", "#eabf7b", "#8fceac", "#c8ced6"), strict=True))


def sheet(rows: list[dict[str, Any]], images: dict[str, np.ndarray], path: Path) -> Figure:
    """Write and return a picture of scans, each with its label and what the model read.

    `rows` hold `id`, `label`, `top1` and `probability`; `images` are pixels [height, width] by id.
    """
    shown = sorted(rows, key=lambda row: -row["probability"])[:_MOST]
    columns, lines = min(_A_ROW, len(shown)), -(-len(shown) // _A_ROW)
    figure = Figure(figsize=(max(4.5, 1.5 * columns), 1.9 * lines + 0.6), layout="constrained")
    for place, row in enumerate(shown):
        axis = figure.add_subplot(lines, columns, place + 1)
        axis.imshow(images[row["id"]], cmap="gray_r")
        axis.set_title(f"is {row['label']}, read as {row['top1']}", fontsize=9)
        axis.set_xlabel(f"{row['id']}, {row['probability']:.0%} sure", fontsize=7)
        axis.set(xticks=[], yticks=[])
    count = f"{len(shown)} of {len(rows)}" if len(shown) < len(rows) else f"{len(rows)}"
    figure.suptitle(f"Read wrongly: {count} held-out scans, the most confident first")
    figure.savefig(path, format="png", dpi=120)
    return figure


def timeline(schedule: Schedule, title: str, path: Path) -> Figure:
    """Write and return a picture with a row for each stream and a bar for each task.

    Raises PlanError as `draw.simulate` does.
    """
    timing = draw.simulate(schedule)
    plan, tasks = schedule.plan, schedule.program.tasks
    thousands = timing.measured and timing.makespan_us >= 1e3
    unit = "ms" if thousands else "µs" if timing.measured else "tasks"
    starts, ends = (np.array(us) / (1e3 if thousands else 1.0) for us in (timing.start_us, timing.end_us))
    families = [labels.family(task.op) for task in tasks]
    figure = Figure(figsize=(12, 1.9 + 0.4 * plan.streams), layout="constrained")
    axis = figure.add_subplot()
    axis.barh(
        plan.stream_of,
        ends - starts,
        left=starts,
        height=0.7,
        color=[_COLOURS[family] for family in families],
        edgecolor="white",
        linewidth=0.4,
    )
    for sync in plan.syncs:
        ends_of = (ends[sync.before], starts[sync.after]), (plan.stream_of[sync.before], plan.stream_of[sync.after])
        axis.plot(*ends_of, color="#1c222a", alpha=0.4, linewidth=0.6)
    axis.set_yticks(range(plan.streams), [f"stream {n}" for n in range(plan.streams)])
    axis.invert_yaxis()
    axis.set(xlabel=f"{unit} from the start of a replay", xlim=(0, max(ends, default=1.0)))
    axis.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(color=colour, label=family) for family, colour in _COLOURS.items() if family in families]
    axis.legend(
        handles=handles, fontsize=8, ncols=len(handles), frameon=False, loc="lower right", bbox_to_anchor=(1, 1)
    )
    axis.set_title(f"{title}: {len(tasks)} tasks", loc="left", fontsize=11)
    figure.savefig(path, format="png", dpi=120)
    return figure
