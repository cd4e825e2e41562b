"""What goes when a store is pruned, and what must stay."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nimble_jobs.errors import StoreError
from nimble_jobs.job import Hit
from nimble_jobs.store import Store, open_store, prune
from nimble_jobs.store.home import resolve
from nimble_jobs.store.prune import Wish, look, remove, stored_bytes
from tests.configured import configure
from tests.store_samples import NOW, PARTS, a_schedule, folder_in_memory, key_of

DAY_S = 86400.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new store."""
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def save(store: Store, name: str, constant: bytes | None = None, *, at: float = NOW) -> str:
    """Keep a schedule with a constant, last used at that time; returns its key."""
    if constant is not None:
        store.artifacts.put(constant)
    store.schedules.save(a_schedule(key_of(name), constant=constant), parts=PARTS, now=at)
    return key_of(name)


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def keys(store: Store) -> set[str]:
    return {entry.key for entry in store.schedules.list()}


def test_artifacts_go_with_the_last_schedule_that_needs_them(store: Store) -> None:
    """What two share stays until both are gone; what nobody ever named goes at the first look."""
    first, second = save(store, "a", b"shared"), save(store, "b", b"shared")
    stray = store.artifacts.put(b"stray")
    removals = look(store, Wish(), NOW, keys=[first])
    assert (removals.artifacts, removals.bytes) == ((stray,), len(a_schedule(first, constant=b"shared").to_json()) + 5)
    assert keys(store) == {first, second}, "looking changes nothing"
    assert remove(store, removals) == 1
    assert len(list(store.artifacts.names())) == 1
    remove(store, look(store, Wish(), NOW, keys=[second]))
    assert (keys(store), list(store.artifacts.names())) == (set(), [])


def test_by_age(store: Store) -> None:
    """A schedule goes when it was not used for so long, whenever it was made."""
    old, used = save(store, "old", at=NOW - 40 * DAY_S), save(store, "used", at=NOW - 40 * DAY_S)
    store.schedules.touch(used, Hit.RESIDENT, NOW - DAY_S)
    removals = look(store, Wish(unused_for_s=30 * DAY_S), NOW)
    assert [(r.entry.key, r.why) for r in removals.schedules] == [(old, "unused for 40d")]


def test_quarantined_and_stale(store: Store) -> None:
    """Each goes for its own wish only."""
    quarantined, stale, ready = (save(store, name) for name in ("q", "s", "r"))
    store.schedules.quarantine(quarantined, "in doubt", NOW)
    parts = PARTS | {"device": "cpu", "torch": "0.1"}
    store.schedules.save(a_schedule(stale), parts=parts, now=NOW)
    assert [r.entry.key for r in look(store, Wish(quarantined=True), NOW).schedules] == [quarantined]
    here = prune.toolchain()
    if "cpu" in here.devices:  # the schedule names no processor, so it is not known to be of this machine
        assert look(store, Wish(stale=True), NOW).schedules == ()
        parts |= {"device.name": min(here.devices["cpu"])}
        store.schedules.save(a_schedule(stale), parts=parts, now=NOW)
    (removal,) = look(store, Wish(stale=True), NOW).schedules
    assert removal.entry.key == stale
    assert removal.why.startswith("stale: made with torch 0.1, here ")
    assert ready in keys(store)


def test_what_a_live_worker_holds_stays(store: Store) -> None:
    """Whatever the wish; only force, or the end of the worker, gives it free."""
    held, other = save(store, "held", at=NOW - 40 * DAY_S), save(store, "other", at=NOW - 40 * DAY_S)
    wish = Wish(unused_for_s=DAY_S, max_bytes=0)
    with store.workers.hold({"role": "worker"}) as lease:
        store.schedules.set_residents(lease.id, {f"{held}:weights": 1})
        removals = look(store, wish, NOW)
        assert [r.entry.key for r in removals.schedules] == [other]
        assert [r.entry.key for r in removals.kept] == [held]
        assert [r.entry.key for r in look(store, Wish(), NOW, keys=[held], force=True).schedules] == [held]
        assert [r.entry.key for r in look(store, wish, NOW, in_use=[other]).schedules] == []
    assert {r.entry.key for r in look(store, wish, NOW).schedules} == {held, other}


def test_saved_anew_since_the_look_stays(store: Store) -> None:
    """Between the look and the removal another process may have built the schedule again, with other artifacts."""
    key = save(store, "a", b"first")
    removals = look(store, Wish(), NOW, keys=[key])
    save(store, "a", b"second")
    assert remove(store, removals) == 0
    assert keys(store) == {key}
    assert store.check() == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data())
def test_size_cap(data: st.DataObject) -> None:
    """What is left fits, the least recently used went, and nothing that would have fitted went."""
    made = data.draw(
        st.lists(st.tuples(st.sampled_from([b"a" * 900, b"b" * 2000, None]), st.integers(0, 99)), max_size=6)
    )
    with folder_in_memory() as folder, open_store(resolve(folder)) as store:
        for i, (constant, age) in enumerate(made):
            save(store, str(i), constant, at=NOW - age)
        entries, artifacts = store.schedules.list(), store.schedules.artifacts()
        total = stored_bytes(entries, artifacts)
        cap = data.draw(st.integers(0, total + 10))
        removals = look(store, Wish(max_bytes=cap), NOW)
        gone = {r.entry.key for r in removals.schedules}
        left = [entry for entry in entries if entry.key not in gone]
        assert stored_bytes(left, artifacts) <= cap
        order = sorted(entries, key=lambda entry: (entry.last_used_at, entry.key))
        assert {entry.key for entry in order[: len(gone)]} == gone
        if gone:
            assert stored_bytes(order[len(gone) - 1 :], artifacts) > cap, "one less would not have been enough"
        remove(store, removals)
        on_disk = sum(store.artifacts.size(name) for name in store.artifacts.names())
        texts = sum(len(store.schedules.verified(entry.key).text) for entry in left)
        assert on_disk + texts == stored_bytes(left, artifacts)
        assert store.check() == []


def test_the_cap(store: Store) -> None:
    """After a save the least recently used go until the others fit, never what is in use; an event names them."""
    first, second, third = (save(store, name, name.encode() * 1000, at=NOW + i) for i, name in enumerate("abc"))
    store.keep_to_size(NOW)
    assert len(keys(store)) == 3, "no limit was set"
    one = store.schedules.get(first).bytes
    configure(store.home, f"cache: {{size: {2 * one}}}")
    store.keep_to_size(NOW, in_use=[third])
    assert keys(store) == {second, third}
    (event,) = store.jobs.events()
    assert (event.kind, event.data) == ("pruned", {"keys": [first]})
    configure(store.home, "cache: {size: 1}")
    store.keep_to_size(NOW, in_use=[third])
    assert keys(store) == {third}
    assert len(list(store.artifacts.names())) == 1


def test_a_cap_that_cannot_be_kept_is_noted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody loads schedules nothing is deleted under it; the job that saved goes on."""
    first, second = save(store, "a"), save(store, "b")
    configure(store.home, "cache: {size: 1}")
    monkeypatch.setattr("nimble_jobs.store.artifacts.PATIENCE_S", 0.05)
    with open_store(store.home) as other, other.artifacts.in_use():
        store.keep_to_size(NOW, in_use=[second])
    assert keys(store) == {first, second}
    (event,) = store.jobs.events()
    assert "nothing was removed" in event.message
    store.keep_to_size(NOW, in_use=[second])
    assert keys(store) == {second}


def test_a_cap_that_cannot_be_looked_at_is_noted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of artifacts cannot be listed: the job that saved goes on, and the event says why nothing went."""

    def broken() -> Iterator[str]:
        raise StoreError("too many open files")

    key = save(store, "a", b"a" * 1000)
    configure(store.home, "cache: {size: 1}")
    monkeypatch.setattr(store.artifacts, "names", broken)
    assert store.keep_to_size(NOW) == ()
    assert keys(store) == {key}
    (event,) = store.jobs.events()
    assert event.message == "cache.size: nothing was removed: too many open files"


def test_the_cap_sweeps_what_no_schedule_needs(store: Store) -> None:
    """Artifacts that were left behind count, and go before any schedule does; where all fits they stay."""
    first, second = (save(store, name, name.encode() * 1000, at=NOW + i) for i, name in enumerate("ab"))
    stray = store.artifacts.put(b"stray" * 1000)
    nbytes = sum(entry.bytes for entry in store.schedules.list())
    configure(store.home, f"cache: {{size: {nbytes + 5000}}}")
    assert store.keep_to_size(NOW) == ()
    assert store.artifacts.has(stray)
    configure(store.home, f"cache: {{size: {nbytes + 4999}}}")
    assert store.keep_to_size(NOW) == ()
    assert (store.artifacts.has(stray), keys(store)) == (False, {first, second})
    (event,) = store.jobs.events()
    assert event.message == "cache.size: 5,000 bytes removed; schedules: 0, artifacts: 1"


def test_compact(store: Store) -> None:
    """The database gives back what removed schedules took, beside other processes; what is left is as it was."""
    database = store.home / "nimble-jobs.db"
    kept = save(store, "kept")
    small = database.stat().st_size
    for i in range(20):
        store.schedules.save(a_schedule(key_of(str(i)), tasks=300), parts=PARTS, now=NOW)
    large = database.stat().st_size
    with open_store(store.home) as other:
        assert kept in keys(other)
        store.schedules.remove([key_of(str(i)) for i in range(20)])
        assert database.stat().st_size == large, "rows go, pages stay"
        store.compact()
        assert database.stat().st_size <= small
        assert keys(other) == {kept}
        other.schedules.touch(kept, Hit.STORED, NOW)
    assert store.check() == []


def test_a_cap_that_is_no_size(store: Store) -> None:
    """The job that saved goes on, and the event names the line."""
    key = save(store, "a", b"a" * 1000)
    path = configure(store.home, "cache: {size: plenty}")
    assert store.keep_to_size(NOW) == ()
    assert keys(store) == {key}
    (event,) = store.jobs.events()
    problem = f"{path}:1: cache.size: found 'plenty'; expected bytes or a size such as 512MiB or 20GB"
    assert event.message == f"cache.size: nothing was removed: {problem}"
