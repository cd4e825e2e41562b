"""Firing timers: which ticks are due, their outcomes, and the jobs that they submit."""

from nimble_jobs.timers.asked import Backfill, BackfillTick, backfill, trigger
from nimble_jobs.timers.fire import Fired, Firer
from nimble_jobs.timers.keep import put, resume, upcoming
from nimble_jobs.timers.plan import PUNCTUAL_S
from nimble_jobs.timers.rhythm import Rhythm

__all__ = [
    "PUNCTUAL_S",
    "Backfill",
    "BackfillTick",
    "Fired",
    "Firer",
    "Rhythm",
    "backfill",
    "put",
    "resume",
    "trigger",
    "upcoming",
]
