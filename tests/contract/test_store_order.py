"""In whatever order jobs come, wait, are held, retried and end: who is claimed next, and that nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, precondition, rule

from nimble_jobs.job import After, JobState, When
from nimble_jobs.store import NewJob, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.ranks import AGING_S
from tests import postgres
from tests.store_samples import NOW, folder_in_memory

MET = {
    When.SUCCESS: (JobState.SUCCEEDED,),
    When.FAILURE: (JobState.FAILED,),
    When.DONE: (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED),
}
ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass
class Known:
    """What the model knows of one job."""

    number: int  # in order of submission
    priority: int
    group: tuple[str, int] | None
    waits: dict[str, When]
    queued_at: float
    state: JobState = JobState.QUEUED
    attempt: int = 0
    held: bool = False
    skipped_by: str | None = None
    open: set[str] = field(default_factory=set)  # those of `waits` that are not over


class Order(RuleBasedStateMachine):
    """A queue and a slow model of it."""

    url: str | None = None  # of the database, if it is not a file
    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.folder = folder_in_memory()
        self.store = open_store(resolve(str(Path(self.folder.name) / "home")), self.url)
        self.jobs: dict[str, Known] = {}
        self.limits: dict[str, int] = {}
        self.now = NOW
        self.aging_s = AGING_S

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def urgency(self, job: str) -> int:
        waiting = [j for j, known in self.jobs.items() if job in known.open and known.state == JobState.QUEUED]
        return max([self.jobs[job].priority, *map(self.urgency, waiting)])

    def rank(self, job: str) -> tuple[float, int]:
        known = self.jobs[job]
        return known.queued_at - self.urgency(job) * self.aging_s, known.number

    def running(self, group: str) -> int:
        mine = [known for known in self.jobs.values() if known.group and known.group[0] == group]
        return sum(known.state == JobState.RUNNING for known in mine)

    def claimable(self) -> list[str]:
        ready = [
            job
            for job, known in self.jobs.items()
            if known.state == JobState.QUEUED
            and not known.held
            and not known.open
            and (known.group is None or self.running(known.group[0]) < self.limits[known.group[0]])
        ]
        return sorted(ready, key=self.rank)

    def settle(self, job: str) -> None:
        """Free and skip those that wait for a job that has ended."""
        state = self.jobs[job].state
        for child, known in list(self.jobs.items()):
            if known.state != JobState.QUEUED or job not in known.open:
                continue
            if state in MET[known.waits[job]]:
                known.open.discard(job)
            else:
                known.state, known.skipped_by, known.held = JobState.CANCELLED, job, False
                known.open.clear()
                self.settle(child)

    def wait(self, job: str) -> None:
        """Let a job that was just queued wait for what it has to."""
        known = self.jobs[job]
        known.open = {p for p, when in known.waits.items() if self.jobs[p].state not in MET[when]}
        for parent in sorted(known.open):
            if self.jobs[parent].state in ENDED:
                self.settle(parent)

    def expect(self, job: str, priority: int, group: tuple[str, int] | None, waits: dict[str, When]) -> None:
        if group:
            self.limits[group[0]] = group[1]
        self.jobs[job] = Known(number=len(self.jobs), priority=priority, group=group, waits=waits, queued_at=self.now)
        self.wait(job)

    @rule(
        target=ids,
        new=st.lists(
            st.tuples(st.integers(-1, 3), st.none() | st.tuples(st.sampled_from("gh"), st.integers(1, 2))),
            min_size=1,
            max_size=3,
        ),
        waits=st.dictionaries(ids, st.sampled_from(When), max_size=2),
    )
    def submit(self, new: list[tuple[int, tuple[str, int] | None]], waits: dict[str, When]) -> object:
        after = tuple(After(job=job, when=when) for job, when in waits.items())
        queued = [
            NewJob(
                spec={"run": {"group": {"name": group[0], "limit": group[1]} if group else None}},
                name="n",
                kind="score",
                priority=priority,
                after=after,
            )
            for priority, group in new
        ]
        _array, jobs = self.store.jobs.queue_array(queued, self.now)
        for job, (priority, group) in zip(jobs, new, strict=True):
            self.expect(job.id, priority, group, dict(waits))
        return multiple(*(job.id for job in jobs))

    @rule()
    def claim(self) -> None:
        expected = self.claimable()
        job = self.store.jobs.claim("w", device="cpu", now=self.now)
        assert (job and job.id) == (expected[0] if expected else None)
        if job:
            self.jobs[job.id].state = JobState.RUNNING
            self.jobs[job.id].attempt += 1

    @rule(job=ids, good=st.booleans())
    @precondition(lambda self: any(known.state == JobState.RUNNING for known in self.jobs.values()))
    def finish(self, job: str, good: bool) -> None:
        running = [j for j, known in self.jobs.items() if known.state == JobState.RUNNING]
        job = job if job in running else running[0]
        known, jobs = self.jobs[job], self.store.jobs
        if good:
            assert jobs.finish(job, known.attempt, outputs={}, timings={}, schedule={}, now=self.now)
        else:
            assert jobs.fail(job, known.attempt, error="e", retry=False, lost=False, now=self.now)
        known.state = JobState.SUCCEEDED if good else JobState.FAILED
        self.settle(job)

    @rule(job=ids)
    def cancel(self, job: str) -> None:
        known = self.jobs[job]
        if known.state == JobState.QUEUED:
            assert self.store.jobs.cancel(job, self.now) is JobState.CANCELLED
            known.state, known.held = JobState.CANCELLED, False
            known.open.clear()
            self.settle(job)

    @rule(job=ids, held=st.booleans())
    def hold(self, job: str, held: bool) -> None:
        known = self.jobs[job]
        if known.state == JobState.QUEUED and (held or known.held):
            (self.store.jobs.hold if held else self.store.jobs.release)([job], self.now)
            known.held = held

    @rule(job=ids)
    def retry(self, job: str) -> None:
        known = self.jobs[job]
        possible = known.state in (JobState.FAILED, JobState.CANCELLED) and (
            known.attempt
            or all(
                self.jobs[p].state not in ENDED or self.jobs[p].state in MET[when] for p, when in known.waits.items()
            )
        )
        if possible:
            self.store.jobs.retry([job], now=self.now)
            known.state, known.queued_at, known.skipped_by = JobState.QUEUED, self.now, None
            known.open = {p for p in known.waits if self.jobs[p].state not in ENDED}
            if known.group:
                self.limits.setdefault(*known.group)

    @rule(seconds=st.floats(0, 5 * AGING_S))
    def clock(self, seconds: float) -> None:
        self.now += seconds

    @rule(aging_s=st.sampled_from([60.0, AGING_S, 10 * AGING_S]))
    def age(self, aging_s: float) -> None:
        self.store.jobs.set_aging(aging_s, self.now)
        self.aging_s = aging_s

    @rule()
    def sweep(self) -> None:
        assert self.store.jobs.sweep(self.now) == []
        alive = {k.group[0] for k in self.jobs.values() if k.group and k.state not in ENDED}
        self.limits = {name: limit for name, limit in self.limits.items() if name in alive}

    @invariant()
    def as_expected(self) -> None:
        """Each job is as the model says; a queued one has the highest priority of all that wait for it."""
        for job in self.store.jobs.list():
            known = self.jobs[job.id]
            assert (job.state, job.attempt, job.held) == (known.state, known.attempt, known.held)
            assert (job.skipped_by is None) == (known.skipped_by is None)
            assert job.skipped_by is None or job.skipped_by in known.waits  # of several that ended, either may be named
            if job.state is JobState.QUEUED:
                assert job.urgency == self.urgency(job.id)

    @invariant()
    def groups_are_kept(self) -> None:
        """A claim never brings a group over its limit; only a lower limit can find more running."""
        for name, (running, most) in self.store.jobs.group_limits(sorted(self.limits)).items():
            assert (running, most) == (self.running(name), self.limits[name])

    @rule()
    def nobody_starves(self) -> None:
        """However urgent those are that come later: a job that may run is claimed once they have come late enough."""
        waiting = self.claimable()
        if not waiting:
            return
        oldest = min(waiting, key=lambda job: self.rank(job))
        latest = self.jobs[oldest].queued_at + (10 - self.urgency(oldest)) * self.aging_s
        self.now = max(self.now, latest + 1)
        (job,) = self.store.jobs.queue_array([NewJob(spec={}, name="urgent", kind="score", priority=10)], self.now)[1]
        self.expect(job.id, 10, None, {})
        self.claim()
        assert self.jobs[oldest].state == JobState.RUNNING


TestOrder = Order.TestCase
TestOrder.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


class SharedOrder(Order):
    """The same over PostgreSQL."""

    def __init__(self) -> None:
        assert self.url is not None
        postgres.empty(self.url)
        super().__init__()


class TestSharedOrder(SharedOrder.TestCase):  # type: ignore[name-defined,misc]  # made by Hypothesis
    """Fewer runs of it, since each statement goes to a server."""

    settings = settings(max_examples=3, stateful_step_count=30, deadline=None)

    @classmethod
    def setUpClass(cls) -> None:
        schema = postgres.schema()
        SharedOrder.url = schema.__enter__()
        cls.addClassCleanup(schema.__exit__, None, None, None)
