"""What an operator relies on in the queue: retries by hand, holds, groups, ageing, waits for other ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from nimble_jobs.errors import UsageError
from nimble_jobs.job import After, Job, JobState, When
from nimble_jobs.store import NewJob, Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.ranks import AGING_S
from nimble_jobs.store.tables import JobRow
from tests.store_samples import NOW, submit


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


def claim(store: Store, now: float = NOW) -> Job | None:
    return store.jobs.claim("0-w", device="cpu", now=now)


def claimed(store: Store, now: float = NOW) -> Job:
    job = claim(store, now)
    assert job is not None
    return job


def end(store: Store, job: Job, state: JobState, now: float = NOW) -> None:
    if state is JobState.SUCCEEDED:
        assert store.jobs.finish(job.id, job.attempt, outputs={"p": 1}, timings={}, schedule={"hit": "miss"}, now=now)
    elif state is JobState.CANCELLED:
        store.jobs.cancel(job.id, now)
        store.jobs.cancelled(job.id, job.attempt, now)
    else:
        lost = state is JobState.QUARANTINED
        assert store.jobs.fail(job.id, job.attempt, error="e", retry=False, lost=lost, now=now) is state


def grouped(store: Store, name: str, limit: int, **values: object) -> Job:
    return submit(store, spec={"name": "n", "run": {"group": {"name": name, "limit": limit}}}, **values)


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED])
def test_a_retried_job_is_as_new(store: Store, state: JobState) -> None:
    """But for its id, its number of attempts and its history; its age begins anew, and all its attempts are left."""
    submit(store, "a", max_attempts=1, priority=2)
    first = claimed(store)
    store.jobs.progress(
        first.id, 1, done=5, total=9, bad=2, phase="run", schedule={"hit": "miss"}, timings={"x_s": 1.0}
    )
    end(store, first, state)
    (again,) = store.jobs.retry(["a"], now=NOW + 50).queued
    assert (again.state, again.attempt, again.attempts_before, again.queued_at) == (JobState.QUEUED, 1, 1, NOW + 50)
    assert (again.error, again.worker, again.started_at, again.finished_at) == (None, None, None, None)
    assert (again.records_done, again.records_total, again.records_bad, again.cancel_requested) == (0, None, 0, False)
    assert (again.schedule, again.timings, again.outputs, again.created_at) == ({}, {}, {}, NOW)
    second = claimed(store, NOW + 50)
    assert (second.id, second.attempt) == (first.id, 2)
    assert not store.jobs.finish(first.id, 1, outputs={}, timings={}, schedule={}, now=NOW), "the old attempt is fenced"
    end(store, second, JobState.FAILED)
    assert [attempt.number for attempt in store.jobs.attempts(first.id)] == [1, 2]
    assert [event.kind for event in store.jobs.events(first.id)].count("retried") == 1


def test_attempts_are_fresh(store: Store) -> None:
    """Those before count no more, neither as tries nor as deaths of a worker."""
    submit(store, "a", max_attempts=2, retry={"initial": 0})
    for _ in range(2):
        store.jobs.fail(
            "a" and claimed(store).id, store.jobs.get("a").attempt, error="e", retry=True, lost=True, now=NOW
        )
    assert store.jobs.get("a").state is JobState.QUARANTINED
    store.jobs.retry(["a"], now=NOW)
    job = claimed(store)
    assert store.jobs.fail(job.id, 3, error="e", retry=True, lost=True, now=NOW) is JobState.QUEUED
    job = claimed(store)
    assert store.jobs.fail(job.id, 4, error="e", retry=True, lost=True, now=NOW) is JobState.QUARANTINED


def test_dependents_wait_anew(store: Store) -> None:
    """Those that were cancelled with a job run after it, once both are queued again, and lend it their priority."""
    parent = submit(store, "parent")
    child = submit(store, "child", after=["parent"])
    grandchild = submit(store, "grandchild", after=["child"], priority=7)
    end(store, claimed(store), JobState.FAILED)
    with pytest.raises(UsageError, match=rf"waits for the success of job {parent.id} \(parent\), which ended failed"):
        store.jobs.retry([child.id], now=NOW)
    assert [job.id for job in store.jobs.retry([parent.id], now=NOW).left] == [child.id, grandchild.id]
    end(store, claimed(store), JobState.FAILED)
    again = store.jobs.retry([parent.id], with_dependents=True, now=NOW)
    assert [(job.id, job.urgency) for job in again.queued] == [(parent.id, 7), (child.id, 7), (grandchild.id, 7)]
    for expected in (parent, child, grandchild):
        job = claimed(store)
        assert job.id == expected.id
        assert claim(store) is None
        end(store, job, JobState.SUCCEEDED)


def test_a_dependent_of_two_that_failed(store: Store) -> None:
    """Stays cancelled with the other one, and is named; with both it comes along."""
    a, b = submit(store, "a"), submit(store, "b")
    child = submit(store, "child", after=["a", "b"])
    for _ in range(2):
        end(store, claimed(store), JobState.FAILED)
    again = store.jobs.retry([a.id], with_dependents=True, now=NOW)
    assert ([job.id for job in again.queued], [job.id for job in again.left]) == ([a.id], [child.id])
    again = store.jobs.retry([b.id], with_dependents=True, now=NOW)
    assert [job.id for job in again.queued] == [b.id], "a job is cancelled because of the first that ended badly"


def test_a_damaged_job_is_not_retried(store: Store) -> None:
    """What was submitted is not there any more."""
    submit(store, "a")
    end(store, claimed(store), JobState.FAILED)
    store.jobs._db.write(lambda session: session.execute(update(JobRow).values(spec='{"name":"b"}')))
    with pytest.raises(UsageError, match=r"\(a\): its stored spec is damaged"):
        store.jobs.retry(["a"], now=NOW)


@pytest.mark.parametrize("end_state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED])
@pytest.mark.parametrize("when", list(When))
def test_waits_for_other_ends(store: Store, end_state: JobState, when: When) -> None:
    """Each end frees those that wait for it, and cancels those whose wait it makes impossible; so it does later."""
    submit(store, "parent", max_attempts=1)
    child = submit(store, "child", after=[After(job="parent", when=when)])
    end(store, claimed(store), end_state)
    late = submit(store, "late", after=[After(job="parent", when=when)])
    met = {
        When.SUCCESS: end_state is JobState.SUCCEEDED,
        When.FAILURE: end_state in (JobState.FAILED, JobState.QUARANTINED),
        When.DONE: True,
    }[when]
    for job in (child, late):
        found = store.jobs.get(job.id)
        assert found.state is (JobState.QUEUED if met else JobState.CANCELLED)
        assert (found.skipped_by is None) == met
        assert found.after_when == {found.after[0]: when}
    if not met:
        wanted = "success" if when is When.SUCCESS else "failure"
        assert (found.error or "").endswith(f"ended {end_state}; this job waits for its {wanted}")
        assert [event.kind for event in store.jobs.events(child.id)] == ["submitted", "skipped"]
    assert (claim(store) is not None) == met


def test_one_who_waits_for_the_end_of_a_skipped_job(store: Store) -> None:
    """A skipped job has ended: who waits for its end runs, who waits for its failure never can."""
    submit(store, "a")
    submit(store, "b", after=["a"])
    submit(store, "report", after=[After(job="b", when=When.DONE)])
    rescue = submit(store, "rescue", after=[After(job="b", when=When.FAILURE)])
    end(store, claimed(store), JobState.FAILED)
    assert claimed(store).name == "report"
    assert store.jobs.get(rescue.id).state is JobState.CANCELLED


def test_a_wait_with_two_ends(store: Store) -> None:
    """Nobody waits for two ends of one job."""
    parent = submit(store, "parent")
    with pytest.raises(UsageError, match=r"run.after: job .* \(parent\) is given with success and failure"):
        submit(store, after=[parent.id, After(job="parent", when=When.FAILURE)])
    assert len(store.jobs.list()) == 1


def test_an_array_is_awaited_whole(store: Store) -> None:
    """A job after an array waits for each of its jobs."""
    array, jobs = store.jobs.queue_array([NewJob(spec={"name": n}, name=n, kind="score") for n in "ab"], NOW)
    waiting = submit(store, "c", after=[array])
    assert waiting.after == tuple(job.id for job in jobs)
    assert [(job.array, job.array_index) for job in jobs] == [(array, 0), (array, 1)]


def test_a_large_array(store: Store) -> None:
    """Thousands of jobs of one moment have ids of their own, in their order."""
    new = [NewJob(spec={}, name="n", kind="score")] * 3000
    ids = [job.id for job in store.jobs.queue_array(new, NOW)[1]]
    assert ids == sorted(set(ids))


def test_a_group_has_room_for_so_many(store: Store) -> None:
    """The next of a group waits until one has ended; others go on meanwhile; retries count too."""
    for _ in range(3):
        grouped(store, "g", 2)
    other = submit(store, "other")
    first, _second = claimed(store), claimed(store)
    assert claimed(store).id == other.id
    assert claim(store) is None
    end(store, first, JobState.FAILED)
    third = claimed(store)
    assert claim(store) is None
    store.jobs.retry([first.id], now=NOW)
    assert claim(store) is None
    store.jobs.requeue(third.id, 1, reason="r", now=NOW)
    assert claimed(store).id in (first.id, third.id)
    assert claim(store) is None


def test_the_last_limit_of_a_group_holds(store: Store) -> None:
    """For all of its jobs, also where more run already; the change is an event of the job that made it."""
    jobs = [grouped(store, "g", limit) for limit in (3, 3, 3, 1)]
    assert "the limit of g was 3 and is 1 now" in store.jobs.messages("group", [jobs[-1].id])[0]
    assert store.jobs.messages("group", [job.id for job in jobs[:-1]]) == []
    claimed(store)
    assert claim(store) is None
    grouped(store, "g", 2)
    claimed(store)
    assert claim(store) is None
    assert store.jobs.group_limits(["g"]) == {"g": (2, 2)}


def test_groups_are_forgotten_and_come_back(store: Store) -> None:
    """A group without open jobs costs claims nothing; a job that is tried again has its limit again."""
    job = grouped(store, "g", 1)
    store.jobs.sweep(NOW)
    assert store.jobs.group_limits(["g"]) == {"g": (0, 1)}
    end(store, claimed(store), JobState.FAILED)
    store.jobs.sweep(NOW)
    assert store.jobs.group_limits(["g"]) == {}
    store.jobs.retry([job.id], now=NOW)
    assert store.jobs.group_limits(["g"]) == {"g": (0, 1)}
    assert claimed(store).id == job.id


def test_run_waits_for_no_group(store: Store) -> None:
    """A foreground job is not begun in a full group, and counts in it while it runs."""
    grouped(store, "g", 1)
    mine = grouped(store, "g", 1, foreground=True)
    claimed(store)
    assert store.jobs.claim_foreground(mine.id, "1-r", NOW) is None
    end(store, store.jobs.running()[0], JobState.SUCCEEDED)
    assert store.jobs.claim_foreground(mine.id, "1-r", NOW) is not None
    grouped(store, "g", 1)
    assert claim(store) is None


def test_age_makes_up_for_priority(store: Store) -> None:
    """A job is overtaken by one of higher priority only if that comes soon enough."""
    submit(store, "old")
    submit(store, "soon", priority=2, now=NOW + 2 * AGING_S - 1)
    submit(store, "late", priority=2, now=NOW + 2 * AGING_S + 1)
    assert [claimed(store, NOW + 1e6).name for _ in range(3)] == ["soon", "old", "late"]


def test_another_pace_of_ageing(store: Store) -> None:
    """It holds for jobs that wait already, and for later ones."""
    submit(store, "old")
    submit(store, "later", now=NOW + 50)
    submit(store, "high", priority=1, now=NOW + 100)
    assert store.jobs.set_aging(60.0, NOW)
    assert not store.jobs.set_aging(60.0, NOW)
    submit(store, "higher", priority=2, now=NOW + 130)
    assert [claimed(store, NOW + 1e6).name for _ in range(4)] == ["old", "higher", "high", "later"]
    (event,) = [event for event in store.jobs.events() if event.kind == "ranked"]
    assert event.message == "queue.aging changed from 1h to 1m; the queue was re-ranked"


def test_a_clock_that_ran_ahead(store: Store) -> None:
    """Jobs that were queued under it keep their order, and age from now on like all others."""
    submit(store, "a", now=NOW + 1e6)
    submit(store, "b", now=NOW)
    store.jobs.sweep(NOW)
    submit(store, "c", now=NOW + 10)
    assert store.jobs.get("a").queued_at == store.jobs.get("b").queued_at == NOW
    assert [claimed(store, NOW + 20).name for _ in range(3)] == ["a", "b", "c"]


def test_priority_is_inherited_and_given_back(store: Store) -> None:
    """By all that are waited for, however far; later, too; and only as long as somebody waits."""
    root = submit(store, "root")
    middle = submit(store, "middle", after=["root"], priority=1)
    submit(store, "bystander", priority=3)
    late = submit(store, "late", after=["middle"], priority=5)
    later = submit(store, "later", after=["middle"], priority=4)

    def urgencies() -> tuple[int, int]:
        return store.jobs.get(root.id).urgency, store.jobs.get(middle.id).urgency

    assert urgencies() == (5, 5)
    store.jobs.cancel(late.id, NOW)
    assert urgencies() == (4, 4)
    store.jobs.cancel(later.id, NOW)
    assert urgencies() == (1, 1)
    assert claimed(store).name == "bystander"
    assert claimed(store).id == root.id


def test_a_job_is_held(store: Store) -> None:
    """Through whatever it waits for; it is cancelled as others are."""
    submit(store, "parent")
    child = submit(store, "child", after=["parent"])
    store.jobs.hold([child.id], NOW)
    end(store, claimed(store), JobState.SUCCEEDED)
    assert claim(store) is None
    store.jobs.release([child.id], NOW)
    assert claimed(store).id == child.id
    waiting = submit(store, "waiting")
    store.jobs.hold(["waiting"], NOW)
    assert store.jobs.cancel("waiting", NOW) is JobState.CANCELLED
    assert not store.jobs.get(waiting.id).held
    assert not store.jobs.retry(["waiting"], now=NOW).queued[0].held
