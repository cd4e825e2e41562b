"""Warns if no process fires the timers, or none runs their jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nimble_jobs.cli import output
from nimble_jobs.views.timers import NOBODY, NOBODY_RUNS

if TYPE_CHECKING:
    from nimble_jobs.store import Store


def warn(store: Store) -> None:
    """Warn on stderr if no process fires timers, or if no worker runs their jobs."""
    from nimble_jobs import cron

    if not cron.firing(store=store):
        output.warn(NOBODY)
    else:
        warn_idle(store)


def warn_idle(store: Store) -> None:
    """Say on stderr that no worker runs the jobs of timers, if so."""
    from nimble_jobs import client

    if not client.live_workers(store=store):
        output.note(NOBODY_RUNS)
