"""Leases: who is alive in a database that several state folders share. By PostgreSQL's clock, without locks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from nimble_jobs.errors import LeaseLost, StoreTrouble
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, WorkerLease, leases, open_store
from nimble_jobs.store.home import resolve
from tests import postgres
from tests.store_samples import NOW, submit
from tests.waiting import PATIENCE_S, until


@dataclass(frozen=True)
class Homes:
    """Two state folders over one database."""

    one: Store
    other: Store


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[Homes]:
    with postgres.schema() as url, ExitStack() as opened:
        stores = [opened.enter_context(open_store(resolve(str(tmp_path / name)), url)) for name in ("one", "other")]
        yield Homes(*stores)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed, and looked at, ten times a second. They last as ever."""
    monkeypatch.setattr(leases, "RENEW_S", 0.1)
    monkeypatch.setattr(leases, "_AGAIN_S", 0.1)


def pass_time(store: Store, seconds: float) -> None:
    """All leases of the database end so much earlier."""
    change = text("UPDATE workers SET lease_until = lease_until - :seconds")
    store.jobs._db.write(lambda session: session.execute(change, {"seconds": seconds}))


def pass_grace(store: Store) -> None:
    """So much time passes for leases that others suspect that their holders may be buried. They still run as long."""
    change = text("UPDATE workers SET suspected_at = suspected_at - :seconds")
    store.jobs._db.write(lambda session: session.execute(change, {"seconds": leases.MARGIN_S}))


def writes(store: Store) -> bool:
    """Whether this process may write through the store now."""
    try:
        store.jobs.event("written", "while its worker's lease runs", now=NOW)
    except StoreTrouble:
        return False
    return True


def claimed(store: Store, worker: str, now: float = NOW) -> Job:
    job = store.jobs.claim(worker, device="cpu", now=now)
    assert job is not None
    return job


def test_another_home_leaves_a_live_job_alone(homes: Homes) -> None:
    """A worker of one home runs a job; a worker of the other home, which sees no lock of it, does not take it away."""
    submit(homes.one)
    with homes.one.workers.hold({"role": "worker"}) as lease:
        job = claimed(homes.one, lease.id)
        assert homes.other.workers.alive(lease.id)
        assert [info.id for info in homes.other.workers.live("worker")] == [lease.id]
        assert homes.other.recover(NOW) == []
        assert homes.other.jobs.get(job.id).state is JobState.RUNNING
    assert not homes.other.workers.alive(lease.id)
    assert [lost.id for lost in homes.other.recover(NOW)] == [job.id]
    assert homes.one.jobs.get(job.id).state is JobState.QUEUED


def test_a_worker_of_this_home_without_its_lock_is_dead_at_once(homes: Homes) -> None:
    """Its own home need not wait for the end of the lease; the other home does."""
    with homes.one.workers.hold({"role": "worker"}) as lease:
        lease._lock.close()  # as when the process dies
        assert not homes.one.workers.alive(lease.id)
        assert homes.one.workers.live() == []
        assert homes.other.workers.alive(lease.id)


def test_a_folder_of_another_machine_is_not_this_one(homes: Homes) -> None:
    """Machines made from one image number their folders alike, and the same process id is another process there."""
    with homes.one.workers.hold({"role": "worker"}):
        (info,) = homes.one.workers.live()
        assert homes.one.workers.here(info)
        homes.other.jobs._db.write(lambda session: session.execute(text("UPDATE workers SET boot = 'another'")))
        (info,) = homes.one.workers.live()
        assert not homes.one.workers.here(info)


@pytest.mark.usefixtures("often")
def test_a_lease_is_renewed_with_what_the_worker_tells(homes: Homes) -> None:
    """It runs for longer than it was given for, and others see news at once."""
    keeper = homes.other.workers._leases
    assert keeper is not None
    with homes.one.workers.hold({"role": "worker"}) as lease:
        lease.update(status="ready")
        for _ in range(3):
            pass_time(homes.other, leases.LEASE_S / 2)
            until(lambda: keeper.left_s(lease.id) > 0.9 * leases.LEASE_S)
        assert homes.other.workers.alive(lease.id)
        (info,) = homes.other.workers.live()
        assert info.status == "ready"
        assert homes.one.workers.here(info)
        assert not homes.other.workers.here(info)
        assert lease.in_place


class Stopped:
    """A worker that was stopped for longer than its lease, with the clock of its machine set forward by that."""

    def __init__(self, homes: Homes, lease: WorkerLease, patch: pytest.MonkeyPatch) -> None:
        assert lease._leases is not None
        self._leases, self._renew, self._goes_on = lease._leases, lease._leases.renew, threading.Event()
        self._leases.renew = self._wait  # type: ignore[method-assign]
        lease.update()
        clock_s = leases.clock_s
        patch.setattr(leases, "clock_s", lambda: clock_s() + leases.LEASE_S)
        pass_time(homes.other, leases.LEASE_S)
        assert not homes.other.workers.alive(lease.id)

    def _wait(self, *given: Any) -> bool:
        self._goes_on.wait(PATIENCE_S)
        return self._renew(*given)

    def go_on(self) -> None:
        self._goes_on.set()


@pytest.mark.usefixtures("often")
def test_who_was_stopped_past_the_lease_writes_nothing(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that did nothing until its lease had ended: every write is refused, before and after another worker has
    taken the job, and the worker knows that it must begin anew.
    """
    submit(homes.one)
    submit(homes.one)
    with homes.one.workers.hold({"role": "worker"}) as lease:
        job = claimed(homes.one, lease.id)
        stopped = Stopped(homes, lease, monkeypatch)
        with pytest.raises(StoreTrouble):
            homes.one.jobs.finish(job.id, job.attempt, outputs={}, timings={}, schedule={}, now=NOW)
        with pytest.raises(StoreTrouble):
            claimed(homes.one, lease.id)
        assert homes.other.recover(NOW) == []
        pass_grace(homes.other)
        assert [lost.id for lost in homes.other.recover(NOW)] == [job.id]
        stopped.go_on()
        until(lambda: not lease.in_place)
        with pytest.raises(LeaseLost):
            homes.one.jobs.event("late", "written after the lease", now=NOW)
    assert "late" not in {event.kind for event in homes.other.jobs.events()}


@pytest.mark.usefixtures("often")
def test_an_outage_longer_than_a_lease_costs_no_attempt(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the database is back, a worker renews a lease that has ended, unless it was buried; others give it time for
    that, however long the outage was. Then the attempt goes on under the same worker and number.
    """
    submit(homes.one)
    url = homes.one._database.url.render_as_string()
    with homes.one.workers.hold({"role": "worker"}) as lease, open_store(homes.one.home, url) as child:
        job = claimed(homes.one, lease.id)
        ended: list[bool] = []
        child.workers.follow(lease.id, lambda: ended.append(True))
        cut_off = Stopped(homes, lease, monkeypatch)
        for store in (homes.one, child):
            assert not writes(store)
        assert homes.other.recover(NOW) == []
        cut_off.go_on()
        until(lambda: writes(homes.one) and writes(child))
        pass_grace(homes.other)
        assert homes.other.recover(NOW) == []
        assert child.jobs.finish(job.id, job.attempt, outputs={}, timings={}, schedule={}, now=NOW)
        assert lease.in_place
        assert not ended
    assert (homes.one.jobs.get(job.id).state, homes.one.jobs.get(job.id).attempt) == (JobState.SUCCEEDED, 1)


def test_who_renewed_a_lease_is_suspected_no_more(homes: Homes) -> None:
    """A worker that was cut off once has as much time as before when it is cut off again."""
    keeper = homes.one.workers._leases
    assert keeper is not None
    keeper.begin("1-cut", homes.one.home, {"role": "worker"})
    submit(homes.one)
    claimed(homes.one, "1-cut")
    for _ in range(2):
        pass_time(homes.other, leases.LEASE_S)
        assert homes.other.recover(NOW) == []
        pass_grace(homes.other)
        assert not keeper.renew("1-cut", {})
        assert keeper.renew("1-cut", {})
        assert homes.other.recover(NOW) == []


def test_nobody_waits_for_a_machine_that_is_gone_longer_than_its_lease(homes: Homes) -> None:
    """Whoever watches sees that a lease is not renewed before it ends, so the job is free when it has ended."""
    keeper = homes.one.workers._leases
    assert keeper is not None
    keeper.begin("1-gone", homes.one.home, {"role": "worker"})
    submit(homes.one)
    job = claimed(homes.one, "1-gone")
    homes.other.jobs._db.write(lambda session: session.execute(text("UPDATE workers SET boot = 'another'")))
    pass_time(homes.other, leases.LEASE_S - leases.MARGIN_S)
    assert homes.other.recover(NOW) == []
    pass_grace(homes.other)
    assert homes.other.recover(NOW) == []
    pass_time(homes.other, leases.MARGIN_S)
    assert [lost.id for lost in homes.other.recover(NOW)] == [job.id]
    with pytest.raises(LeaseLost):
        keeper.renew("1-gone", {})


def test_an_attempt_is_fenced_without_any_clock(homes: Homes) -> None:
    """Whatever a stale process believes about its lease, the attempt number refuses its writes."""
    submit(homes.one)
    with homes.one.workers.hold({}) as lease:
        stale = claimed(homes.one, lease.id)
        homes.other.jobs._db.write(lambda session: session.execute(text("UPDATE workers SET lease_until = 0")))
        homes.other.recover(NOW)
        newer = claimed(homes.other, "other", NOW + 3600)
        assert (newer.id, newer.attempt) == (stale.id, stale.attempt + 1)
        assert not homes.one.jobs.progress(stale.id, stale.attempt, done=1, total=1, bad=0)
        assert not homes.one.jobs.finish(stale.id, stale.attempt, outputs={}, timings={}, schedule={}, now=NOW)
        assert homes.one.jobs.fail(stale.id, stale.attempt, error="late", retry=True, now=NOW) is None


@pytest.mark.usefixtures("often")
def test_a_child_writes_nothing_before_its_worker_is_buried_and_then_ends(homes: Homes) -> None:
    """A child process that follows a lease which is not renewed stops writing with time to spare."""
    keeper = homes.one.workers._leases
    assert keeper is not None
    keeper.begin("1-gone", homes.one.home, {})
    ended: list[bool] = []
    homes.other.workers.follow("1-gone", lambda: ended.append(True))
    assert writes(homes.other)
    pass_time(homes.one, leases.LEASE_S - leases.MARGIN_S)
    until(lambda: not writes(homes.other))
    assert 0 < keeper.left_s("1-gone") <= leases.MARGIN_S
    assert not ended
    keeper.end("1-gone")
    until(lambda: ended)
    with pytest.raises(LeaseLost):
        homes.other.jobs.event("late", "written after the end", now=NOW)


def test_rows_of_workers_that_are_long_gone_are_removed(homes: Homes) -> None:
    """Ids are kept for a day after the end, so that the table does not grow for ever."""
    keeper = homes.one.workers._leases
    assert keeper is not None
    for worker, ends in {"0-old": "lease_until - 90000", "0-new": "lease_until - 3600"}.items():
        keeper.begin(worker, homes.one.home, {})
        change = text(f"UPDATE workers SET lease_until = {ends} WHERE id = :id")
        homes.one.jobs._db.write(lambda session, s=change, w=worker: session.execute(s, {"id": w}))
    homes.one.recover(NOW)
    left = homes.one.jobs._db.read(lambda session: session.execute(text("SELECT id FROM workers")).scalars().all())
    assert left == ["0-new"]


def test_a_census_reads_all_leases_at_once(homes: Homes) -> None:
    """A thousand members are not a thousand reads. Whoever began after it is found nevertheless."""
    with homes.one.workers.hold({"role": "worker"}) as first:
        alive = homes.other.workers.census()
        assert alive(first.id)
        with homes.one.workers.hold({"role": "worker"}) as later:
            assert alive(later.id)
            reads = homes.other._database.read
            homes.other._database.read = None  # type: ignore[method-assign,assignment]
            assert alive(first.id)
            homes.other._database.read = reads  # type: ignore[method-assign]
        assert not alive(later.id)


class SlowDatabase:
    """Leases on a database whose clock is this one's, and whose answers take 20 s."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.ends_s = 0.0

    def begin(self, *_given: object) -> None:
        self.renew()

    def renew(self, *_given: object) -> bool:
        self.ends_s = self.now_s + leases.LEASE_S
        self.now_s += 20.0
        return True

    def fence(self, *_given: object, **_how: object) -> None:
        pass


def test_a_lease_counts_from_before_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the answer takes, a worker stops writing in the last part of the lease that the database knows."""
    slow: Any = SlowDatabase()
    monkeypatch.setattr(leases, "clock_s", lambda: slow.now_s)
    monkeypatch.setattr(leases.Watch, "_follow", lambda _watch: None)
    slow.begin()
    watch = leases.Watch(slow, "0-slow", info=dict)
    slow.now_s = slow.ends_s - leases.MARGIN_S - 0.1
    watch.check()
    slow.now_s += 0.2
    with pytest.raises(StoreTrouble):
        watch.check()
