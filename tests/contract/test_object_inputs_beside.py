"""Pictures in an object store are scored while others are still fetched; what goes wrong ends the job as it did."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nimble_jobs import client, patience
from nimble_jobs import spec as specs
from nimble_jobs.data import object_inputs
from nimble_jobs.data.arriving import Arriving
from nimble_jobs.data.listing import list_images
from nimble_jobs.data.object_inputs import Listing
from nimble_jobs.job import JobState
from nimble_jobs.objects import Objects, Stat
from nimble_jobs.spec.formats import SUFFIXES
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import execute, real_station
from nimble_jobs.workloads.context import Stop
from nimble_jobs.workloads.fetching import Fetcher
from tests import cutting, s3
from tests.object_jobs import MODEL, Desk, jpeg, upload, write
from tests.store_samples import queued
from tests.waiting import PATIENCE_S, until

INPUT = "format: images, transform: {resize: 4}"
NAMES = [f"{'cats' if i < 15 else 'dogs'}/{i:02d}.jpg" for i in range(40)]  # five shards of two batches
PICTURES = {name: jpeg(i) for i, name in enumerate(NAMES)}
LAST = NAMES[-1]


def bmp(shade: int) -> bytes:
    """All of them have as many bytes."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(file, "BMP")
    return file.getvalue()


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in a bucket of its own."""
    return f"s3://{s3.bucket(monkeypatch)}/in"


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(tmp_path, capsys)


class Fetches:
    """The names of objects in the order in which they are fetched. `before` is called with each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[str], object]) -> None:
        self.names: list[str] = []
        fetch = Objects.fetch

        def fetched(objects: Objects, name: str, path: Path) -> None:
            self.names.append(name)
            before(name)
            fetch(objects, name, path)

        monkeypatch.setattr(Objects, "fetch", fetched)


def a_shard(folder: Path) -> bool:
    """Whether a shard was written that is not published yet."""
    return any(folder.glob(".fetched.*/*/part-00000.*.npy"))


@pytest.mark.parametrize(
    ("source", "cut"),
    [
        *((source, None) for source in ("", "*/*.jpg", "**/[0-3]*", "dogs", "**")),
        *(("", cut) for cut in range(cutting.WAYS)),
    ],
)
def test_scored_before_the_last_object_is_there(
    source: str, cut: int | None, address: str, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last object comes once a shard is written. Results are those of a folder, also if connections are cut."""
    files = PICTURES | {"dogs/17.jpg": b"no picture", "dogs/.x.jpg": jpeg(1), "a.txt": b""}
    upload(address, files)
    write(desk.folder / "records", files)
    source = f"/{source}".rstrip("/")
    local = desk.run(f"{desk.folder}/records{source}", INPUT, "local")
    monkeypatch.setattr(patience, "_FIRST_S", 0.001)
    fetches = Fetches(monkeypatch, lambda name: name.endswith("39.jpg") and until(lambda: a_shard(desk.folder)))
    if cut is None:
        ran = desk.run(address + source, INPUT, "fetched")
    else:
        with cutting.proxy(s3.endpoint(), cut) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
            ran = desk.run(address + source, INPUT, "fetched")
            assert proxy.cuts >= 2 * len(NAMES)
    assert (ran.code, local.code) == (0, 0), ran.err
    assert any(name.endswith("39.jpg") for name in fetches.names)
    assert desk.results("fetched") == desk.results("local") != []
    errors = [(desk.folder / out / "errors.jsonl").read_text() for out in ("local", "fetched")]
    assert errors[0].replace(f"{desk.folder}/records", address) == errors[1] != ""
    assert desk.copies() == []
    assert desk.event("fetched").data["objects"] == len(set(fetches.names))


def test_of_many_pictures_by_processes(address: str, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_inputs, "_MANY", 4)
    monkeypatch.setattr(object_inputs, "_PIECE", 7)
    monkeypatch.setattr(object_inputs, "usable_cores", lambda: 2)
    upload(address, PICTURES)
    write(desk.folder / "records", PICTURES)
    assert desk.run(str(desk.folder / "records"), INPUT, "local").code == 0
    assert desk.run(address, INPUT, "fetched").code == 0
    assert desk.results("fetched") == desk.results("local") != []
    assert desk.copies() == []


@pytest.mark.parametrize("how", ["vanished", "changed", "changed after it was scored"])
def test_another_writer(how: str, address: str, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job fails as if it had fetched everything first, and nothing of what it scored is published."""
    files = {name.replace(".jpg", ".bmp"): bmp(i) for i, name in enumerate(NAMES)}
    first, last = min(files), max(files)
    upload(address, files)

    def before(name: str) -> None:
        if name != last:
            return
        until(lambda: a_shard(desk.folder))
        if how == "vanished":
            Objects(address).remove([last])
        else:
            upload(address, {last: jpeg(1)} if how == "changed" else {first: bmp(100)})

    Fetches(monkeypatch, before)
    ran = desk.run(address, INPUT, "fetched")
    assert ran.code != 0
    name = first if "scored" in how else last
    assert f"{address}/{name}: {how.split()[0]} while the input was fetched" in ran.err
    assert not list(desk.folder.glob("*fetched/")), "nothing is published"
    assert not list(desk.folder.glob(".fetched*"))
    assert desk.copies() == []
    with desk.cli.store() as store:
        assert [job.state for job in store.jobs.list()] == [JobState.FAILED]


def test_changed_once_all_are_scored(address: str, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job publishes only after the second listing, which tells of the change."""
    files = {name.replace(".jpg", ".bmp"): bmp(i) for i, name in enumerate(NAMES)}
    upload(address, files)
    lists, list_ = [0], Objects.list

    def listed(objects: Objects, prefix: str = "") -> dict[str, Stat]:
        lists[0] += 1
        if lists[0] == 2:
            until(lambda: len(list(desk.folder.glob("*fetched*/**/part-*.id.npy"))) == 5)
            upload(address, {min(files): bmp(100)})
        return list_(objects, prefix)

    monkeypatch.setattr(Objects, "list", listed)
    ran = desk.run(address, INPUT, "fetched")
    assert ran.code != 0
    assert f"{address}/{min(files)}: changed while the input was fetched" in ran.err
    assert lists == [2]
    assert not list(desk.folder.glob("*fetched*/"))
    assert desk.copies() == []


def test_cancelled_while_it_fetches(address: str, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_inputs, "THREADS", 1)
    upload(address, PICTURES)

    def before(name: str) -> None:
        if name == NAMES[20]:
            until(lambda: a_shard(desk.folder))
            with desk.cli.store() as store:
                (job,) = store.jobs.list()
                client.cancel(job.id, store=store)
        elif name > NAMES[20]:
            time.sleep(0.2)  # twenty of them; it is seen four times a second

    fetches = Fetches(monkeypatch, before)
    assert desk.run(address, INPUT, "fetched").code != 0
    assert NAMES[20] in fetches.names
    assert LAST not in fetches.names
    with desk.cli.store() as store:
        assert [job.state for job in store.jobs.list()] == [JobState.CANCELLED]
    assert not list(desk.folder.glob("*fetched*/"))
    assert desk.copies() == []


def test_a_job_that_fails_fetches_no_more(address: str, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for objects that nobody reads any more."""
    monkeypatch.setattr(object_inputs, "THREADS", 1)
    upload(address, PICTURES | dict.fromkeys(NAMES[:30], b"no picture"))
    fetches = Fetches(monkeypatch, lambda name: name > NAMES[30] and time.sleep(0.5))
    ran = desk.run(address, INPUT, "fetched")
    assert ran.code != 0
    assert "of 40 records are bad, more than run.error_threshold 0.5 allows" in ran.err
    assert LAST not in fetches.names
    assert not list(desk.folder.glob("*fetched*/"))
    assert desk.copies() == []


def test_a_job_that_fails_waits_for_no_object(address: str, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for a record end at once, before the fetching is told to."""
    monkeypatch.setattr(object_inputs, "THREADS", 1)
    upload(address, PICTURES | dict.fromkeys(NAMES[:24], b"no picture"))
    closed, close, ends = threading.Event(), Fetcher.close, list[bool]()

    def closes(fetcher: Fetcher) -> None:
        closed.set()
        close(fetcher)

    monkeypatch.setattr(Fetcher, "close", closes)
    Fetches(monkeypatch, lambda name: name == NAMES[25] and ends.append(closed.wait(PATIENCE_S)))
    ran = desk.run(address, INPUT, "fetched")
    assert "of 40 records are bad, more than run.error_threshold 0.5 allows" in ran.err
    assert ends == [True]


class Attempts:
    """Runs a job's attempts in this process."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        (folder / "model.py").write_text(MODEL)
        self.spec = {
            "version": 1,
            "name": "doubled",
            "kind": "score",
            "model": {"source": f"python:{folder}/model.py:double"},
            "input": {"source": address, "format": "images", "batch_size": 4, "transform": {"resize": 4}},
            "output": {"path": str(folder / "fetched"), "format": "npy", "fields": ["id", "logits"], "shard_size": 8},
            "schedule": {"on_miss": "eager"},
        }

    def submit(self) -> None:
        with open_store(resolve(str(self.folder / "home"))) as store:
            spec = specs.dump(specs.restore(self.spec))
            queued(store, spec=spec, name="doubled", kind="score", allow_python=[str(self.folder)], now=time.time())

    def run(self, wish: Callable[[], Stop] = lambda: Stop.GO, moved: Callable[[], None] = lambda: None) -> JobState:
        with open_store(self.folder / "home") as store:
            job = store.jobs.claim("w", device="cpu", now=time.time() + 1e6)
            assert job is not None
            station = real_station(store, "w", "cpu", None)
            execute(job, station, wish=wish, on_move=moved)
            station.close()
            return store.jobs.get(job.id).state

    def shards(self) -> set[Path]:
        return set(self.folder.glob(".fetched.*/*/part-*.id.npy"))


def test_drained_while_it_fetches(address: str, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt fetches the rest, and scores the shards that are missing."""
    monkeypatch.setattr(object_inputs, "THREADS", 1)
    upload(address, PICTURES)
    write(desk.folder / "records", PICTURES)
    assert desk.run(str(desk.folder / "records"), INPUT, "local").code == 0
    draining = threading.Event()

    def before(name: str) -> None:
        if name == NAMES[20]:
            until(lambda: a_shard(desk.folder))
            draining.set()
        elif name > NAMES[20]:
            time.sleep(0.2)  # a job that drains ends when it has to wait for an object

    fetches = Fetches(monkeypatch, before)
    attempts = Attempts(desk.folder, address)
    attempts.submit()
    state = attempts.run(lambda: Stop.DRAIN if draining.is_set() else Stop.GO)
    assert state is JobState.QUEUED
    shards = {path.name: path.stat().st_ino for path in attempts.shards()}
    assert shards
    assert LAST not in fetches.names
    begun = set(fetches.names)
    fetches.names.clear()
    assert attempts.run() is JobState.SUCCEEDED
    assert len(begun & set(fetches.names)) <= 2  # what was on its way
    assert begun | set(fetches.names) == set(NAMES)
    assert desk.results("fetched") == desk.results("local") != []
    assert shards.items() <= {path.name: path.stat().st_ino for path in (desk.folder / "fetched").iterdir()}.items()


def test_a_job_whose_objects_do_not_come_stands_still(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not count as progress that its thread looks again and again whether they came."""
    upload(address, PICTURES)
    moves, waits = [0], list[str]()

    def moved() -> None:
        moves[0] += 1

    def before(name: str) -> None:
        if name == LAST:
            until(lambda: len(list(tmp_path.glob(".fetched.*/*/part-*.id.npy"))) == 4)
            until(still)
            waits.append(name)

    def still() -> bool:
        then = moves[0]
        time.sleep(0.5)
        return then == moves[0]

    Fetches(monkeypatch, before)
    attempts = Attempts(tmp_path, address)
    attempts.submit()
    assert attempts.run(moved=moved) is JobState.SUCCEEDED
    assert waits == [LAST]
    assert moves[0] > 10


@pytest.mark.parametrize(
    "pattern",
    ["*.jpg", "*", "**", "**/*.jpg", "**/b/**/c.jpg", "a*/[bx]/c.jp?", "a**/c.jpg"],
)
def test_a_glob_finds_what_it_would_find_in_a_folder(pattern: str, tmp_path: Path) -> None:
    names = ["a/b/c.jpg", "a/c.jpg", "ab/x/c.jpg", "a/b/d/c.jpg", "c.jpg", "d.jpg", "[a]/c.jpg", "a/b/b/e.jpg"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"12")
    objects = {name: Stat(size=2, version="1", modified_at=None) for name in sorted(names)}
    arriving = Arriving(Listing(address="s3://b/in", rest=pattern, objects=objects), tmp_path)
    assert list(arriving.stamps.names) == list_images(f"{tmp_path}/{pattern}", SUFFIXES["images"])[1]
    for number, name in enumerate(objects):
        arriving.put(number, (tmp_path / name).stat())
    arriving.wait(np.arange(len(arriving)))
    assert arriving.stamps.moved() == {}
