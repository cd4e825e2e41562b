"""Devices of one worker that its posts lend to a training on several of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.errors import DevicesTaken, JobFailed
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, Wanted, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.locks import EXCLUSIVE, Lock
from nimble_jobs.store.wanted import Miss
from nimble_jobs.worker.lending import GIVEN_BACK, lend
from nimble_jobs.worker.messages import Borrows, Done, Ready
from nimble_jobs.worker.post import Post
from nimble_jobs.workloads.context import Stopped
from nimble_jobs.workloads.training.ranks import places as ranks_places
from nimble_jobs.workloads.training.ranks.places import Loan, places
from tests.store_samples import queued

GPUS = [f"cuda:{index}" for index in range(5)]


@dataclass
class FakeChild:
    """Says what the test has it say, and dies at once."""

    said: list[Any]
    device: str | None = None
    software: dict[str, str] = field(default_factory=dict)
    leaving_since: float | None = None
    draining: bool = False
    alive: bool = True
    job: Job | None = None

    @property
    def takes_jobs(self) -> bool:
        return self.device is not None

    def messages(self) -> list[Any]:
        said, self.said = self.said, []
        return said

    def run(self, job: Job) -> None:
        self.job = job

    def moved(self) -> bool:
        return True

    def late(self, _now: float, _start_s: float) -> None:
        return None

    def kill(self) -> None:
        self.alive = False

    def bury(self) -> str:
        return "killed"


class Worker:
    """A worker's posts on GPUs that are not there, and what its loop does with them."""

    def __init__(self, store: Store, devices: Sequence[str]) -> None:
        self.store, self.now = store, time.monotonic()
        self.leases = [store.workers.hold({"role": "worker", "device": device}) for device in devices]
        self.posts = [
            Post(store, lease, lambda device=device: FakeChild([Ready(device=device, software={})]))  # type: ignore[arg-type,misc,return-value]
            for device, lease in zip(devices, self.leases, strict=True)
        ]

    def step(self) -> None:
        self.now += 1.0  # no look for a job is too early
        for post in self.posts:
            post.hear()
            post.owed.pay()
        lend(self.posts)
        for post in self.posts:
            post.act(self.now)

    def says(self, index: int, *messages: Any) -> None:
        """What a child says, and two steps of the loop."""
        child: Any = self.posts[index].child
        child.said += messages
        self.step()
        self.step()

    @property
    def lent(self) -> list[str | None]:
        return [post.lent for post in self.posts]

    def jobs(self) -> list[str | None]:
        return [post.running.job.id if post.running else None for post in self.posts]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path))) as opened:
        yield opened


def submit(store: Store) -> Job:
    return queued(store, spec={"name": "n"}, name="n", kind="finetune", now=time.time())


def borrows(count: int, devices: Sequence[str] = GPUS) -> Borrows:
    return Borrows(devices=tuple(devices), count=count)


def started(store: Store, count: int, jobs: int, devices: Sequence[str] = GPUS) -> tuple[Worker, list[str]]:
    """A worker whose first posts have jobs."""
    worker = Worker(store, devices[:count])
    ids = [submit(store).id for _ in range(jobs)]
    for _ in range(3):
        worker.step()
    assert worker.jobs() == [*ids, *[None] * (count - jobs)]
    return worker, ids


def ended(worker: Worker, index: int) -> Done:
    job = worker.posts[index].job()
    assert job is not None
    worker.store.jobs.finish(job.id, job.attempt, outputs={}, timings={}, schedule={}, now=time.time())
    return Done(job_id=job.id, attempt=job.attempt)


def test_idle_devices_are_lent_and_come_back(store: Store) -> None:
    """They have no child meanwhile, take no job, and say so. Then they work as ever."""
    worker, (job,) = started(store, 3, 1)
    child: Any = worker.posts[1].child
    worker.says(0, borrows(1))
    assert worker.lent == [None, job, None]
    assert not child.alive
    assert worker.posts[1].child is None
    shown = [info for info in store.workers.live() if info.info.get("lent")]
    assert [(info.device, info.status) for info in shown] == [("cuda:1", "lent")]
    other = submit(store).id
    worker.step()
    assert worker.jobs() == [job, None, other]
    worker.says(0, ended(worker, 0))
    worker.step()
    assert worker.lent == [None, None, None]
    assert worker.posts[1].idle


def test_a_busy_device_is_lent_once_its_job_has_ended(store: Store) -> None:
    """Before it would take the next job of the queue."""
    worker, (job, other) = started(store, 2, 2)
    worker.says(0, borrows(1))
    assert worker.jobs() == [job, other]
    waits = submit(store).id
    worker.says(1, ended(worker, 1))
    assert (worker.lent, worker.jobs()) == ([None, job], [job, None])
    assert store.jobs.get(waits).state is JobState.QUEUED


def test_of_two_that_wait_for_each_other_the_later_goes_back(store: Store) -> None:
    """To the queue, without a failure. It runs when the first has ended."""
    worker, (job, other) = started(store, 2, 2)
    worker.says(1, borrows(1))
    worker.says(0, borrows(1))
    assert (worker.lent, worker.jobs()) == ([other, None], [None, other])
    assert store.jobs.get(job).state is JobState.QUEUED
    assert [each.outcome for each in store.jobs.attempts(job)] == ["requeued"]
    assert GIVEN_BACK in store.jobs.events(job)[-1].message
    worker.says(1, ended(worker, 1))
    worker.step()
    assert set(worker.jobs()) == {job, None}
    assert worker.lent == [None, None]


def test_two_that_both_have_enough_train_beside_each_other(store: Store) -> None:
    """Each with its own."""
    worker, (job, other) = started(store, 4, 2)
    worker.says(0, borrows(1))
    worker.says(1, borrows(1))
    assert worker.lent == [None, None, job, other]
    worker.says(0, borrows(1))  # asked again, as a job does that waits
    assert worker.lent == [None, None, job, other]


def test_a_paused_device_is_not_lent(store: Store) -> None:
    """Nor is one that a user wants drained."""
    worker, _ = started(store, 2, 1)
    store.orders.want(Wanted.PAUSE, [worker.leases[1].id], time.time())
    worker.posts[1].heed.run(time.time())
    worker.says(0, borrows(1))
    assert worker.lent == [None, None]


def test_a_device_of_another_kind_is_not_lent(store: Store) -> None:
    """Though it is idle, and comes first. Neither is a GPU that the job cannot use."""
    worker, (job,) = started(store, 4, 1, ["cuda:0", "cpu", "cuda:1", "cuda:2"])
    worker.says(0, borrows(1, ["cuda:2"]))
    assert worker.lent == [None, None, None, job]
    worker.says(0, borrows(2, ["cuda:1", "cuda:2"]))
    assert worker.lent == [None, None, job, job]


def test_a_job_that_has_its_devices_asks_for_no_more(store: Store) -> None:
    """It asked for three and starts with one, as GPUs became free that no worker has. The surplus comes back, the next
    borrower is served, and neither is sent back to the queue.
    """
    worker, (job, other, third) = started(store, 5, 3)
    worker.says(0, borrows(3))
    assert worker.lent == [None, None, None, job, job]
    worker.says(0, borrows(1, ["cuda:3"]))
    assert worker.lent == [None, None, None, job, None]
    worker.says(1, borrows(1))
    assert worker.lent == [None, None, None, job, other]
    worker.says(2, borrows(1))
    assert worker.jobs() == [job, other, third, None, None]
    worker.says(1, ended(worker, 1))
    assert worker.lent == [None, third, None, job, None]


def test_a_waiter_goes_back_for_what_it_has_borrowed(store: Store) -> None:
    """Also if its own device is paused, and so is not lent."""
    worker, (job, other) = started(store, 4, 2)
    worker.says(0, borrows(1, ["cuda:2"]))
    worker.says(1, borrows(2, ["cuda:2", "cuda:3"]))
    assert worker.lent == [None, None, job, other]
    store.orders.want(Wanted.PAUSE, [worker.leases[1].id], time.time())
    worker.posts[1].heed.run(time.time())
    worker.says(0, borrows(2, ["cuda:2", "cuda:3"]))
    worker.step()
    assert (worker.lent, worker.jobs()) == ([None, None, job, job], [job, None, None, None])
    assert store.jobs.get(other).state is JobState.QUEUED


def test_the_build_of_a_lent_device_is_free_for_others(store: Store) -> None:
    """Its child was building for later jobs while it was idle."""
    worker, (job,) = started(store, 2, 1)
    store.wanted.missed(
        Miss(key="k", model="m", device="H200", input="x", request={}, saves_s=1.0, costs_s=1.0, why="w"), 1.0
    )
    assert store.wanted.take(worker.leases[1].id, "H200", alive=lambda _: True, now=2.0) is not None
    assert store.wanted.take("another", "H200", alive=lambda _: True, now=2.0) is None
    worker.says(0, borrows(1))
    assert worker.lent == [None, job]
    assert store.wanted.take("another", "H200", alive=lambda _: True, now=2.0) is not None


def test_ranks_take_what_was_lent_to_their_job(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask for what is missing, wait for it, and leave alone what was lent to others."""
    monkeypatch.setattr(devices, "present", lambda: [torch.device("cuda", index) for index in range(4)])
    leases = [store.workers.hold({"device": f"cuda:{index}"}) for index in range(3)]
    asked, waited = list[tuple[Sequence[str], int]](), list[str]()

    def wait(why: str) -> None:
        waited.append(why)
        leases[2].update(lent="mine")

    loan = Loan(job="mine", worker=leases[0].id, ask=lambda *wish: asked.append(wish), wait=wait)
    mine = torch.device("cuda", 0)
    with places(store, mine, 2, loan) as found:
        assert found == ["cuda:0", "cuda:3"]  # nobody's, so nothing is borrowed
    leases[1].update(lent="another")
    with places(store, mine, 3, loan) as found:
        assert found == ["cuda:0", "cuda:2", "cuda:3"]
    assert (asked, waited) == ([(["cuda:1", "cuda:2"], 1), (["cuda:2"], 1)], ["cuda:1, cuda:2"])


def test_the_wait_for_devices_ends_with_the_job(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `wait` raises comes through. A device of another worker is not waited for."""
    monkeypatch.setattr(devices, "present", lambda: [torch.device("cuda", index) for index in range(2)])
    leases = [store.workers.hold({"device": f"cuda:{index}"}) for index in range(2)]

    def wait(_why: str) -> None:
        raise Stopped

    loan = Loan(job="mine", worker=leases[0].id, ask=lambda _devices, _count: None, wait=wait)
    with pytest.raises(Stopped), places(store, torch.device("cuda", 0), 2, loan):
        raise AssertionError
    stranger = replace(loan, worker="gone")
    with pytest.raises(JobFailed, match="cuda:1 is worker"), places(store, torch.device("cuda", 0), 2, stranger):
        raise AssertionError


def loan_of(worker: Worker, job: str) -> Loan:
    """From its first post; each wait is a step of the loop."""

    def ask(devices: Sequence[str], count: int) -> None:
        child: Any = worker.posts[0].child
        child.said.append(borrows(count, devices))

    return Loan(job=job, worker=worker.leases[0].id, ask=ask, wait=lambda _why: worker.step())


def test_ranks_and_posts_agree(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of another kind is left alone, and so is one with another job's rank, once it was lent in vain."""
    monkeypatch.setattr(devices, "present", lambda: [torch.device("cuda", index) for index in range(3)])
    worker, (job,) = started(store, 4, 1, ["cuda:0", "cpu", "cuda:1", "cuda:2"])
    with closing(Lock(store.home / "workers" / "rank-cuda-1.lock")) as foreign:
        assert foreign.take(EXCLUSIVE)
        with places(store, torch.device("cuda", 0), 2, loan_of(worker, job)) as found:
            assert found == ["cuda:0", "cuda:2"]
            worker.step()
            worker.step()
            assert worker.lent == [None, None, None, job]
            assert [post.idle for post in worker.posts] == [False, True, True, False]


def test_ranks_that_have_enough_ask_for_no_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask for one more while another job's rank has a GPU, and start once that has ended. What becomes idle
    later takes jobs.
    """
    monkeypatch.setattr(devices, "present", lambda: [torch.device("cuda", index) for index in range(4)])
    worker, (job, _, _) = started(store, 3, 3)
    foreign, wishes = Lock(store.home / "workers" / "rank-cuda-3.lock"), list[Borrows | None]()
    assert foreign.take(EXCLUSIVE)

    def wait(_why: str) -> None:
        if not wishes:
            worker.says(1, ended(worker, 1))
        worker.step()
        running = worker.posts[0].running
        assert running is not None
        wishes.append(running.borrows)
        if len(wishes) == 3:
            foreign.close()

    with places(store, torch.device("cuda", 0), 3, replace(loan_of(worker, job), wait=wait)) as found:
        assert found == ["cuda:0", "cuda:1", "cuda:3"]
        assert wishes == [borrows(1, ["cuda:1", "cuda:2"]), *[borrows(2, ["cuda:1", "cuda:2"])] * 2]
        worker.says(2, ended(worker, 2))
        assert worker.lent == [None, job, None]
        assert worker.posts[2].idle


def test_what_no_worker_has_is_left_to_others_until_there_is_enough(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job that looks while this one waits does not take it for busy."""
    monkeypatch.setattr(devices, "present", lambda: [torch.device("cuda", index) for index in range(3)])
    worker, (job, _) = started(store, 2, 2)
    loan, waits = loan_of(worker, job), list[str]()
    locked = list[str]()

    class Noted(Lock):
        def take(self, kind: int) -> bool:
            locked.append(self.path.stem)
            return super().take(kind)

    def wait(why: str) -> None:
        waits.append(why)
        assert set(locked) == {"rank-cuda-0"}
        if len(waits) == 3:
            worker.says(1, ended(worker, 1))
        worker.step()

    monkeypatch.setattr(ranks_places, "Lock", Noted)
    with places(store, torch.device("cuda", 0), 3, replace(loan, wait=wait)) as found:
        assert found == ["cuda:0", "cuda:1", "cuda:2"]
    assert waits == ["cuda:1"] * 3


def test_paused_devices_are_not_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job fails and says why. If they are asked to leave, it may find them free later."""
    monkeypatch.setattr(devices, "present", lambda: [torch.device("cuda", index) for index in range(2)])
    worker, (job,) = started(store, 2, 1)
    for order, error, words in ((Wanted.PAUSE, JobFailed, "paused"), (Wanted.DRAIN, DevicesTaken, "asked to leave")):
        store.orders.want(order, [worker.leases[1].id], time.time())
        worker.posts[1].heed.run(time.time())
        with (
            pytest.raises(error, match=f"cuda:1 is worker {worker.leases[1].id}'s, which is {words}") as caught,
            places(store, torch.device("cuda", 0), 2, loan_of(worker, job)),
        ):
            raise AssertionError
        assert type(caught.value) is error
