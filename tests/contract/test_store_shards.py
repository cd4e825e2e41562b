"""What members of a job rely on: shards are claimed once, finished once, and open again when their holder has gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.errors import FencedOut
from nimble_jobs.job import Job, JobState, ShardCounts
from nimble_jobs.store import Left, Store, open_store
from nimble_jobs.store.home import resolve
from tests.store_samples import NOW, queued

SHARDS = [(first, first + 10) for first in range(0, 100, 10)]


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    """A new store."""
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


def begun(store: Store, device: str = "cuda:0", **run: Any) -> Job:
    """A job that worker `a` has claimed and opened."""
    queued(store, spec={"version": 1, "run": {"gpus": 3} | run}, name="n", kind="score", now=NOW)
    job = store.jobs.claim("a", device=device, now=NOW)
    assert job is not None
    store.shards.open(job, device, SHARDS, (), bad=0, now=NOW)
    return job


def joined(store: Store, worker: str, device: str = "cuda:1", now: float = NOW) -> Job:
    job = store.shards.join(worker, device, now)
    assert job is not None
    return job


def claim(store: Store, job: Job) -> list[int]:
    return [each.index for each in store.shards.claim(job, NOW, idle=True)]


def test_each_shard_is_claimed_once(store: Store) -> None:
    """Members take different shards, fewer and fewer, until none is open."""
    lead = begun(store)
    other = joined(store, "b")
    assert (other.worker, other.joined, other.id, other.attempt) == ("b", True, lead.id, 1)
    taken, sizes = list[int](), list[int]()
    for turn in range(20):
        some = claim(store, (lead, other)[turn % 2])
        sizes.append(len(some))
        taken += some
    assert sorted(taken) == list(range(10))
    assert sizes[:3] == [2, 1, 1]
    assert store.shards.counts(lead) == ShardCounts(running=10)


def test_the_first_who_finishes_has_written_it(store: Store) -> None:
    """A second copy changes nothing; counts of records are of each shard once."""
    lead = begun(store)
    other = joined(store, "b")
    first = claim(store, lead)[0]
    assert store.shards.second(other, first, NOW, idle=True) is not None
    assert store.shards.second(replace(other, worker="c"), first, NOW, idle=True) is None  # one copy is enough
    assert store.shards.finish(other, first, 2, NOW + 1) == 2
    assert store.shards.finish(lead, first, 2, NOW + 2) == 2
    found = store.jobs.get(lead.id)
    assert (found.records_done, found.records_bad, found.records_total) == (10, 2, 100)
    assert {m.worker: m.records_done for m in store.shards.members(lead.id)} == {"a": 0, "b": 10}
    assert store.shards.settled(lead, [first, first + 1]) == {first}


def test_time_is_counted_once(store: Store) -> None:
    """Also if a thread that finished a shard before another one says so after it; and if the clock is set back."""
    lead = begun(store)
    shards = claim(store, lead) + claim(store, lead)
    moments = [(10.0, (10.0, 10.0)), (9.0, (10.0, 10.0)), (12.0, (12.0, 12.0)), (-86400.0, (12.0, -86400.0))]
    for index, (now, (busy_s, moved_at)) in zip(shards, moments, strict=False):
        store.shards.finish(lead, index, 0, NOW + now)
        (member,) = store.shards.members(lead.id)
        assert (member.busy_s, member.moved_at) == (busy_s, NOW + moved_at)
    assert len(shards) >= len(moments)


def test_who_may_join(store: Store) -> None:
    """Devices of the same kind, up to run.gpus, each once, while shards are open and the job is not to end."""
    lead = begun(store)
    assert store.shards.join("c", "cpu", NOW) is None
    assert store.shards.join("a", "cuda:0", NOW) is None
    joined(store, "b")
    joined(store, "c", "cuda:2")
    assert store.shards.join("d", "cuda:3", NOW) is None
    assert store.shards.retire(replace(lead, worker="c"), NOW)
    store.jobs.cancel(lead.id, NOW)
    assert store.shards.join("d", "cuda:3", NOW) is None


def test_a_job_for_one_device_is_not_joined(store: Store) -> None:
    """Nor is one whose shards are not open yet."""
    queued(store, spec={"version": 1, "run": {"gpus": 2}}, name="n", kind="score", now=NOW)
    job = store.jobs.claim("a", device="cpu", now=NOW)
    assert job is not None
    assert job.gpus == 2
    assert store.shards.join("b", "cpu", NOW) is None
    store.shards.open(job, "cpu", SHARDS, range(10), bad=0, now=NOW)
    assert store.shards.join("b", "cpu", NOW) is None
    assert store.jobs.get(job.id).records_done == 100


def test_the_lead_is_passed_on(store: Store) -> None:
    """Whoever leaves gives its shards back; the last one ends the attempt."""
    lead = begun(store)
    other = joined(store, "b", now=NOW + 1)
    held = claim(store, lead)
    assert store.shards.leave(lead, now=NOW + 2, error="killed") is Left.NOTHING
    assert not store.shards.retire(other, NOW + 3)
    assert store.shards.counts(other) == ShardCounts(open=10)
    assert store.jobs.events(lead.id)[-1].message == (
        "worker a left the job: killed; 1 device still at work; cuda:1 (worker b) leads it now"
    )
    again = joined(store, "a", "cuda:0", now=NOW + 3)
    assert [each.index for each in store.shards.claim(again, NOW, idle=False)] == [2]
    assert store.shards.leave(other, now=NOW + 4) is Left.NOTHING
    assert store.shards.leave(again, now=NOW + 4) is Left.END
    assert held == [0, 1]


def test_a_shard_that_failed_is_claimed_alone(store: Store) -> None:
    """After the others, and only by a member that holds nothing."""
    lead = begun(store)
    joined(store, "b")
    held = claim(store, lead)
    store.shards.leave(lead, now=NOW, error="killed")
    again = joined(store, "a", "cuda:0")
    while claimed := store.shards.claim(again, NOW, idle=False):
        assert not {each.index for each in claimed} & set(held)
    (first,) = store.shards.claim(again, NOW, idle=True)
    assert (first.index, first.suspect) == (held[0], True)


@pytest.mark.parametrize(("tolerated", "result"), [(0, Left.FAILED), (1, Left.NOTHING)])
def test_a_shard_that_fails_again_and_again(store: Store, tolerated: int, result: Left) -> None:
    """After run.retry.max_attempts failures it is given up. Its records are bad records, if the job tolerates it."""
    lead = begun(store, max_failed_shards=tolerated)
    joined(store, "b")
    for index in range(1, 10):
        store.shards.finish(lead, index, 0, NOW)
    for left in (Left.NOTHING, Left.NOTHING, result):
        worker = joined(store, f"w{left}{store.shards.members(lead.id)[-1].worker}", "cuda:2")
        assert claim(store, worker) == [0]
        assert store.shards.leave(worker, now=NOW, error="odd") is left
    found = store.jobs.get(lead.id)
    assert (found.records_done, found.records_bad) == (100, 10)
    if tolerated:
        assert [(claim.index, error) for claim, error in store.shards.failed(lead)] == [(0, "odd")]
    else:
        why = "1 shard failed 3 times; the first is shard 0 (records 0 to 9): odd"
        assert (found.state, found.error) == (JobState.FAILED, why)


def test_a_shard_whose_members_die_with_their_workers(store: Store) -> None:
    """Whoever finds them dead ends the job, as the workers would have: its other members must not publish it."""
    lead = begun(store)
    for index in range(1, 10):
        store.shards.finish(lead, index, 0, NOW)
    for worker in ("x", "y", "z"):
        assert claim(store, joined(store, worker)) == [0]
        ended = store.shards.recover(lambda id_, dead=worker: id_ != dead, NOW)
    assert [(job.id, job.state) for job in ended] == [(lead.id, JobState.FAILED)]
    with pytest.raises(FencedOut):
        store.shards.claim(lead, NOW, idle=True)


def test_a_copy_outlives_its_first_holder(store: Store) -> None:
    """If the slow member leaves, whoever works on the copy holds the shard."""
    lead = begun(store)
    other = joined(store, "b")
    first = claim(store, lead)[0]
    store.shards.second(other, first, NOW, idle=True)
    store.shards.leave(lead, now=NOW)
    (only,) = store.shards.in_flight(other)
    assert (only.index, only.worker, only.copied) == (first, "b", False)


def test_members_of_dead_workers(store: Store) -> None:
    """They leave; the job goes on with the others, and is lost only with the last one."""
    lead = begun(store)
    joined(store, "b")
    store.shards.recover(lambda worker: worker != "a", NOW)
    assert store.jobs.recover(["b"], NOW) == []
    assert store.jobs.get(lead.id).worker == "b"
    store.shards.recover(lambda _worker: False, NOW)
    assert [job.id for job in store.jobs.recover([], NOW)] == [lead.id]


def test_a_stale_attempt_writes_nothing(store: Store) -> None:
    """Members of an attempt that is over change nothing, also if the same worker has the next attempt."""
    lead = begun(store)
    other = joined(store, "b")
    held = claim(store, other)
    store.jobs.requeue(lead.id, 1, reason="stopped", now=NOW)
    again = store.jobs.claim("b", device="cuda:0", now=NOW)
    assert again is not None
    store.shards.open(again, "cuda:0", SHARDS, {4}, bad=1, now=NOW)
    taken = claim(store, again)
    for work in (
        lambda: claim(store, other),
        lambda: store.shards.finish(other, held[0], 0, NOW),
        lambda: store.shards.release(other),
        lambda: store.shards.retire(other, NOW),
    ):
        with pytest.raises(FencedOut):
            work()
    assert store.shards.leave(other, now=NOW, error="killed") is Left.NOTHING
    assert store.shards.counts(again) == ShardCounts(open=9 - len(taken), running=len(taken), done=1)


def test_rows_of_shards_go_with_the_end_of_the_job(store: Store) -> None:
    """The table holds running jobs only; the devices stay for `show`."""
    lead = begun(store)
    store.jobs.finish(lead.id, 1, outputs={}, timings={}, schedule={}, now=NOW)
    assert store.jobs.get(lead.id).state is JobState.SUCCEEDED
    assert store.shards.counts(lead) == ShardCounts()
    assert [m.device for m in store.shards.members(lead.id)] == ["cuda:0"]
    assert store.shards.working() == {}


def test_progress_of_members(store: Store) -> None:
    """The leading member writes the job's phase, each its own; counts come from shards alone."""
    lead = begun(store)
    other = joined(store, "b")
    for job, phase in ((lead, "run"), (other, "build")):
        membership = store.membership(job)
        assert membership.progress(job.id, 1, done=55, total=100, bad=9, phase=phase)
    found = store.jobs.get(lead.id)
    assert (found.phase, found.records_done, found.records_bad) == ("run", 0, 0)
    assert [m.phase for m in store.shards.members(lead.id)] == ["run", "build"]
    assert not store.membership(lead).progress(lead.id, 2, done=0, total=None, bad=0)


def test_a_member_notices_that_it_was_overtaken(store: Store) -> None:
    """Once others have finished everything that it holds."""
    lead = begun(store)
    other = joined(store, "b")
    held = claim(store, lead)
    membership = store.membership(lead)
    membership.holds(held)
    for index in held:
        assert not membership.overtaken
        store.shards.finish(other, index, 0, NOW)
        membership.cancel_wanted(lead.id, 1)
    assert membership.overtaken
