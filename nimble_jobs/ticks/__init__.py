"""When timers are due, and how the time of a tick is written. Times are UTC seconds; no function reads a clock."""

from nimble_jobs.ticks.errors import BadExpression, BadMoment, BadTemplate, BadTick, BadZone
from nimble_jobs.ticks.expression import Expression
from nimble_jobs.ticks.jitter import jitter_s
from nimble_jobs.ticks.moments import parse_moment
from nimble_jobs.ticks.simulate import YEAR_S, Clash, clash, closest_s
from nimble_jobs.ticks.templates import Placeholder, placeholders, render
from nimble_jobs.ticks.zones import local_text

__all__ = [
    "YEAR_S",
    "BadExpression",
    "BadMoment",
    "BadTemplate",
    "BadTick",
    "BadZone",
    "Clash",
    "Expression",
    "Placeholder",
    "clash",
    "closest_s",
    "jitter_s",
    "local_text",
    "parse_moment",
    "placeholders",
    "render",
]
