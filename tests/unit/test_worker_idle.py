"""What a worker does while it has no job: it builds what jobs did without, and lets go at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.store import Miss, Store, WantedState, open_store, wanted
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import Station
from nimble_jobs.worker.idle import Idle
from nimble_jobs.worker.residency import Residents
from tests.store_samples import NOW, PARTS, a_schedule, key_of


class Builds:
    """Builders without processes."""

    def __init__(self) -> None:
        self.building: set[str] = set()
        self.failed: set[str] = set()
        self.transient = False  # whether those that fail may succeed another time
        self.ordered: list[str] = []

    def order(self, key: str, order: dict[str, Any], *, beside: bool) -> None:
        assert (order, beside) == ({"of": key, "device": "cpu"}, False)
        self.ordered.append(key)
        self.building.add(key)

    def idle(self, key: str) -> None: ...

    def running(self, key: str) -> bool:
        return key in self.building

    def gave_up(self, key: str) -> bool:
        return key in self.failed

    def may_try_again(self, key: str) -> bool:
        return self.transient and key in self.failed

    def end(self, key: str) -> None:
        self.building.discard(key)

    def stop(self) -> list[str]:
        ended, self.building = sorted(self.building), set()
        return ended

    @property
    def busy(self) -> list[str]:
        return sorted(self.building)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("NIMBLE_JOBS_CACHE_BUILD_AFTER", "2")
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def builds() -> Builds:
    return Builds()


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


@pytest.fixture
def idle(store: Store, builds: Builds, clock: list[float]) -> Idle:
    return idle_of(store, builds, "w", clock)


def idle_of(store: Store, builds: Builds, worker: str, clock: list[float]) -> Idle:
    station = Station(
        store=store,
        device="cpu",
        residents=Residents(1),
        run=lambda _: None,  # type: ignore[arg-type, return-value]
        builders=builds,  # type: ignore[arg-type]
        described="a CPU",
    )
    return Idle(station, worker, now=lambda: clock[0])


def missed(store: Store, key: str, *, saves_s: float = 1.0, device: str = "a CPU", at: float = NOW) -> None:
    miss = Miss(
        key=key,
        model="m",
        device=device,
        input="x",
        request={"of": key, "device": "cpu:7"},
        saves_s=saves_s,
        costs_s=10.0,
        why="too small",
    )
    store.wanted.missed(miss, at)


def states(store: Store) -> dict[str, WantedState]:
    return {row.key: row.state for row in store.wanted.list()}


def test_the_most_promising_comes_first(store: Store, builds: Builds, idle: Idle, clock: list[float]) -> None:
    """After two idle seconds, one at a time, and only those of its device."""
    for key, saves_s in (("little", 1.0), ("much", 5.0)):
        missed(store, key, saves_s=saves_s)
    missed(store, "elsewhere", saves_s=100.0, device="a GPU")
    idle.look()
    assert builds.ordered == []
    clock[0] += 2.0
    for _ in range(3):
        idle.look()
    assert builds.ordered == ["much"]
    assert states(store)["much"] is WantedState.BUILDING


@pytest.mark.parametrize(("device", "waits"), [("cuda:0", True), ("cuda:1", False)])
def test_one_build_at_a_time_on_a_device(
    device: str, waits: bool, store: Store, builds: Builds, clock: list[float]
) -> None:
    """Two would disturb what both measure. Another device of the same kind is another matter."""
    missed(store, "a")
    missed(store, "b")
    with (
        store.workers.hold({"role": "worker", "device": "cuda:0"}) as mine,
        store.workers.hold({"role": "worker", "device": device}) as other,
    ):
        idle = idle_of(store, builds, mine.id, clock)
        taken = store.wanted.take(other.id, "a CPU", alive=lambda _: True, now=NOW)
        assert taken is not None
        clock[0] += 2.0
        idle.look()
        assert builds.ordered == ([] if waits else ["b"])
        store.wanted.put_back(taken.key)
        idle.look()
        assert len(builds.ordered) == 1


def test_a_job_ends_it_at_once(store: Store, builds: Builds, idle: Idle, clock: list[float]) -> None:
    """It waits for the next idle time, and how often that happened is counted."""
    missed(store, "k")
    clock[0] += 2.0
    idle.look()
    idle.over()
    (row,) = store.wanted.list()
    assert (builds.building, row.state, row.builder, row.tries) == (set(), WantedState.WAITS, None, 1)
    idle.back()
    idle.look()
    assert builds.ordered == ["k"]
    clock[0] += 2.0
    idle.look()
    assert builds.ordered == ["k", "k"]


def test_what_fails_is_not_tried_again(store: Store, builds: Builds, idle: Idle, clock: list[float]) -> None:
    """Another job that misses it changes nothing."""
    missed(store, "k")
    clock[0] += 2.0
    idle.look()
    builds.building.clear()
    builds.failed.add("k")
    idle.look()
    missed(store, "k")
    idle.look()
    assert (states(store), builds.ordered) == ({"k": WantedState.FAILED}, ["k"])


def test_what_ran_out_of_memory_is_tried_three_times(
    store: Store, builds: Builds, idle: Idle, clock: list[float]
) -> None:
    """What is resident may leave more room another time."""
    missed(store, "k")
    clock[0] += 2.0
    builds.transient = True
    builds.failed.add("k")
    for _ in range(10):
        idle.look()
        builds.building.clear()
    assert (states(store), builds.ordered) == ({"k": WantedState.FAILED}, ["k"] * 3)


def test_what_nobody_misses_is_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a month, and the oldest of too many; not what is being built."""
    monkeypatch.setattr(wanted, "_MOST", 3)
    for i, key in enumerate(("building", "old", "a", "b", "c", "d")):
        missed(store, key, at=NOW + i)
        if i == 0:
            assert store.wanted.take("w", "a CPU", alive=lambda _: True, now=NOW) is not None
    assert set(states(store)) == {"building", "b", "c", "d"}
    missed(store, "new", at=NOW + 40 * 86400)
    assert set(states(store)) == {"building", "new"}


def test_what_is_stored_is_wanted_no_more(store: Store) -> None:
    """Whoever stored it; a job that missed it before counts nothing then."""
    key = key_of("k")
    missed(store, key)
    assert len(store.wanted.list()) == 1
    store.schedules.save(a_schedule(key), parts=PARTS, now=NOW)
    missed(store, key)
    assert store.wanted.list() == []


def test_a_dead_workers_build_is_free(store: Store) -> None:
    """What a living one builds is not."""
    missed(store, "k")
    assert store.wanted.take("w1", "a CPU", alive=lambda _: True, now=NOW) is not None
    assert store.wanted.take("w2", "a CPU", alive=lambda _: True, now=NOW) is None
    assert store.wanted.take("w2", "a CPU", alive=lambda _: False, now=NOW) is not None


def test_it_can_be_turned_off(
    store: Store, builds: Builds, idle: Idle, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the configuration."""
    monkeypatch.setenv("NIMBLE_JOBS_CACHE_BUILD_AFTER", "off")
    missed(store, "k")
    clock[0] += 3600.0
    idle.look()
    assert builds.ordered == []
