"""What everybody relies on in stored schedules: what comes out is what went in, or it is a miss with a reason."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nimble_jobs.errors import Damaged, NotFound, UsageError
from nimble_jobs.job import Hit
from nimble_jobs.schedule import FORMAT_VERSION, CompiledKernel
from nimble_jobs.store import ArtifactRef, ScheduleState, Store, open_store
from nimble_jobs.store.home import DATABASE, resolve
from nimble_jobs.store.schedules import Saving
from tests.store_samples import NOW, PARTS, a_schedule, folder_in_memory, hold_worker, key_of
from tests.waiting import PATIENCE_S

KEY = key_of("a")


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    """A new store."""
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


# Damage is done to the file behind the store's back.
only_sqlite = pytest.mark.parametrize("url", [None], ids=["sqlite"])


def tamper(store: Store, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(store.home / DATABASE, isolation_level=None)) as connection:
        assert connection.execute(statement, values).rowcount == 1


def test_round_trip(store: Store) -> None:
    """A saved schedule comes back as the same value, with all that is known of it."""
    constant = b"constant"
    store.artifacts.put(constant)
    schedule = a_schedule(KEY, constant=constant, replay_us=0.1 + 0.2)
    store.schedules.save(schedule, parts=PARTS, now=NOW)
    found = store.schedules.find(KEY)
    assert found is not None
    assert found.load() == schedule
    assert (found.key, found.parts, found.state, found.reason) == (KEY, PARTS, ScheduleState.READY, None)
    assert (found.model, found.dtype, found.mode) == ("torchvision:resnet18", "fp32", "inference")
    assert (found.device, found.input, found.streams, found.syncs) == ("cpu", "x:float32[4]", 1, 0)
    assert (found.replay_us, found.eager_us) == (0.1 + 0.2, 20.5)
    assert found.bytes == len(schedule.to_json()) + len(constant)
    assert (found.hits, found.created_at, found.last_used_at) == (0, NOW, NOW)
    assert store.schedules.get(KEY[:8]) == store.schedules.list()[0]
    assert store.check() == []


def test_miss(store: Store) -> None:
    """A key that nobody saved is a miss that says so."""
    found = store.schedules.lookup(KEY)
    assert (found.stored, found.refused) == (None, None)
    assert found.reason == "no schedule is stored under this key"


def test_refused_from_the_start(store: Store) -> None:
    """A schedule saved as refused is never ready: one transaction, which notes why, and keeps the hits of before."""
    store.schedules.save(a_schedule(KEY), parts=PARTS, now=NOW)
    store.schedules.touch(KEY, Hit.STORED, NOW)
    store.schedules.save(a_schedule(KEY), parts=PARTS, now=NOW, refused="differs by 0.5")
    found = store.schedules.lookup(KEY)
    assert (found.stored, found.refused) == (None, "differs by 0.5")
    assert (store.schedules.ready(KEY), store.schedules.get(KEY).hits) == (False, 1)
    (event,) = store.jobs.events()
    assert (event.kind, event.data) == ("quarantined", {"key": KEY})
    assert store.check() == []


def test_several_are_saved_or_none(store: Store) -> None:
    """A schedule that cannot be stored takes those before it along."""
    other = key_of("b")
    savings = [Saving(schedule=a_schedule(KEY), parts=PARTS), Saving(schedule=a_schedule(other), parts=PARTS)]
    broken = Saving(schedule=a_schedule(key_of("c")), parts=PARTS | {"model.dtype": "no text: \udc00"})
    with pytest.raises(UnicodeEncodeError):
        store.schedules.save_all([*savings, broken], NOW)
    assert store.schedules.list() == []
    store.schedules.save_all(savings, NOW)
    assert {entry.key for entry in store.schedules.list()} == {KEY, other}
    assert store.check() == []


def test_touch(store: Store) -> None:
    """Stored and resident hits are counted and note the time; the schedule stays sound."""
    store.schedules.save(a_schedule(KEY), parts=PARTS, now=NOW)
    for i, hit in enumerate([Hit.STORED, Hit.RESIDENT, Hit.RESIDENT]):
        store.schedules.touch(KEY, hit, NOW + i)
    found = store.schedules.find(KEY)
    assert found is not None
    assert (found.hits, found.resident_hits, found.last_used_at) == (3, 2, NOW + 2)
    store.schedules.touch(key_of("unknown"), Hit.STORED, NOW)
    assert store.schedules.uses().total == 3


def test_look_ups_one_after_the_other_wait_for_no_commit(store: Store) -> None:
    """A job that looks up many schedules counts its hits once it writes or reads something else."""
    store.schedules.save(a_schedule(KEY), parts=PARTS, now=NOW)
    store.schedules.touch(KEY, Hit.STORED, NOW)
    found = store.schedules.lookup(KEY, flush=False).stored
    assert found is not None
    assert found.hits == 0
    assert store.schedules.uses().stored == 1


def test_residents_of_killed_workers_are_deleted(store: Store) -> None:
    """What a process held that was killed goes with the next recovery; what a live worker holds stays."""
    spawn = multiprocessing.get_context("spawn")
    ready, done = spawn.Queue(), spawn.Event()
    process = spawn.Process(target=hold_worker, args=(str(store.home), ready, done))
    process.start()
    killed = ready.get(timeout=PATIENCE_S)
    with store.workers.hold({"device": "cpu"}) as lease:
        for worker in (killed, lease.id):
            store.schedules.set_residents(worker, {KEY: 1})
        store.recover(NOW)
        assert store.schedules.residents([killed, lease.id]) == {KEY: sorted([killed, lease.id])}
        process.kill()
        process.join()
        store.recover(NOW)
        assert store.schedules.residents([killed, lease.id]) == {KEY: [lease.id]}


def test_uses(store: Store) -> None:
    """Totals stay when schedules go: hits save the build time of what was hit, misses are told apart by reason."""
    store.schedules.save(a_schedule(KEY, build_s=2.5), parts=PARTS, now=NOW)
    for hit in (Hit.STORED, Hit.RESIDENT, Hit.RESIDENT):
        store.schedules.touch(KEY, hit, NOW)
    for reason in ("not stored", "the stored schedule was not used: this", "the stored schedule was not used: that"):
        store.schedules.missed(reason, NOW)
    store.schedules.remove([KEY])
    uses = store.schedules.uses()
    assert (uses.resident, uses.stored, uses.saved_s) == (2, 1, 7.5)
    assert list(uses.misses.items()) == [("the stored schedule was not used", 2), ("not stored", 1)]


def test_a_schedule_of_before_kernels_could_have_scratch_memory_is_read(store: Store) -> None:
    """And one whose kernels need none is written as it was then."""
    kernel = CompiledKernel(
        name="k", function="f", grid=(1, 1, 1), warps=4, shared_bytes=0, arg_types="OO", start=0, nbytes=9
    )
    plain = a_schedule(KEY, kernels="inductor", compiled=(kernel,), binaries=key_of("code"))
    needs = replace(plain, compiled=(replace(kernel, scratch_bytes=384),))
    assert "scratch" not in plain.to_json()
    for schedule in (plain, needs):
        store.schedules.save(schedule, parts=PARTS, now=NOW)
        found = store.schedules.find(KEY)
        assert found is not None
        assert found.load() == schedule


@only_sqlite
def test_artifacts_belong_to_schedules(store: Store) -> None:
    """A schedule names its constants and the machine code of its kernels; without one of the names it is damaged."""
    code = key_of("code")
    kernel = CompiledKernel(
        name="k", function="f", grid=(1, 1, 1), warps=4, shared_bytes=0, arg_types="OO", start=100, nbytes=900
    )
    schedule = a_schedule(KEY, constant=b"abc", kernels="inductor", compiled=(kernel,), binaries=code)
    store.schedules.save(schedule, parts=PARTS, now=NOW)
    constant = ArtifactRef(name=schedule.program.constants[0].name, kind="constant", bytes=3)
    kernels = ArtifactRef(name=code, kind="kernels", bytes=1000)
    assert set(store.schedules.artifacts()[KEY]) == {kernels, constant}
    found = store.schedules.find(KEY)
    assert found is not None
    assert set(found.artifacts) == {kernels, constant}
    assert found.bytes == len(schedule.to_json()) + 1003
    tamper(store, "DELETE FROM schedule_artifacts WHERE kind = 'kernels'")
    with pytest.raises(Damaged):
        store.schedules.verified(KEY)
    store.schedules.remove([KEY])
    assert store.schedules.artifacts() == {}


def test_saved_again(store: Store) -> None:
    """A new schedule takes the place of the old one, quarantined or not, and keeps its count of hits."""
    store.schedules.save(a_schedule(KEY), parts=PARTS, now=NOW)
    store.schedules.touch(KEY, Hit.STORED, NOW)
    store.schedules.refuse(KEY, "differs", NOW)
    better = a_schedule(KEY, tasks=5)
    store.schedules.save(better, parts=PARTS, now=NOW + 1)
    found = store.schedules.find(KEY)
    assert found is not None
    assert (found.load(), found.hits, found.created_at) == (better, 1, NOW + 1)


def test_quarantined(store: Store) -> None:
    """A quarantined schedule is a miss with its reason; only a refused one must not be built again."""
    store.schedules.save(a_schedule(KEY), parts=PARTS, now=NOW)
    store.schedules.quarantine(KEY, "artifact gone", NOW)
    found = store.schedules.lookup(KEY)
    assert (found.stored, found.refused) == (None, None)
    assert found.reason == "the stored schedule is quarantined: artifact gone"
    store.schedules.refuse(KEY, "differs by 0.5", NOW)
    assert store.schedules.lookup(KEY).refused == "differs by 0.5"
    entry = store.schedules.get(KEY)
    assert (entry.state, entry.reason) == (ScheduleState.QUARANTINED, "differs by 0.5")
    assert [event.kind for event in store.jobs.events()] == ["quarantined", "quarantined"]


@only_sqlite
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE schedule_texts SET text = replace(text, 'relu', 'rely')",
        "UPDATE schedules SET parts = replace(parts, 'resnet18', 'resnet19')",
        "UPDATE schedules SET replay_us = replay_us / 2",
        "UPDATE schedules SET device = 'cuda'",
        "UPDATE schedules SET sha256 = CASE substr(sha256, 1, 1) WHEN 'f' THEN '0' ELSE 'f' END || substr(sha256, 2)",
        "UPDATE schedules SET streams = 'one'",
        "UPDATE schedules SET build_s = 0",
        "UPDATE schedules SET provenance = '{}'",
        "UPDATE schedules SET parts = CAST(x'7bff7d' AS TEXT)",
        "DELETE FROM schedule_texts",
    ],
)
def test_damaged(store: Store, statement: str) -> None:
    """Whatever was changed behind our back is never served: it is quarantined, noted, and a miss that says why."""
    store.schedules.save(replace(a_schedule(KEY), build_s=1.0), parts=PARTS, now=NOW)
    tamper(store, statement)
    with pytest.raises(Damaged):
        store.schedules.verified(KEY)
    assert len(store.check()) == 1
    found = store.schedules.lookup(KEY, NOW + 5)
    assert found.stored is None
    assert found.refused is None, "it may be built again"
    assert found.reason is not None
    assert "damaged" in found.reason
    assert store.schedules.get(KEY).state == ScheduleState.QUARANTINED
    (event,) = store.jobs.events()
    assert (event.kind, event.at, event.data) == ("quarantined", NOW + 5, {"key": KEY})
    assert store.check() == [], "what was dealt with is no news"


@only_sqlite
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_flipped_bits(store: Store, data: st.DataObject) -> None:
    """One flipped bit anywhere in the stored JSON or the readable parts never goes unseen."""
    store.schedules.save(a_schedule(KEY), parts=PARTS, now=NOW)
    table, column = data.draw(st.sampled_from([("schedule_texts", "text"), ("schedules", "parts")]))
    with closing(sqlite3.connect(store.home / DATABASE, isolation_level=None)) as connection:
        (blob,) = connection.execute(f"SELECT CAST({column} AS BLOB) FROM {table}").fetchone()
        at, bit = data.draw(st.integers(0, len(blob) - 1)), data.draw(st.integers(0, 7))
        flipped = blob[:at] + bytes([blob[at] ^ (1 << bit)]) + blob[at + 1 :]
        connection.execute(f"UPDATE {table} SET {column} = CAST(? AS TEXT)", (flipped,))
    assert store.schedules.find(KEY) is None


def test_stale(store: Store) -> None:
    """A sound schedule of another format is stale: listed as such, and a miss."""
    other = replace(a_schedule(KEY), format_version=FORMAT_VERSION + 1)
    store.schedules.save(other, parts=PARTS, now=NOW)
    found = store.schedules.lookup(KEY)
    assert found.stored is None
    assert found.reason == (
        f"the stored schedule is stale: written in format {FORMAT_VERSION + 1}; this version reads {FORMAT_VERSION}"
    )
    assert store.schedules.list()[0].state == ScheduleState.STALE


def test_remove_and_get(store: Store) -> None:
    """Keys may be abbreviated while they stay clear; removed ones are gone."""
    keys = ["aaaa0" + "0" * 59, "aaaa1" + "0" * 59, "bbbb0" + "0" * 59]
    for key in keys:
        store.schedules.save(a_schedule(key), parts=PARTS, now=NOW)
    assert store.schedules.get("aaaa1").key == keys[1]
    with pytest.raises(UsageError, match="several keys"):
        store.schedules.get("aaaa")
    for unknown in ("bbb", "%%%%", "cccc", ""):
        with pytest.raises(NotFound):
            store.schedules.get(unknown)
    assert store.schedules.remove([keys[0], keys[2], "unknown"]) == 2
    assert [entry.key for entry in store.schedules.list()] == [keys[1]]


def test_residents(store: Store) -> None:
    """Residents are those of live workers, by schedule, whatever weights they hold."""
    store.schedules.set_residents("1-a", {"k1:w1": 3, "k1:w2": 4, "k2": 5})
    store.schedules.set_residents("2-b", {"k2": 5})
    store.schedules.set_residents("3-c", {"k3": 1})
    assert store.schedules.residents({"1-a", "2-b"}) == {"k1": ["1-a"], "k2": ["1-a", "2-b"]}
    store.schedules.set_residents("1-a", {"k3": 1})
    assert store.schedules.residents({"1-a", "2-b"}) == {"k2": ["2-b"], "k3": ["1-a"]}
    store.schedules.set_residents("1-a", {})
    assert store.schedules.residents({"1-a"}) == {}


def test_find_is_cheap() -> None:
    """Among a thousand schedules one is found in milliseconds."""
    times = []
    with folder_in_memory() as folder, open_store(resolve(folder)) as store:
        for i in range(1000):
            store.schedules.save(a_schedule(key_of(str(i))), parts=PARTS, now=NOW)
        for i in range(200):
            start = time.perf_counter()
            assert store.schedules.find(key_of(str(i * 5))) is not None
            times.append(time.perf_counter() - start)
    assert min(times) < 0.005  # others share the machine


def test_artifacts(store: Store) -> None:
    """Bytes come back by their SHA-256, from files that only we can read."""
    for data in (b"", b"x", bytes(range(256)) * 1000):
        name = store.artifacts.put(data)
        assert store.artifacts.put(data) == name
        assert store.artifacts.get(name) == data
        path = store.home / "artifacts" / name[:2] / name
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert len(list(store.artifacts.names())) == 3
    for unknown in (key_of("unknown"), "../../home.json", ""):
        with pytest.raises(NotFound):
            store.artifacts.get(unknown)


def test_artifact_damaged(store: Store) -> None:
    """A flipped bit in an artifact is seen at each read and by the check; putting the bytes again mends it."""
    name = store.artifacts.put(b"weights")
    path = store.home / "artifacts" / name[:2] / name
    path.write_bytes(b"veights")
    with pytest.raises(Damaged, match=name):
        store.artifacts.get(name)
    assert store.check() == [f"{path}: its bytes have changed (the SHA-256 differs from the name)"]
    store.artifacts.put(b"weights")
    assert store.artifacts.get(name) == b"weights"
    assert store.check() == []


def other_folder(path: Path) -> Path:
    made = path.parents[3] / "elsewhere"
    made.mkdir()
    (made / path.name).write_bytes(b"weights")
    (made / "mine.txt").touch()
    return made


# What is done to an artifact or to the folder that it lies in.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(b"weig"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a folder with files": lambda path: (path.unlink(), (path / "deep").mkdir(parents=True), (path / "a").touch()),
    "a link to sound bytes": lambda path: path.symlink_to(path.rename(path.with_name("aside"))),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "unreadable": lambda path: path.chmod(0),
    "others may write": lambda path: path.chmod(0o666),
    "its folder is a link": lambda path: (shutil.rmtree(path.parent), path.parent.symlink_to(other_folder(path))),
    "its folder is a dangling link": lambda path: (shutil.rmtree(path.parent), path.parent.symlink_to("nothing")),
    "its folder is a file": lambda path: (shutil.rmtree(path.parent), path.parent.touch()),
    "its folder is a pipe": lambda path: (shutil.rmtree(path.parent), os.mkfifo(path.parent)),
    "its folder is read-only": lambda path: (path.write_bytes(b"bad"), path.parent.chmod(0o500)),
    "its folder is closed": lambda path: path.parent.chmod(0),
    "others may write to its folder": lambda path: path.parent.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_to_an_artifact_heals(store: Store, damage: str) -> None:
    """The check names what is there, putting the bytes again mends it, and what a link led to is left alone."""
    name = store.artifacts.put(b"weights")
    path = store.home / "artifacts" / name[:2] / name
    before = (path.parent.lstat().st_mode, path.lstat().st_mode)
    DAMAGES[damage](path)
    if os.geteuid() or damage not in ("unreadable", "its folder is closed", "its folder is read-only"):
        with pytest.raises((Damaged, NotFound)):
            store.artifacts.get(name)
    problems = [] if damage == "unreadable" and not os.geteuid() else store.check()
    assert all(str(path.parent) in line for line in problems)
    assert problems or (damage == "unreadable" and not os.geteuid())
    assert store.artifacts.size(name) >= 0
    store.artifacts.has(name)
    assert store.artifacts.put(b"weights") == name
    assert store.artifacts.get(name) == b"weights"
    if damage not in ("unreadable", "its folder is closed") or os.geteuid():
        assert (path.parent.lstat().st_mode, path.lstat().st_mode) == before
    assert store.check() == []
    elsewhere = store.home.parent / "elsewhere"
    if elsewhere.exists():
        assert sorted(p.name for p in elsewhere.iterdir()) == sorted([name, "mine.txt"])


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damaged_artifact_can_be_removed(store: Store, damage: str) -> None:
    """Pruning meets all of them, and what a link led to is left alone."""
    name = store.artifacts.put(b"weights")
    path = store.home / "artifacts" / name[:2] / name
    DAMAGES[damage](path)
    if os.geteuid() and "its folder" in damage and path.parent.is_dir() and not path.parent.is_symlink():
        path.parent.chmod(0o700)
    if not path.parent.is_file() and not path.parent.is_fifo():
        with store.artifacts.alone():
            for each in store.artifacts.names():
                store.artifacts.remove(each)
    assert list(store.artifacts.names()) == []
    elsewhere = store.home.parent / "elsewhere"
    if elsewhere.exists():
        assert sorted(p.name for p in elsewhere.iterdir()) == sorted([name, "mine.txt"])


def test_artifact_missing(store: Store) -> None:
    """The check names the schedule whose artifact is gone."""
    schedule = a_schedule(KEY, constant=b"c")
    store.schedules.save(schedule, parts=PARTS, now=NOW)
    (problem,) = store.check()
    assert KEY in problem
    assert schedule.program.constants[0].name in problem
