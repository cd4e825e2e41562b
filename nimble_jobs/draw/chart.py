"""The Gantt chart itself as SVG elements: streams as rows, tasks as bars, syncs as arrows."""

from __future__ import annotations

import html
import math
import sys
from dataclasses import dataclass

from nimble_jobs.draw import labels
from nimble_jobs.draw.timing import Timing
from nimble_jobs.schedule import Schedule

LEFT, RIGHT, TOP, ROW, BAR = 108, 20, 30, 34, 22  # pixels
_TICKS = 10  # about so many
_LEAST_US = 1e-9  # less is no time: pixels for each microsecond would be no number
LETTER = 6.05  # pixels, of the bars' monospaced font
_FAMILIES = list(labels.FAMILIES)


@dataclass(frozen=True, slots=True)
class Scale:
    """Pixels of a stretch of time."""

    width: float
    span_us: float

    def x(self, us: float) -> float:
        return LEFT + us * self.per_us

    @property
    def per_us(self) -> float:
        return (self.width - LEFT - RIGHT) / self.span_us if self.span_us > _LEAST_US else 0.0


def escape(text: str) -> str:
    """Text for elements and attributes of HTML and XML alike."""
    return html.escape(labels.clean(text), quote=True)


def height(schedule: Schedule) -> int:
    """The height of the chart in pixels."""
    return TOP + max(1, schedule.plan.streams) * ROW + 6


def elements(schedule: Schedule, timing: Timing, width: int) -> str:
    """Everything within the `svg` element, whose styles are `styles.css`."""
    scale = Scale(width, timing.makespan_us)
    return "\n".join(
        [
            _definitions(width, height(schedule)),
            *_rows(timing, width),
            *_axis(timing, scale, height(schedule)),
            '<g clip-path="url(#plot)"><g class="bars">',
            *_bars(schedule, timing, scale),
            '</g><g class="syncs">',
            *_arrows(schedule, timing, scale),
            "</g></g>",
        ]
    )


def legend() -> list[tuple[str, str]]:
    """Classes of the swatches, and what they mean."""
    families = [(f"swatch f{i}", title) for i, title in enumerate(_FAMILIES)]
    return [*families, ("swatch critical", "on the critical path")]


def _definitions(width: int, tall: int) -> str:
    return (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 .5 8 4 0 7.5z"/></marker>'
        f'<clipPath id="plot"><rect x="{LEFT - 1}" y="0" width="{width - LEFT - RIGHT + 12}" height="{tall}"/>'
        "</clipPath></defs>"
    )


def _rows(timing: Timing, width: int) -> list[str]:
    lines = []
    for stream, idle in enumerate(timing.idle_share):
        y = TOP + stream * ROW
        lines.append(
            f'<g class="row"><rect class="stripe{stream % 2}" x="0" y="{y}" width="{width}" height="{ROW}"/>'
            f'<text x="8" y="{y + 15}">stream {stream}</text>'
            f'<text class="small" x="8" y="{y + 28}">{idle:.0%} idle</text></g>'
        )
    return lines


def ticks(span_us: float) -> list[float]:
    """Round times from 0 to `span_us`."""
    rough = span_us / _TICKS
    if not rough > sys.float_info.min:  # below, numbers lose their digits
        return [0.0]
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough * 0.999)
    return [i * step for i in range(int(span_us / step * 1.0000001) + 1)]


def _axis(timing: Timing, scale: Scale, tall: int) -> list[str]:
    lines = ['<g class="axis">']
    for us in ticks(timing.makespan_us):
        text = labels.duration(us, timing.measured) if us else "0"
        lines.append(
            f'<path d="M{scale.x(us):.2f} {TOP - 6}V{tall - 6}"/>'
            f'<text x="{scale.x(us):.2f}" y="{TOP - 12}">{text}</text>'
        )
    return [*lines, "</g>"]


def _bars(schedule: Schedule, timing: Timing, scale: Scale) -> list[str]:
    critical = set(timing.critical)
    lines = []
    for i in schedule.plan.order:
        task = schedule.program.tasks[i]
        length = timing.end_us[i] - timing.start_us[i]
        x, w = scale.x(timing.start_us[i]), _bar_width(length * scale.per_us)
        y = TOP + schedule.plan.stream_of[i] * ROW + (ROW - BAR) // 2
        name = labels.short(task.op)
        is_critical = i in critical
        mark = f'<rect class="mark" x="{x:.2f}" y="{y + BAR - 5}" width="{w:.2f}" height="5"/>' if is_critical else ""
        about = escape(labels.details(schedule, timing, i, critical=is_critical))
        lines.append(
            f'<g class="task f{_FAMILIES.index(labels.family(task.op))}{" critical" if is_critical else ""}" '
            f'data-task="{i}" data-start="{timing.start_us[i]:.6g}" data-length="{length:.6g}" '
            f'data-name="{escape(name)}"><title>{about}</title>'
            f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{BAR}"/>{mark}'
            f'<text x="{x + 4:.2f}" y="{y + 13}">{escape(_fit(name, w))}</text></g>'
        )
    return lines


def _bar_width(pixels: float) -> float:
    """A little less than the task takes, so that neighbours stay apart, and never nothing."""
    return max(0.4, pixels - min(1.0, pixels / 5))


def _fit(name: str, pixels: float) -> str:
    room = int((pixels - 7) / LETTER)
    if room < 3:
        return ""
    return name if len(name) <= room else f"{name[: room - 1]}…"


def _arrows(schedule: Schedule, timing: Timing, scale: Scale) -> list[str]:
    lines = []
    for sync in schedule.plan.syncs:
        y1, y2 = (TOP + schedule.plan.stream_of[i] * ROW + ROW // 2 for i in (sync.before, sync.after))
        x1, x2 = scale.x(timing.end_us[sync.before]), scale.x(timing.start_us[sync.after])
        bend = max(6.0, min(40.0, (x2 - x1) / 2))
        lines.append(
            f'<path class="sync" data-before="{sync.before}" data-after="{sync.after}" marker-end="url(#head)" '
            f'd="M{x1:.2f} {y1}C{x1 + bend:.2f} {y1} {x2 - bend:.2f} {y2} {x2:.2f} {y2}"/>'
        )
    return lines
