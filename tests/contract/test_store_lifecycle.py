"""Whatever happens to jobs in whatever order, the rules of their life hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from nimble_jobs.job import Job, JobState
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.ranks import AGING_S
from tests import postgres
from tests.store_samples import NOW, folder_in_memory, submit

WORKERS = ("0-a", "1-b", "2-c")
BAD = (JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED)


@dataclass
class Known:
    """What the model knows of one job."""

    after: tuple[str, ...]
    priority: int
    max_attempts: int
    number: int  # in order of submission
    queued_at: float = NOW
    state: JobState = JobState.QUEUED
    attempt: int = 0
    failures: int = 0
    cancel: bool = False
    ended: Job | None = None  # what it was when it ended
    outcomes: list[str | None] = field(default_factory=list)


class JobLife(RuleBasedStateMachine):
    """Jobs, workers that take them, finish, fail, drain, die, and come back late."""

    url: str | None = None  # of the database, if it is not a file
    ids = Bundle("ids")
    attempts = Bundle("attempts")  # (id, number, worker), current or stale

    def __init__(self) -> None:
        super().__init__()
        self.folder = folder_in_memory()
        self.store = open_store(resolve(str(Path(self.folder.name) / "home")), self.url)
        self.jobs: dict[str, Known] = {}
        self.now = NOW

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def end(self, job_id: str, state: JobState) -> None:
        self.jobs[job_id].state = state
        if state in BAD:
            for child, known in self.jobs.items():
                if known.state == JobState.QUEUED and job_id in known.after:
                    self.end(child, JobState.CANCELLED)

    def current(self, attempt: tuple[str, int, str]) -> bool:
        known = self.jobs[attempt[0]]
        return known.state == JobState.RUNNING and known.attempt == attempt[1]

    def claimable(self) -> list[str]:
        ready = [
            (self.rank(job_id), known.number, job_id)
            for job_id, known in self.jobs.items()
            if known.state == JobState.QUEUED
            and all(self.jobs[parent].state == JobState.SUCCEEDED for parent in known.after)
        ]
        return [job_id for _, _, job_id in sorted(ready)]

    def urgency(self, job_id: str) -> int:
        """The highest priority of the job and of the queued ones that wait for it, or for one that waits for it."""
        mine = self.jobs[job_id]
        waiting = [j for j, known in self.jobs.items() if known.state == JobState.QUEUED and job_id in known.after]
        return max([mine.priority, *map(self.urgency, waiting)])

    def rank(self, job_id: str) -> float:
        return self.jobs[job_id].queued_at - self.urgency(job_id) * AGING_S

    @rule(
        target=ids,
        after=st.lists(ids, max_size=2, unique=True),
        priority=st.integers(-1, 1),
        max_attempts=st.integers(1, 3),
    )
    def submit(self, after: list[str], priority: int, max_attempts: int) -> str:
        job = submit(
            self.store,
            after=after,
            priority=priority,
            max_attempts=max_attempts,
            retry={"initial": 0.0},
            now=self.now,
        )
        known = Known(
            after=tuple(after),
            priority=priority,
            max_attempts=max_attempts,
            number=len(self.jobs),
            state=job.state,
            queued_at=self.now,
        )
        self.jobs[job.id] = known
        expected = JobState.QUEUED
        if any(self.jobs[parent].state in BAD for parent in after):
            expected = JobState.CANCELLED
        assert job.state == expected
        return job.id

    @rule(target=attempts, worker=st.sampled_from(WORKERS))
    @precondition(lambda self: self.claimable())
    def claim(self, worker: str) -> tuple[str, int, str]:
        job = self.store.jobs.claim(worker, device="cpu", now=self.now)
        assert job is not None
        assert job.id == self.claimable()[0]
        known = self.jobs[job.id]
        assert job.attempt == known.attempt + 1
        known.state, known.attempt = JobState.RUNNING, job.attempt
        known.outcomes.append(None)
        return (job.id, job.attempt, worker)

    @rule()
    @precondition(lambda self: not self.claimable())
    def claim_nothing(self) -> None:
        assert self.store.jobs.claim("0-a", device="cpu", now=self.now) is None

    @rule(attempt=attempts, done=st.integers(0, 100))
    def progress(self, attempt: tuple[str, int, str], done: int) -> None:
        wrote = self.store.jobs.progress(attempt[0], attempt[1], done=done, total=100, bad=0)
        assert wrote == self.current(attempt)
        if wrote:
            assert self.store.jobs.get(attempt[0]).records_done == done

    @rule(attempt=attempts)
    def finish(self, attempt: tuple[str, int, str]) -> None:
        job_id, number, _ = attempt
        owned = self.current(attempt)
        finished = self.store.jobs.finish(
            job_id, number, outputs={"attempt": number}, timings={}, schedule={}, now=self.now
        )
        assert finished == owned
        if owned:
            self.jobs[job_id].outcomes[-1] = "succeeded"
            self.end(job_id, JobState.SUCCEEDED)

    @rule(attempt=attempts, retry=st.booleans(), lost=st.booleans())
    def fail(self, attempt: tuple[str, int, str], retry: bool, lost: bool) -> None:
        job_id, number, _ = attempt
        owned = self.current(attempt)
        state = self.store.jobs.fail(job_id, number, error="e", retry=retry, lost=lost, now=self.now)
        if owned:
            self.interrupted(job_id, "lost" if lost else "failed", retry or lost, state)
        else:
            assert state is None

    def interrupted(self, job_id: str, outcome: str, again: bool, state: JobState | None) -> None:
        known = self.jobs[job_id]
        known.failures += 1
        known.outcomes[-1] = outcome
        if again and known.failures < known.max_attempts:
            expected = JobState.CANCELLED if known.cancel else JobState.QUEUED
        elif known.outcomes.count("lost") >= known.max_attempts:
            expected = JobState.QUARANTINED
        else:
            expected = JobState.FAILED
        assert state == expected
        self.end(job_id, expected)

    @rule(attempt=attempts)
    def requeue(self, attempt: tuple[str, int, str]) -> None:
        job_id, number, _ = attempt
        owned = self.current(attempt)
        assert self.store.jobs.requeue(job_id, number, reason="drain", now=self.now) == owned
        if owned:
            known = self.jobs[job_id]
            known.outcomes[-1] = "cancelled" if known.cancel else "requeued"
            self.end(job_id, JobState.CANCELLED if known.cancel else JobState.QUEUED)

    @rule(attempt=consumes(attempts))
    def cancelled(self, attempt: tuple[str, int, str]) -> None:
        job_id, number, _ = attempt
        owned = self.current(attempt)
        assert self.store.jobs.cancel_wanted(job_id, number) == (self.jobs[job_id].cancel or not owned)
        if owned and self.jobs[job_id].cancel:
            assert self.store.jobs.cancelled(job_id, number, self.now)
            self.jobs[job_id].outcomes[-1] = "cancelled"
            self.end(job_id, JobState.CANCELLED)

    @rule(job_id=ids)
    def cancel(self, job_id: str) -> None:
        known = self.jobs[job_id]
        state = self.store.jobs.cancel(job_id, self.now)
        if known.state == JobState.QUEUED:
            self.end(job_id, JobState.CANCELLED)
        elif known.state == JobState.RUNNING:
            known.cancel = True
        assert state == known.state

    @rule(live=st.sets(st.sampled_from(WORKERS)))
    def recover(self, live: set[str]) -> None:
        running = {job.id: job.worker for job in self.store.jobs.list(states=[JobState.RUNNING])}
        gone = {job_id for job_id, worker in running.items() if worker not in live}
        recovered = {job.id: job.state for job in self.store.jobs.recover(live, self.now)}
        assert set(recovered) == gone
        for job_id in sorted(gone, key=lambda i: self.jobs[i].number):
            self.interrupted(job_id, "lost", True, recovered[job_id])

    @rule(seconds=st.floats(-86400, 86400))
    def clock(self, seconds: float) -> None:
        self.now = max(self.now, self.now + seconds)  # `not_before` is not what is tested here

    @invariant()
    def as_expected(self) -> None:
        """Every job is in the state that the model expects; one that has ended never changes."""
        for job in self.store.jobs.list():
            known = self.jobs[job.id]
            assert (job.state, job.attempt) == (known.state, known.attempt)
            assert (job.finished_at is not None) == job.state.final
            if job.state.final:
                assert job == (known.ended or job)
                known.ended = job
        assert sum(self.store.jobs.counts().values()) == len(self.jobs)
        assert self.store.jobs.sweep(self.now) == []

    @invariant()
    def priorities_are_inherited(self) -> None:
        """A queued job has the highest priority of itself and of those that wait for it, however far away."""
        for job in self.store.jobs.list(states=[JobState.QUEUED]):
            assert job.urgency == self.urgency(job.id)

    @invariant()
    def attempts_add_up(self) -> None:
        """Each attempt is noted once, and is open exactly while its job runs."""
        for job_id, known in self.jobs.items():
            attempts = self.store.jobs.attempts(job_id)
            assert [a.number for a in attempts] == list(range(1, known.attempt + 1))
            assert [a.outcome for a in attempts] == known.outcomes


TestJobLife = JobLife.TestCase
TestJobLife.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


class SharedJobLife(JobLife):
    """The same over PostgreSQL."""

    def __init__(self) -> None:
        assert self.url is not None
        postgres.empty(self.url)
        super().__init__()


class TestSharedJobLife(SharedJobLife.TestCase):  # type: ignore[name-defined,misc]  # made by Hypothesis
    """Fewer runs of it, since each statement goes to a server."""

    settings = settings(max_examples=3, stateful_step_count=30, deadline=None)

    @classmethod
    def setUpClass(cls) -> None:
        schema = postgres.schema()
        SharedJobLife.url = schema.__enter__()
        cls.addClassCleanup(schema.__exit__, None, None, None)
