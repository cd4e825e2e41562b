"""The Gantt chart of a schedule as a file of its own: an SVG, or a page that zooms. Neither refers to anything else."""

from __future__ import annotations

from importlib import resources

from nimble_jobs.draw import chart, labels
from nimble_jobs.draw.chart import escape
from nimble_jobs.draw.timing import Timing, simulate
from nimble_jobs.schedule import Schedule

_WIDTH = 1200
_HEAD = 84  # pixels above the chart of an SVG
_FOOT = 34
_FACTS_A_LINE = 7
_ARROWS_AT_FIRST = 200  # with more syncs than that a page shows those of the selected task only


def to_svg(schedule: Schedule) -> str:
    """A static SVG with the header, the chart and the legend. Raises PlanError as `simulate` does."""
    timing = simulate(schedule)
    facts = [f"{name}: {value}" for name, value in labels.summary(schedule, timing)]
    tall = chart.height(schedule)
    head = [
        f'<text class="head" x="8" y="{44 + 16 * i}">{escape("   ".join(facts[at : at + _FACTS_A_LINE]))}</text>'
        for i, at in enumerate(range(0, len(facts), _FACTS_A_LINE))
    ]
    swatches = []
    x = 8
    for classes, title in chart.legend():
        swatches.append(
            f'<rect class="{classes}" x="{x}" y="10" width="14" height="12"/><text x="{x + 20}" y="20">{title}</text>'
        )
        x += 44 + 7 * len(title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {_HEAD + tall + _FOOT}" '
            f'width="{_WIDTH}" height="{_HEAD + tall + _FOOT}" role="img" aria-labelledby="title about">',
            f'<title id="title">{escape(labels.title(schedule))}</title>',
            f'<desc id="about">{escape("; ".join(facts))}. {escape(labels.remark(timing))}</desc>',
            f"<style>{_asset('styles.css')}</style>",
            '<rect class="page" width="100%" height="100%"/>',
            f'<text class="title" x="8" y="24">{escape(labels.title(schedule))}</text>',
            *head,
            f'<g transform="translate(0 {_HEAD})">{chart.elements(schedule, timing, _WIDTH)}</g>',
            f'<g class="legend" transform="translate(0 {_HEAD + tall})">{"".join(swatches)}</g>',
            "</svg>",
            "",
        ]
    )


def to_html(schedule: Schedule) -> str:
    """A page: header, a chart to zoom and move, and all tasks as a table. Raises PlanError as `simulate` does."""
    timing = simulate(schedule)
    tall = chart.height(schedule)
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in labels.summary(schedule, timing)
    )
    legend = "".join(
        f'<li><svg width="14" height="12" aria-hidden="true"><rect class="{classes}" width="14" height="12"/></svg>'
        f"{title}</li>"
        for classes, title in chart.legend()
    )
    syncs = len(schedule.plan.syncs)
    shown = "checked" if syncs <= _ARROWS_AT_FIRST else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escape(labels.title(schedule))}</title>
<style>{_asset("styles.css")}{_asset("page.css")}</style>
</head>
<body>
<main>
<h1>{escape(labels.title(schedule))}</h1>
<dl class="facts">{facts}</dl>
<p class="remark">{escape(labels.remark(timing))}</p>
<div class="tools" role="toolbar" aria-label="View" hidden>
<button type="button" id="out" aria-label="Zoom out">−</button>
<button type="button" id="in" aria-label="Zoom in">+</button>
<button type="button" id="all">Whole replay</button>
<label><input type="checkbox" id="arrows" {shown}> Syncs ({syncs:,})</label>
<label><input type="checkbox" id="path"> Critical path only</label>
<output id="range" aria-label="Time shown"></output>
</div>
<svg class="chart" id="chart" viewBox="0 0 {_WIDTH} {tall}" width="100%" role="img" aria-labelledby="name about"
  data-left="{chart.LEFT}" data-right="{chart.RIGHT}" data-span="{timing.makespan_us!r}"
  data-measured="{int(timing.measured)}" data-letter="{chart.LETTER}">
<title id="name">Timeline of {len(schedule.program.tasks):,} tasks on {schedule.plan.streams:,} streams</title>
<desc id="about">Streams are rows, tasks are bars, syncs are arrows. The table below says the same.</desc>
{chart.elements(schedule, timing, _WIDTH)}
</svg>
<ul class="legend">{legend}</ul>
<p class="hint" hidden>Wheel: zoom. Drag: move. Click a task for its details and syncs. With the chart focused:
arrow keys go from task to task, + and − zoom, 0 shows the whole replay, Escape lets go.</p>
<pre id="picked" role="status" hidden></pre>
<details><summary>All tasks as a table</summary>
{_table(schedule, timing)}
</details>
</main>
<div id="tip" aria-hidden="true" hidden></div>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _table(schedule: Schedule, timing: Timing) -> str:
    """Tasks in launch order."""
    waits: dict[int, list[int]] = {}
    for sync in schedule.plan.syncs:
        waits.setdefault(sync.after, []).append(sync.before)
    critical = set(timing.critical)
    rows = []
    for i in schedule.plan.order:
        task = schedule.program.tasks[i]
        cells = (
            f"{i}",
            task.op,
            f"{schedule.plan.stream_of[i]}",
            labels.duration(timing.start_us[i], timing.measured),
            labels.duration(timing.end_us[i] - timing.start_us[i], timing.measured),
            "yes" if i in critical else "",
            ", ".join(map(str, waits.get(i, ()))),
            task.source or "",
        )
        rows.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    names = ("Task", "Operator", "Stream", "Start", "Time", "Critical", "Waits for", "From")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _asset(name: str) -> str:
    return (resources.files("nimble_jobs.draw") / name).read_text(encoding="utf-8")
