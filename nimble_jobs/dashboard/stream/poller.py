"""Reads what has changed in the store since the last beat. It runs in a thread, one beat at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nimble_jobs.job import Event, JobState
from nimble_jobs.store import Store
from nimble_jobs.views.jobs import progress_row

AT_ONCE = 500  # most events that are read in one transaction
_PROGRESS_S = 1.0  # progress is told at most this often


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The rows of all running jobs, and the number of jobs by state."""

    jobs: tuple[Mapping[str, Any], ...]
    counts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class News:
    """What a beat has found."""

    events: tuple[Event, ...] = ()
    progress: Progress | None = None  # None if it is not time for it, or nothing has changed
    more: bool = False  # whether there may be further events already
    restarted_at: int | None = None  # the newest event of another database, whose events count anew


class Poller:
    """Looks for commits first; without any, a beat reads one page of the database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._watch = store.watch()
        self._told: Progress | None = None
        self._behind = True  # whether the store may have events that were not read, also because reading them failed
        self._stale = True  # the same about progress
        self._told_at = 0.0  # by the monotonic clock

    def beat(self, after: int) -> News:
        """Events with a number above `after`, and progress if it is time for that."""
        changed = self._watch.changed()
        self._behind |= changed
        self._stale |= changed
        events: tuple[Event, ...] = ()
        restarted_at = None
        if self._behind:
            events = tuple(self._store.jobs.events(since=after, limit=AT_ONCE))
            if not events and (newest := self._store.jobs.event_span()[1]) < after:
                restarted_at = newest
            self._behind = len(events) == AT_ONCE  # one commit may bring more than are read at once
        progress = None
        if self._stale and time.monotonic() >= self._told_at + _PROGRESS_S:
            progress = self._progress()
        return News(events=events, progress=progress, more=len(events) == AT_ONCE, restarted_at=restarted_at)

    def _progress(self) -> Progress | None:
        self._told_at, now = time.monotonic(), time.time()
        running = self._store.jobs.list(states=[JobState.RUNNING])
        progress = Progress(
            jobs=tuple(progress_row(job, now) for job in running),
            counts={state.value: number for state, number in self._store.jobs.counts().items()},
        )
        self._stale = False
        if progress == self._told:
            return None
        self._told = progress
        return progress

    def forget(self) -> None:
        """Let the next beat tell everything, changed or not."""
        self._told, self._stale, self._told_at = None, True, 0.0

    def close(self) -> None:
        """Close the connection that looks for commits."""
        self._watch.close()
