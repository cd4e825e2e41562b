"""All about one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nimble_jobs.job import Attempt, Event, Job
from nimble_jobs.views import job_notes, members, waits
from nimble_jobs.views.figures import Row
from nimble_jobs.views.jobs import job_json

if TYPE_CHECKING:
    from nimble_jobs.store import Store, Tick
    from nimble_jobs.store.notices import Notice

TOLD_BY_EVENTS = ("settings", "only-new")  # kinds of events without which `Shown.json` would not be whole


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A job, and what `show` prints about it."""

    job: Job
    attempts: Sequence[Attempt]
    events: Sequence[Event]
    notices: Sequence[Notice]
    tick: Tick | None  # for which it was submitted
    why: str | None  # it does not run yet
    members: Sequence[Row] = ()  # its devices, if several may work on it

    def json(self, now: float) -> Row:
        """The JSON of `show`."""
        return job_json(self.job, self.attempts, self.events, now, self.why) | {
            "members": list(self.members),
            "tick": job_notes.tick_json(self.tick),
            "settings": job_notes.settings_of(self.events),
            "notifications": job_notes.notices_json(self.notices),
        }


def look(store: Store, job: Job, now: float, *, events: Sequence[Event] | None = None) -> Shown:
    """Read it. `events`: those to show; by default all of the job."""
    why = waits.reasons(store, [job], now).get(job.id)
    if why and waits.in_line(why) and (ahead := store.jobs.ahead_of(job, now)):
        why = f"{why}; {ahead:,} queued {'job comes' if ahead == 1 else 'jobs come'} first, by priority and age"
    return Shown(
        job=job,
        attempts=store.jobs.attempts(job.id),
        events=store.jobs.events(job.id) if events is None else events,
        notices=store.outbox.list(job=job.id),
        tick=store.timers.tick_of(job.id),
        why=why,
        members=members.rows(job, members.members_of(store, job)),
    )
