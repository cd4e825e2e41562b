"""A schedule's dependencies as a Graphviz graph."""

from __future__ import annotations

from nimble_jobs.draw import labels
from nimble_jobs.draw.timing import simulate
from nimble_jobs.graph.dag import build_dag
from nimble_jobs.graph.reduction import minimum_equivalent_graph
from nimble_jobs.schedule import Schedule

_FILLS = [  # by stream, over and over
    *("#a6cee3", "#fdbf6f", "#b2df8a", "#cab2d6", "#fb9a99", "#ffff99"),
    *("#8dd3c7", "#fccde5", "#d9d9d9", "#bebada", "#e5c494", "#80b1d3"),
]


def to_dot(schedule: Schedule) -> str:
    """The minimum equivalent graph: a node a task, filled by stream, with a thick outline on the critical path.

    Edges within a stream are bold, those that a sync keeps dashed, those that follow from other syncs thin. Raises
    PlanError as `timing.simulate` does.
    """
    timing = simulate(schedule)
    plan = schedule.plan
    meg = minimum_equivalent_graph(build_dag(schedule.program))
    critical = set(timing.critical)
    synced = {(sync.before, sync.after) for sync in plan.syncs}
    facts = ", ".join(f"{name.lower()} {value}" for name, value in labels.summary(schedule, timing))
    title = f"{labels.title(schedule)}\n{facts}"
    lines = [
        "digraph schedule {",
        f"  graph [label={_quoted(title)}, labelloc=t, fontname=sans, nodesep=0.15, ranksep=0.3];",
        "  node [shape=box, style=filled, fontname=sans, fontsize=10, color=gray40, margin=0.08, height=0.3];",
        "  edge [color=gray30, arrowsize=0.6];",
    ]
    for task in schedule.program.tasks:
        i, stream = task.index, plan.stream_of[task.index]
        time = labels.duration(timing.end_us[i] - timing.start_us[i], timing.measured)
        tip = f"{i}: {task.op}, stream {stream}" + (f", {task.source}" if task.source else "")
        mark = ', color="#c2185b", penwidth=3' if i in critical else ""
        label = _quoted(f"{labels.short(task.op)}\n{time}")
        fill = _FILLS[stream % len(_FILLS)]
        lines.append(f'  t{i} [label={label}, fillcolor="{fill}", tooltip={_quoted(tip)}{mark}];')
    for after, befores in enumerate(meg.preds):
        for before in befores:
            if plan.stream_of[before] == plan.stream_of[after]:
                style = "style=bold"
            elif (before, after) in synced:
                style = "style=dashed"
            else:
                style = "style=solid, color=gray70"
            lines.append(f"  t{before} -> t{after} [{style}];")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    """A DOT string: backslashes stand for themselves, and line breaks stay."""
    return '"' + labels.clean(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
