"""A schedule to be looked at: pure functions from the value to text.

`timing` says when each task runs; `timeline` (HTML, SVG) and `trace` (Perfetto) show that, `dot` the graph.
"""

from __future__ import annotations

from nimble_jobs.draw.dot import to_dot
from nimble_jobs.draw.files import Drawing, writable, write
from nimble_jobs.draw.timeline import to_html, to_svg
from nimble_jobs.draw.timing import Timing, simulate
from nimble_jobs.draw.trace import to_chrome_trace

__all__ = ["Drawing", "Timing", "simulate", "to_chrome_trace", "to_dot", "to_html", "to_svg", "writable", "write"]
