"""What everybody relies on in the job table, on every database that is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from nimble_jobs.errors import NotFound, UsageError
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.retries import delay_s
from tests.store_samples import NOW, queued, submit


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    """A new store."""
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


def claim(store: Store, device: str = "cpu", now: float = NOW, worker: str = "0-w") -> Job | None:
    return store.jobs.claim(worker, device=device, now=now)


def claimed(store: Store, now: float = NOW) -> Job:
    job = claim(store, now=now)
    assert job is not None
    return job


def finish(store: Store, job: Job) -> bool:
    return store.jobs.finish(job.id, job.attempt, outputs={"path": "o"}, timings={"run_s": 1.5}, schedule={}, now=NOW)


def fail(store: Store, job: Job, *, retry: bool = False, lost: bool = False, error: str = "no") -> JobState | None:
    return store.jobs.fail(job.id, job.attempt, error=error, retry=retry, lost=lost, now=NOW)


def kinds(store: Store, job: Job) -> list[str]:
    return [event.kind for event in store.jobs.events(job.id)]


def outcomes(store: Store, job: Job) -> list[str | None]:
    return [attempt.outcome for attempt in store.jobs.attempts(job.id)]


def test_submitted(store: Store) -> None:
    """A submitted job is queued with everything that was given."""
    job = queued(
        store,
        spec={"name": "ä", "run": {"timeout": 1.5}},
        name="ä",
        kind="finetune",
        priority=3,
        key="k",
        not_before=NOW + 1,
        max_attempts=7,
        timeout_s=1.5,
        device="cuda:1",
        allow_python=["/models"],
        now=NOW,
    )
    assert store.jobs.get(job.id) == job
    assert (job.state, job.attempt, job.worker, job.started_at) == (JobState.QUEUED, 0, None, None)
    assert (job.name, job.kind, job.priority, job.key, job.not_before) == ("ä", "finetune", 3, "k", NOW + 1)
    assert (job.max_attempts, job.timeout_s, job.device, job.created_at) == (7, 1.5, "cuda:1", NOW)
    assert job.spec == {"name": "ä", "run": {"timeout": 1.5}}
    assert job.allow_python == ("/models",)
    assert kinds(store, job) == ["submitted"]


def test_life(store: Store) -> None:
    """Claim, progress and finish leave the job, its attempt and its events as they were told."""
    submit(store)
    job = claimed(store)
    assert (job.state, job.attempt, job.worker, job.started_at) == (JobState.RUNNING, 1, "0-w", NOW)
    assert store.jobs.progress(
        job.id, 1, done=3, total=9, bad=1, phase="run", schedule={"key": "k"}, timings={"build_s": 2.0}
    )
    running = store.jobs.get(job.id)
    assert (running.records_done, running.records_total, running.records_bad) == (3, 9, 1)
    assert (running.phase, running.schedule, running.timings) == ("run", {"key": "k"}, {"build_s": 2.0})
    assert store.jobs.progress(job.id, 1, done=9, total=9, bad=1)
    assert store.jobs.get(job.id).phase == "run", "what is not given stays"
    assert finish(store, job)
    done = store.jobs.get(job.id)
    assert (done.state, done.finished_at, done.phase, done.error) == (JobState.SUCCEEDED, NOW, None, None)
    assert (done.outputs, done.timings, done.records_done) == ({"path": "o"}, {"run_s": 1.5}, 9)
    assert outcomes(store, job) == ["succeeded"]
    assert kinds(store, job) == ["submitted", "claimed", "succeeded"]
    assert store.jobs.records_done() == 9
    assert store.jobs.counts()[JobState.SUCCEEDED] == 1


def test_order(store: Store) -> None:
    """The highest priority goes first, and among equals the one that was submitted first, whatever the clock said."""
    names = ["low", "first", "second", "high"]
    for name, priority, now in zip(names, [-1, 0, 0, 5], [NOW, NOW, NOW - 86400, NOW], strict=True):
        submit(store, name, priority=priority, now=now)
    assert [claimed(store).name for _ in names] == ["high", "first", "second", "low"]
    assert claim(store) is None


def test_not_before(store: Store) -> None:
    """A delayed job is not claimed before its time."""
    submit(store, not_before=NOW + 10)
    assert claim(store, now=NOW + 9.9) is None
    assert claim(store, now=NOW + 10) is not None


@pytest.mark.parametrize(
    ("wanted", "offered", "fits"),
    [
        ("auto", "cpu", True),
        ("auto", "cuda:1", True),
        ("cpu", "cpu", True),
        ("cpu", "cuda:0", False),
        ("cuda", "cuda:3", True),
        ("cuda:3", "cuda:3", True),
        ("cuda:3", "cuda:0", False),
        ("cuda", "cpu", False),
    ],
)
def test_device(store: Store, wanted: str, offered: str, fits: bool) -> None:
    """A worker gets the jobs that ask for its device, for its kind, or for none."""
    submit(store, device=wanted)
    assert (claim(store, device=offered) is not None) == fits


def test_world_size(store: Store) -> None:
    """A training on several devices goes only to a machine that has them; it does not hold up others."""
    training = submit(store, "training", kind="finetune", spec={"kind": "finetune", "run": {"gpus": 3}}, device="cuda")
    scoring = submit(store, "scoring", spec={"kind": "score", "run": {"gpus": 3}})

    def taken(most: int) -> Job | None:
        return store.jobs.claim("0-w", device="cuda:0", most_ranks=most, now=NOW)

    assert training.world_size == 3
    assert scoring.world_size == 1
    assert [job and job.id for job in (taken(2), taken(2), taken(3))] == [scoring.id, None, training.id]


@pytest.mark.parametrize(
    ("wanted", "offered", "fits"), [("auto", "cpu", False), ("cpu", "cpu", True), ("auto", "cuda:0", True)]
)
def test_several_gpus_are_no_cores(store: Store, wanted: str, offered: str, fits: bool) -> None:
    """A training on several GPUs goes to a worker on a CPU only if it asks for that."""
    submit(store, kind="finetune", spec={"kind": "finetune", "run": {"gpus": 2}}, device=wanted)
    assert (store.jobs.claim("0-w", device=offered, most_ranks=8, now=NOW) is not None) == fits
    submit(store, "one", kind="finetune", spec={"kind": "finetune", "run": {"gpus": 1}})
    assert store.jobs.claim("0-w", device=offered, most_ranks=8, now=NOW) is not None


def test_foreground(store: Store) -> None:
    """A job of a `run` command is claimed by that command alone, once."""
    job = submit(store, foreground=True)
    assert claim(store) is None
    mine = store.jobs.claim_foreground(job.id, "1-r", NOW)
    assert mine is not None
    assert (mine.attempt, mine.worker) == (1, "1-r")
    assert store.jobs.claim_foreground(job.id, "1-r", NOW) is None
    assert store.jobs.claim_foreground(submit(store).id, "1-r", NOW) is None, "not a foreground job"


def test_key(store: Store) -> None:
    """The same key with the same spec is the job that exists, in whatever state; with another spec it is an error."""
    job = submit(store, key="k")
    assert submit(store, key="k") == job
    finish(store, claimed(store))
    assert submit(store, key="k").state == JobState.SUCCEEDED
    with pytest.raises(UsageError, match=f"belongs to job {job.id}"):
        submit(store, "b", key="k")
    assert len(store.jobs.list()) == 1
    submit(store, "b", key=None)
    submit(store, "b", key=None)
    assert len(store.jobs.list()) == 3


def test_after(store: Store) -> None:
    """A job waits until all of its parents, by id or newest of a name, have succeeded."""
    submit(store, "parent")
    parents = [submit(store, "parent"), submit(store, "other")]
    child = submit(store, "child", after=["parent", parents[1].id], priority=9)
    assert child.after == tuple(parent.id for parent in parents)
    running = [claimed(store) for _ in range(3)]
    assert "child" not in [job.name for job in running]
    for job in sorted(running, key=lambda job: job.id in child.after):
        assert claim(store) is None
        assert finish(store, job)
    assert claimed(store).id == child.id


def test_after_succeeded(store: Store) -> None:
    """A parent that has succeeded already holds nobody back."""
    submit(store, "parent")
    finish(store, claimed(store))
    submit(store, "child", after=["parent"])
    assert claimed(store).name == "child"


def test_after_unknown(store: Store) -> None:
    """An unknown parent is named, and nothing is queued."""
    with pytest.raises(NotFound, match=r"run\.after: job nobody"):
        submit(store, after=["nobody"])
    assert store.jobs.list() == []


def test_dependents_are_skipped(store: Store) -> None:
    """When a job fails, those that wait for its success are cancelled with the reason, and those that wait for these;
    others stay.
    """
    parent = submit(store, "parent")
    child = submit(store, "child", after=["parent"])
    grandchild = submit(store, "grandchild", after=["child"])
    bystander = submit(store, "bystander")
    assert fail(store, claimed(store)) == JobState.FAILED
    child, grandchild = store.jobs.get(child.id), store.jobs.get(grandchild.id)
    assert (child.state, child.finished_at, child.skipped_by) == (JobState.CANCELLED, NOW, parent.id)
    assert child.error == f"run.after: job {parent.id} (parent) ended failed; this job waits for its success"
    assert grandchild.error == f"run.after: job {child.id} (child) ended cancelled; this job waits for its success"
    assert kinds(store, child) == ["submitted", "skipped"]
    assert store.jobs.get(bystander.id).state == JobState.QUEUED
    assert store.jobs.sweep(NOW) == []


def test_dependents_of_the_cancelled(store: Store) -> None:
    """A job that waits for the success of a cancelled one is cancelled too; submitted later, at once."""
    parent = submit(store, "parent")
    child = submit(store, "child", after=["parent"])
    assert store.jobs.cancel(parent.id, NOW) == JobState.CANCELLED
    assert store.jobs.get(child.id).state == JobState.CANCELLED
    assert submit(store, "late", after=["parent"]).state == JobState.CANCELLED
    assert claim(store) is None


def test_stale_attempt(store: Store) -> None:
    """An attempt that was given up writes nothing any more: not its progress, not its end, not an event."""
    submit(store, retry={"initial": 0})
    stale = claimed(store)
    assert fail(store, stale, lost=True) == JobState.QUEUED
    fresh = claimed(store)
    assert (fresh.id, fresh.attempt) == (stale.id, 2)
    before = store.jobs.get(fresh.id), store.jobs.attempts(fresh.id), store.jobs.events(fresh.id)
    assert not store.jobs.progress(stale.id, 1, done=5, total=5, bad=5, phase="run")
    assert not finish(store, stale)
    assert fail(store, stale) is None
    assert not store.jobs.requeue(stale.id, 1, reason="r", now=NOW)
    assert not store.jobs.cancelled(stale.id, 1, NOW)
    assert not store.jobs.event("shard", "done", job_id=stale.id, attempt=1, now=NOW)
    assert store.jobs.cancel_wanted(stale.id, 1), "it should stop"
    assert (store.jobs.get(fresh.id), store.jobs.attempts(fresh.id), store.jobs.events(fresh.id)) == before
    assert finish(store, fresh)


def test_final_stays(store: Store) -> None:
    """Nothing changes a job that has ended."""
    submit(store)
    job = claimed(store)
    assert finish(store, job)
    before = store.jobs.get(job.id)
    assert not finish(store, job)
    assert fail(store, job, retry=True) is None
    assert not store.jobs.requeue(job.id, 1, reason="r", now=NOW)
    assert not store.jobs.progress(job.id, 1, done=5, total=5, bad=5)
    assert store.jobs.cancel(job.id, NOW) == JobState.SUCCEEDED
    assert store.jobs.recover((), NOW) == []
    assert store.jobs.get(job.id) == before


@pytest.mark.parametrize(
    ("retry", "longest"),
    [
        ({"backoff": "exponential", "initial": 5.0, "max": 12.0, "max_attempts": 4}, [5.0, 10.0, 12.0]),
        ({"backoff": "constant", "initial": 3.0, "max": 12.0, "max_attempts": 3}, [3.0, 3.0]),
        (None, [5.0, 10.0]),
    ],
)
def test_retry(store: Store, retry: dict[str, object] | None, longest: list[float]) -> None:
    """A failure that may pass is tried again after a wait of at most the spec's, then fails with the last reason."""
    submitted = submit(store, retry=retry)
    now = NOW
    for limit in longest:
        job = claimed(store, now)
        assert store.jobs.fail(job.id, job.attempt, error="oom", retry=True, lost=False, now=now) == JobState.QUEUED
        again = store.jobs.get(job.id)
        assert (again.worker, again.error) == (None, "oom")
        assert now < again.not_before <= now + limit
        assert claim(store, now=again.not_before - 0.001) is None
        now = again.not_before
    assert fail(store, claimed(store, now), retry=True, error="oom") == JobState.FAILED
    count = len(longest) + 1
    assert store.jobs.get(submitted.id).error == f"oom (attempt {count} of {count})"
    assert outcomes(store, submitted) == ["failed"] * count


def test_retries_spread() -> None:
    """Jobs that failed together come back at times all over the longest wait, each always at the same one."""
    spec = {"run": {"retry": {"initial": 8.0}}}
    waits = [delay_s(f"job-{n}", spec, 1) for n in range(1000)]
    assert waits == [delay_s(f"job-{n}", spec, 1) for n in range(1000)]
    for quarter in range(4):
        assert 200 < sum(2 * quarter <= wait < 2 * quarter + 2 for wait in waits) < 300


def test_no_retry(store: Store) -> None:
    """A failure that cannot pass is final at once."""
    submit(store)
    job = claimed(store)
    assert fail(store, job, error="bad weights") == JobState.FAILED
    assert store.jobs.get(job.id).error == "bad weights"


def test_quarantined(store: Store) -> None:
    """A job that kills its worker each time is quarantined, with the number of deaths."""
    submit(store, max_attempts=2, retry={"initial": 0})
    assert fail(store, claimed(store), lost=True, error="signal 9") == JobState.QUEUED
    job = claimed(store)
    assert fail(store, job, lost=True, error="signal 9") == JobState.QUARANTINED
    ended = store.jobs.get(job.id)
    assert ended.error == "the worker died 2 times while it ran this job; the last error: signal 9"
    assert outcomes(store, job) == ["lost", "lost"]
    assert kinds(store, job)[-1] == "quarantined"


def test_requeue(store: Store) -> None:
    """A drained job goes on later, as often as it must: that is no failure, and the attempt number still grows."""
    submit(store, max_attempts=1)
    for number in range(1, 5):
        job = claimed(store)
        assert job.attempt == number
        assert store.jobs.requeue(job.id, number, reason="the worker stops", now=NOW)
        assert store.jobs.get(job.id).state == JobState.QUEUED
    last = claimed(store)
    assert finish(store, last)
    assert outcomes(store, last) == ["requeued"] * 4 + ["succeeded"]


def test_cancel_running(store: Store) -> None:
    """A running job is asked to stop, and is cancelled when its attempt says so; it may also finish first."""
    submit(store)
    job = claimed(store)
    assert not store.jobs.cancel_wanted(job.id, 1)
    assert store.jobs.cancel(job.id, NOW) == JobState.RUNNING
    assert store.jobs.cancel(job.id, NOW) == JobState.RUNNING
    assert store.jobs.cancel_wanted(job.id, 1)
    assert store.jobs.cancelled(job.id, 1, NOW)
    assert store.jobs.get(job.id).state == JobState.CANCELLED
    assert kinds(store, job) == ["submitted", "claimed", "cancel", "cancelled"]


@pytest.mark.parametrize("way", ["lost", "retry", "requeue"])
def test_cancel_then_interrupted(store: Store, way: str) -> None:
    """A job that was to be cancelled does not come back when its attempt is interrupted."""
    submit(store)
    job = claimed(store)
    store.jobs.cancel(job.id, NOW)
    if way == "requeue":
        assert store.jobs.requeue(job.id, 1, reason="r", now=NOW)
    else:
        assert fail(store, job, lost=way == "lost", retry=way == "retry") == JobState.CANCELLED
    assert store.jobs.get(job.id).state == JobState.CANCELLED


def test_recover(store: Store) -> None:
    """The jobs of workers that are gone are queued again; those of the living go on."""
    submit(store, "dead")
    submit(store, "alive")
    dead, alive = claim(store, worker="1-dead"), claim(store, worker="2-alive")
    assert dead is not None
    assert alive is not None
    recovered = store.jobs.recover({"2-alive"}, NOW)
    assert [(job.id, job.state) for job in recovered] == [(dead.id, JobState.QUEUED)]
    assert store.jobs.get(dead.id).error == "worker 1-dead died"
    assert outcomes(store, dead) == ["lost"]
    assert store.jobs.get(alive.id).state == JobState.RUNNING


def test_recover_foreground(store: Store) -> None:
    """The job of a `run` process that died fails: running, or before it was even claimed."""
    running, queued, fresh = (submit(store, foreground=True, worker=worker) for worker in ("1-r", "2-r", None))
    assert store.jobs.claim_foreground(running.id, "1-r", NOW) is not None
    recovered = store.jobs.recover((), NOW + 1)
    assert {job.id for job in recovered} == {running.id, queued.id}
    assert {(job.state, job.error) for job in recovered} == {(JobState.FAILED, "the run process died")}
    assert store.jobs.get(fresh.id).state == JobState.QUEUED, "its process may not have come to claim it yet"
    assert [job.id for job in store.jobs.recover((), NOW + 3600)] == [fresh.id]


def test_recover_asks_late(store: Store) -> None:
    """Who is alive is asked after the running jobs were read: a worker that starts meanwhile loses nothing."""
    submit(store)
    started: list[str] = []

    def alive(worker: str) -> bool:
        started.append(worker)
        return True

    claimed(store)
    assert store.jobs.recover(alive, NOW) == []
    assert started == ["0-w"]


def test_damaged_spec(store: Store) -> None:
    """A job whose stored spec was damaged never runs; the next one does."""
    damaged = submit(store, "damaged")
    submit(store, "sound")
    change = text("UPDATE jobs SET spec = replace(spec, 'damaged', 'Damaged') WHERE id = :job")
    store._database.write(lambda session: session.execute(change, {"job": damaged.id}))
    assert claimed(store).name == "sound"
    ended = store.jobs.get(damaged.id)
    assert ended.state == JobState.FAILED
    assert ended.error is not None
    assert "damaged" in ended.error


def test_get(store: Store) -> None:
    """A job is found by id, by prefix, and by name, where the newest wins; a prefix of several is an error."""
    jobs = [submit(store, "same", now=NOW + i) for i in range(3)]
    assert store.jobs.get("same") == jobs[2]
    assert store.jobs.get(jobs[1].id) == jobs[1]
    assert store.jobs.get(jobs[1].id[:9].upper()) == jobs[1], "milliseconds differ within nine characters"
    with pytest.raises(UsageError, match=jobs[0].id) as caught:
        store.jobs.get(jobs[0].id[:4])
    assert all(job.id in str(caught.value) for job in jobs)
    for unknown in ("nobody", jobs[0].id[:3], "", "zzzzzzzzzzzz", "%"):
        with pytest.raises(NotFound):
            store.jobs.get(unknown)


def test_list(store: Store) -> None:
    """Listings filter by state and name, sort, and stop at the limit."""
    for name, priority in [("b", 1), ("a", 2), ("b", 3)]:
        submit(store, name, priority=priority)
    claimed(store)
    assert [job.priority for job in store.jobs.list()] == [3, 2, 1]
    assert [job.priority for job in store.jobs.list(states=[JobState.QUEUED])] == [2, 1]
    assert [job.priority for job in store.jobs.list(name="b", limit=1)] == [3]
    assert [job.name for job in store.jobs.list(sort="name", descending=False)] == ["a", "b", "b"]
    assert store.jobs.list(states=[]) == []


def test_events(store: Store) -> None:
    """Events come in order, after a number, with data that JSON has no word for made plain."""
    job = submit(store)
    last = store.jobs.events(job.id)[-1].seq
    assert store.jobs.event("note", "hello", job_id=job.id, data={"path": Path("/x"), "loss": float("nan")}, now=NOW)
    assert store.jobs.event("note", "of nobody", now=NOW + 1)
    (event,) = store.jobs.events(job.id, since=last)
    assert (event.kind, event.message, event.data, event.at) == ("note", "hello", {"path": "/x", "loss": None}, NOW)
    assert [e.message for e in store.jobs.events(since=last)] == ["hello", "of nobody"]


def test_ids_collide(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of one millisecond that draw the same id both get in."""
    ids = iter(["0000000000aa", "0000000000aa", "0000000000ab"])
    monkeypatch.setattr("nimble_jobs.store.new_job.new_id", lambda _now: next(ids))
    assert [submit(store).id, submit(store).id] == ["0000000000aa", "0000000000ab"]


def test_a_clock_that_goes_back(store: Store) -> None:
    """A retry planned by a clock a day ahead is due after its delay, not a day later; a delayed job waits on."""
    retry = {"run": {"retry": {"initial": 5, "backoff": "constant"}}}
    job = queued(store, spec=retry, name="n", kind="score", now=NOW)
    delayed = queued(store, spec=retry, name="d", kind="score", not_before=NOW + 86400, now=NOW)
    assert store.jobs.claim("w", device="cpu", now=NOW + 86400 - 1)
    store.jobs.fail(job.id, 1, error="e", retry=True, lost=False, now=NOW + 86400 - 1)
    store.jobs.sweep(NOW)
    assert store.jobs.get(job.id).not_before == NOW + 5
    assert store.jobs.get(delayed.id).not_before == NOW + 86400
