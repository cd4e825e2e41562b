"""Runs retention in steps, with pauses in which others can use the database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from nimble_jobs.data import hidden
from nimble_jobs.errors import DataError
from nimble_jobs.retention import folders, logs
from nimble_jobs.retention.copies import left_copies
from nimble_jobs.retention.objects import left_objects
from nimble_jobs.retention.pace import Pace
from nimble_jobs.retention.rules import Rules, Spared, goes
from nimble_jobs.store.expiry import Ended, Published, Tally

if TYPE_CHECKING:
    from nimble_jobs.job import Job
    from nimble_jobs.store import Store
    from nimble_jobs.store.timer_records import Timer

KINDS = (
    *("jobs", "attempts", "events", "waits", "logs", "worker logs"),
    *("left-over folders", "checkpoints", "publications", "ticks", "notifications"),
)
WORTH_BYTES = 1 << 20
_READ = 2000  # rows read at a time
_SOME = 500  # small rows removed in one transaction
_EVENTS = 200
_KEEP = 30  # the default of `cron.keep`
_TICK_BYTES, _NOTICE_BYTES = 150, 1000  # approximate bytes of a row


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """The pause after a step, in seconds, by the time that the step took."""

    factor: float
    least_s: float
    most_s: float

    def after(self, took_s: float) -> float:
        return min(max(self.factor * took_s, self.least_s), self.most_s)


_IDLE = Pauses(factor=0.25, least_s=0.002, most_s=0.1)
_BUSY = Pauses(factor=3.0, least_s=0.05, most_s=0.5)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step removed, or would remove."""

    tally: Tally
    trouble: tuple[str, ...] = ()  # what could not be removed, and why; the next sweep tries again


@dataclass(frozen=True, kw_only=True)
class Done:
    """What the steps so far removed, or would remove."""

    rows: tuple[tuple[str, int, int], ...] = ()  # kind, how many, bytes; in the order of KINDS
    given_back_bytes: int = 0  # bytes by which the database file shrank
    trouble: tuple[str, ...] = ()


class Sweep:
    """Carries out rules as of `now`, in Unix seconds. Without `remove` it only counts."""

    def __init__(
        self,
        store: Store,
        rules: Rules,
        now: float,
        *,
        remove: bool,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._rules, self._now = store, rules, now
        self._remove, self._clock, self._sleep = remove, clock, sleep
        self._going: set[str] = set()  # jobs that were removed, or would be
        self._held: set[str] = set()  # jobs whose leftovers could not be removed; their rows say where these are
        self._tally = Tally()
        self._trouble: list[str] = []
        self._given_back = 0

    @property
    def done(self) -> Done:
        """The removals so far."""
        counts, sizes = self._tally.counts, self._tally.bytes
        return Done(
            rows=tuple((kind, counts[kind], sizes.get(kind, 0)) for kind in KINDS if counts.get(kind)),
            given_back_bytes=self._given_back,
            trouble=tuple(self._trouble),
        )

    def run(self) -> Done:
        """All steps. Raises StoreError."""
        for _ in self.paced():
            pass
        return self.done

    def paced(self) -> Iterator[Step]:
        """The steps, each followed by a pause, which is several times as long while workers run.

        A process that waits for SQLite's lock polls it as rarely as ten times a second, and must find it free.
        """
        pauses = _BUSY if self._store.workers.live() else _IDLE
        steps = self.steps()
        while True:
            began = self._clock()
            step = next(steps, None)
            if step is None:
                return
            yield step
            if self._remove:
                self._sleep(pauses.after(self._clock() - began))

    def steps(self) -> Iterator[Step]:
        """The steps. Each takes about a tenth of a second at most, and can be the last. Raises StoreError."""
        for step in self._all():
            self._tally += step.tally
            self._trouble += step.trouble
            yield step

    def _all(self) -> Iterator[Step]:
        left = folders.left_over(self._store)
        checkpoints = self._trainings(left)
        yield from self._left_overs(left)
        yield from self._left_objects()
        yield from self._jobs()
        yield from self._checkpoints(checkpoints)
        yield from self._logs()
        yield from self._events()
        yield from self._publications()
        yield from self._ticks()
        yield from self._notices()
        yield from self._give_back()

    def _give_back(self) -> Iterator[Step]:
        """Return free space of the database file, if it is worth the writing, since new jobs would use it too."""
        expiry = self._store.expiry
        if not self._remove or (before := expiry.free_bytes()) < WORTH_BYTES:
            return
        pace, more = Pace(first=250, least=100, most=2000), True
        while more:
            began = self._clock()
            more = expiry.give_back(pace.size)
            pace.took(self._clock() - began)
            self._given_back = before - expiry.free_bytes()
            yield Step(tally=Tally())

    def _left_overs(self, left: dict[Path, Job]) -> Iterator[Step]:
        """Files that jobs staged beside their outputs, which are useless at any age."""
        for path, job in left.items():
            if path.suffix == ".training" or self._now - (job.finished_at or 0.0) < folders.GRACE_S:
                continue
            size = folders.bytes_of(path)
            try:
                if self._remove:
                    hidden.discard_staging(folders.output_of(job), job.id)
            except DataError as e:
                self._held.add(job.id)
                yield Step(tally=Tally(), trouble=(str(e),))
            else:
                yield _one("left-over folders", size)

    def _left_objects(self) -> Iterator[Step]:
        """What jobs that did not succeed left in object stores, and local copies of inputs from there."""
        for left in chain(*(each(self._store, self._now, remove=self._remove) for each in (left_objects, left_copies))):
            if left.trouble is not None:
                self._held |= left.jobs
                yield Step(tally=Tally(), trouble=(left.trouble,))
            else:
                yield _one("left-over folders", left.bytes)

    def _jobs(self) -> Iterator[Step]:
        spared = self._spared()
        pace = Pace(first=100, least=50, most=200)  # a commit takes as long as removing a hundred rows
        above = 0
        before = None if spared.timed else self._before()
        while page := self._store.expiry.ended(above=above, limit=_READ, before=before):
            above = page[-1].seq
            going = [job for job in page if goes(job, self._rules, spared, self._now) and job.id not in self._held]
            yield Step(tally=Tally())
            while going:
                some, going = going[: pace.size], going[pace.size :]
                began = self._clock()
                yield self._remove_jobs(some)
                pace.took(self._clock() - began)

    def _before(self) -> float | None:
        """Jobs that ended after this time stay; None if any may go."""
        rules = self._rules
        if not rules.by_age or rules.keep_s is None or rules.keep_failed_s is None:
            return None
        return self._now - min(rules.keep_s, rules.keep_failed_s)

    def _spared(self) -> Spared:
        expiry, count = self._store.expiry, self._rules.per_name
        timed: dict[str, bool] = {}
        for timer in self._store.timers.list():
            timed |= expiry.of_timer(timer.name, _kept(timer))
        newest = {} if count is None else expiry.newest(count)
        return Spared(needed=frozenset(expiry.needed()), newest=newest, timed=timed)

    def _remove_jobs(self, jobs: Sequence[Ended]) -> Step:
        expiry, troubles = self._store.expiry, dict[str, str]()
        if self._remove:
            troubles = folders.keep_publications(self._store, jobs)
            self._held.update(troubles)
            jobs = [job for job in jobs if job.id not in troubles]
        went, tally = expiry.remove(jobs) if self._remove else ([job.id for job in jobs], expiry.hanging(jobs))
        self._going.update(went)
        sizes = []
        # After their rows: a log without a job is removed next time, but a job without its log would be a loss.
        for job_id in went:
            path = logs.log_of(self._store.home, job_id)
            with suppress(OSError):
                size = path.stat().st_size
                if self._remove:
                    path.unlink()
                sizes.append(size)
        logged = Tally(counts={"logs": len(sizes)}, bytes={"logs": sum(sizes)})
        return Step(tally=tally + logged, trouble=tuple(troubles.values()))

    def _trainings(self, left: dict[Path, Job]) -> dict[Path, tuple[Path, set[str]]]:
        """Folders with checkpoints: their output, and all jobs that could resume from them."""
        found = {}
        for place, job in left.items():
            if place == hidden.training_root(output := folders.output_of(job)):
                jobs = self._store.jobs.of(trainings=[str(output)])
                found[place] = (output, {each.id for each in jobs})
        return found

    def _checkpoints(self, trainings: dict[Path, tuple[Path, set[str]]]) -> Iterator[Step]:
        """Checkpoints go with the last job that could resume from them."""
        for place, (output, jobs) in trainings.items():
            if not jobs <= self._going:
                continue
            size = folders.bytes_of(place)
            try:
                if self._remove:
                    hidden.forget_checkpoints(output)
            except DataError as e:
                yield Step(tally=Tally(), trouble=(str(e),))
            else:
                yield _one("checkpoints", size)

    def _logs(self) -> Iterator[Step]:
        """Logs of workers, and of jobs that are no longer known."""
        started = [worker.started_at for worker in self._store.workers.live()]
        old_logs = [
            log
            for log in logs.logs(self._store.home)
            if log.job not in self._going and logs.old(log, self._rules.logs_s, self._now, started=started)
        ]
        known = self._store.expiry.known([log.job for log in old_logs if log.job])
        for log in old_logs:
            if log.job in known:
                continue
            try:
                if self._remove:
                    log.path.unlink(missing_ok=True)
            except OSError as e:
                yield Step(tally=Tally(), trouble=(f"{log.path}: cannot be removed: {e.strerror}",))
            else:
                yield _one("logs" if log.job else "worker logs", log.bytes)

    def _events(self) -> Iterator[Step]:
        """Events without a job, such as a worker's."""
        if self._rules.logs_s is None:
            return
        before, above = self._now - self._rules.logs_s, 0
        while True:
            tally, above = self._store.expiry.events(before, above=above, limit=_EVENTS, remove=self._remove)
            yield Step(tally=tally)
            if not above:
                return

    def _publications(self) -> Iterator[Step]:
        """Publications whose job and folder are gone. An existing folder needs its record to be recognised."""
        forgotten: list[Published] = []
        above = ""
        while page := self._store.expiry.published(above=above, limit=_READ):
            above = page[-1].token
            forgotten += page
            yield Step(tally=Tally())
        latest = folders.latest(forgotten)
        for first in range(0, len(forgotten), _SOME):
            some = forgotten[first : first + _SOME]
            known = self._store.expiry.known([each.job for each in some]) - self._going
            gone = [
                each
                for each in some
                if each.job not in known and folders.gone(each, replaced=each.at < latest[each.path])
            ]
            if gone and self._remove:
                self._store.expiry.forget([each.token for each in gone])
            size = sum(each.bytes for each in gone)
            yield Step(tally=Tally(counts={"publications": len(gone)}, bytes={"publications": size}))

    def _ticks(self) -> Iterator[Step]:
        """Ticks by the age of jobs, except each timer's newest ones, as many as jobs."""
        if self._rules.keep_s is None:
            return
        timers, before = self._store.timers, self._now - self._rules.keep_s
        for timer in timers.list():
            if not self._remove:
                yield _estimated("ticks", timers.count_old_ticks(timer.name, before, _kept(timer)), _TICK_BYTES)
                continue
            while count := timers.prune_some_ticks(timer.name, before, _kept(timer)):
                yield _estimated("ticks", count, _TICK_BYTES)

    def _notices(self) -> Iterator[Step]:
        """Notifications that were sent or given up."""
        if self._rules.keep_s is None:
            return
        outbox, before = self._store.outbox, self._now - self._rules.keep_s
        if not self._remove:
            yield _estimated("notifications", outbox.count_old(before), _NOTICE_BYTES)
            return
        while count := outbox.prune_some(before):
            yield _estimated("notifications", count, _NOTICE_BYTES)


def _kept(timer: Timer) -> int:
    """`cron.keep`: how many finished jobs of a timer stay."""
    cron = timer.spec.get("cron")
    keep = cron.get("keep") if isinstance(cron, dict) else None
    return keep if isinstance(keep, int) else _KEEP


def _estimated(kind: str, count: int, row_bytes: int) -> Step:
    return Step(tally=Tally(counts={kind: count}, bytes={kind: count * row_bytes}))


def _one(kind: str, nbytes: int) -> Step:
    return Step(tally=Tally(counts={kind: 1}, bytes={kind: nbytes}))
