"""A member's part of a job, over a real store: what it publishes, and when it counts as overtaken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nimble_jobs import spec as specs
from nimble_jobs.data import BadRecord, Staging, open_reader
from nimble_jobs.errors import DataError, ShardsMissing, StoreTrouble
from nimble_jobs.job import Job
from nimble_jobs.patience import Patience
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads.context import JobContext, Stop, Stopped
from nimble_jobs.workloads.cuts import Span
from nimble_jobs.workloads.members import Part
from tests.store_samples import NOW, queued

SHARDS = [(0, 10), (10, 20)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def lead(store: Store, tmp_path: Path) -> Part:
    """The part of the member that has claimed the job and opened its shards."""
    np.save(tmp_path / "x.npy", np.zeros((20, 2), np.float32))
    spec = {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": "torchvision:resnet18"},
        "input": {"source": str(tmp_path / "x.npy"), "format": "npy", "batch_size": 5},
        "output": {"path": str(tmp_path / "out"), "format": "npy", "fields": ["logits"], "shard_size": 10},
        "run": {"gpus": 2, "error_threshold": 0.05},
    }
    queued(store, spec=specs.dump(specs.restore(spec)), name="n", kind="score", now=NOW)
    job = store.jobs.claim("a", device="cpu", now=NOW)
    assert job is not None
    part = part_of(store, job)
    part.open(SHARDS, staging(part))
    return part


def part_of(store: Store, job: Job, stop: Callable[[], Stop] = lambda: Stop.GO, basis: str = "basis") -> Part:
    context = JobContext(
        job=job,
        spec=specs.restore(job.spec),
        device="cpu",
        store=store,
        residents=None,  # type: ignore[arg-type]  # nothing is loaded
        stop=stop,
        report=lambda **_values: None,
        event=lambda *_event: None,
        membership=store.membership(job),
    )
    return Part(context, 20, basis=basis)


def staging(part: Part) -> Staging:
    """The place from which the member publishes."""
    job, context = part._job, part._context
    return Staging(context.spec.output, job.id, job.attempt, ledger=context.store.publications, basis="basis")


def bad(index: int) -> BadRecord:
    return BadRecord(index=index, id=str(index), reason="odd")


def columns(records: int) -> dict[str, Any]:
    return {"logits": np.zeros((records, 2), np.float32)}


def test_too_many_bad_records_of_a_member_that_died(store: Store, lead: Part) -> None:
    """A member finishes the shard with one bad record too many, and dies before it can end the job. The other member
    publishes nothing.
    """
    joined = store.shards.join("b", "cpu", NOW)
    assert joined is not None
    other = part_of(store, joined)
    lead.staging.write_shard(0, columns(9), [bad(3)])
    with pytest.raises(DataError, match="2 of 20 records are bad"):
        other.staging.write_shard(1, columns(9), [bad(13)])
    with pytest.raises(DataError, match="2 of 20 records are bad"):
        lead.complete(staging(lead), None, SHARDS)  # type: ignore[arg-type]  # no shard has failed


def test_shards_that_cannot_be_taken_over_are_scored_again(store: Store, lead: Part) -> None:
    """As of a machine with another decoder, or whose disk is another one. The next attempt may succeed."""
    joined = store.shards.join("b", "cpu", NOW)
    assert joined is not None
    other = part_of(store, joined, basis="another")
    lead.staging.write_shard(0, columns(10))
    other.staging.write_shard(1, columns(10))
    spec = lead._context.spec.input
    with open_reader(spec) as reader, pytest.raises(ShardsMissing, match="1 shard of other devices") as missing:
        lead.complete(staging(lead), reader, SHARDS)
    assert missing.value.retryable
    again = Staging(lead._context.spec.output, lead._job.id, 2, ledger=store.publications, basis="basis")
    assert sorted(again.done) == [0]


def test_what_a_member_finished_itself_has_not_overtaken_it(store: Store, lead: Part) -> None:
    """Not even if it looks at the moment when its last shard is done."""
    membership, job = lead._membership, lead._job
    claimed = [claim.index for claim in store.shards.claim(job, NOW, idle=False)]
    membership.holds(claimed)
    finish = store.shards.finish

    def finished(*given: Any) -> int:
        bad_records = finish(*given)
        membership.cancel_wanted(job.id, job.attempt)
        return bad_records

    store.shards.finish = finished  # type: ignore[method-assign]
    for index in claimed:
        lead.staging.write_shard(index, columns(10))
        assert not membership.overtaken


def test_a_window_is_finished_with_the_second_try_of_its_last_shard(store: Store, lead: Part) -> None:
    """If the store cannot take it at first, what was scored is kept until it can."""
    lead.claims_windows([Span(first=0, last=1, start=0, stop=20)])
    lead.open(SHARDS, staging(lead))
    store.shards.claim(lead._job, NOW, idle=False)
    finish, tries = store.shards.finish, list[int]()

    def troubled(*given: Any) -> int:
        tries.append(given[1])
        if len(tries) == 1:
            raise StoreTrouble("locked")
        return finish(*given)

    store.shards.finish = troubled  # type: ignore[method-assign]
    lead.staging.write_shard(0, columns(10))
    Patience().through(lambda: lead.staging.write_shard(1, columns(10)))
    assert tries == [0, 0]
    assert store.shards.unfinished(lead._job) == (False, False)


def test_a_window_that_failed_for_good(store: Store, lead: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was finished of it counts; bad are the records of missing shards, in the manifest and in the job alike."""
    monkeypatch.setattr("nimble_jobs.store.shards.tolerated", lambda _row: 1)
    lead.claims_windows([Span(first=0, last=1, start=0, stop=20)])
    lead.open(SHARDS, staging(lead))
    lead.staging.write_shard(0, columns(10))
    job = lead._job
    for _ in range(job.max_attempts):
        store.shards.claim(job, NOW, idle=True)
        store.shards.leave(job, now=NOW, error="odd")
    (window,) = store.shards.failed(job)
    assert store.jobs.get(job.id).records_bad == 20
    place = staging(lead)
    with open_reader(lead._context.spec.input) as reader:
        lead.complete(place, reader, SHARDS)
    assert [record.index for record in place.bad] == list(range(10, 20))
    assert place.bad[0].reason == "its shard 1 failed: odd"
    assert store.jobs.get(job.id).records_bad == 10
    assert window[0].index == 0


def test_shards_that_are_finished_while_others_are_claimed(store: Store, lead: Part) -> None:
    """The thread that claims and those that finish change what the member holds; neither undoes what the other did."""
    membership, job = lead._membership, lead._job
    membership.holds([0])
    finishes = threading.Thread(target=membership.drops, args=([0],))

    class Between(list[int]):
        """While these are added, another thread finishes shard 0."""

        def __iter__(self) -> Iterator[int]:
            finishes.start()
            finishes.join(0.1)
            return super().__iter__()

    membership.holds(Between([1]))
    finishes.join()
    store.shards.finish(job, 1, 0, NOW)
    membership.cancel_wanted(job.id, job.attempt)
    assert membership.overtaken


def test_a_member_that_waits_leaves_the_write_lock_alone(
    store: Store, lead: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others work on the last shards it only looks, since each claim would hold up whoever writes."""
    store.shards.claim(lead._job, NOW, idle=False)
    joined = store.shards.join("b", "cpu", NOW)
    assert joined is not None
    store.shards.claim(joined, NOW, idle=False)
    looks = iter([Stop.GO, Stop.GO, Stop.DRAIN])
    waiting = part_of(store, joined, lambda: next(looks))
    monkeypatch.setattr("nimble_jobs.workloads.members.pause_s", lambda *_given, **_how: 0.0)
    monkeypatch.setattr("nimble_jobs.workloads.members.worth_a_copy", lambda *_given: None)
    monkeypatch.setattr(store._database, "write", lambda *_given, **_how: pytest.fail("it takes the write lock"))
    with pytest.raises(Stopped):
        waiting._next()
