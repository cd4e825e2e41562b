"""Files of the shared place go once no schedule names them; what is young, named by then, or of others stays."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from nimble_jobs.errors import DataError, ObjectTrouble, StoreError
from nimble_jobs.objects import Objects
from nimble_jobs.store import Store, open_store, shared_prune
from nimble_jobs.store.home import resolve
from nimble_jobs.store.shared_artifacts import YOUNG_S, SharedArtifacts
from nimble_jobs.store.shared_files import SharedFile
from nimble_jobs.store.shared_prune import SharedRemovals, SharedRemoved, look_shared, remove_shared
from tests import cutting, postgres, s3
from tests.cli import Cli
from tests.store_samples import NOW, PARTS, a_schedule, key_of

OLD_S = YOUNG_S + 60
FOREIGN = [
    "notes/ab.txt",
    "ab/README",
    "cd/" + "ab" * 32,
    "ab/" + "AB" * 32,
    "databases/notes.json",
    "abc/" + "ab" * 32,
]


@dataclass
class Place:
    """A shared folder, or an address."""

    where: str

    def write(self, path: str, data: bytes) -> None:
        if self.where.startswith("s3:"):
            Objects(self.where).write(path, data)
        else:
            file = Path(self.where) / path
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)

    def remove(self, path: str) -> None:
        if self.where.startswith("s3:"):
            Objects(self.where).remove([path])
        else:
            (Path(self.where) / path).unlink()

    def paths(self) -> set[str]:
        if self.where.startswith("s3:"):
            return set(Objects(self.where).list())
        return {str(path.relative_to(self.where)) for path in Path(self.where).rglob("*") if path.is_file()}

    def names(self) -> set[str]:
        """Names of artifacts."""
        return {path[3:] for path in self.paths() if path.partition("/")[0] not in ("databases", "notes", "abc")}


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Where files are shared."""
    if request.param == "folder":
        (tmp_path / "shared").mkdir()
        place = str(tmp_path / "shared")
    else:
        place = f"s3://{s3.bucket(monkeypatch)}/artifacts"
    monkeypatch.setenv("NIMBLE_JOBS_CACHE_SHARED", place)
    return Place(place)


only_folder = pytest.mark.parametrize("place", ["folder"], indirect=True)  # its files can be made old
only_s3 = pytest.mark.parametrize("place", ["s3"], indirect=True)


@pytest.fixture
def url() -> Iterator[str]:
    """A database."""
    with postgres.schema() as url:
        yield url


@pytest.fixture
def store(place: Place, url: str, tmp_path: Path) -> Iterator[Store]:
    """A state folder over it that shares files."""
    with open_store(resolve(str(tmp_path / "home")), url) as store:
        yield store


def save(store: Store, data: bytes) -> str:
    """Store an artifact and a schedule that needs it. Returns the artifact's name."""
    name = store.artifacts.put(data)
    store.schedules.save(a_schedule(key_of(name), constant=data), parts=PARTS, now=NOW)
    return name


def look(store: Store, *, young_s: float = 0.0) -> SharedRemovals:
    found = look_shared(store, young_s=young_s)
    assert found is not None
    return found


def make_old(place: Place, *names: str, by_s: float = OLD_S) -> None:
    for name in names:
        os.utime(Path(place.where) / name[:2] / name, (time.time() - by_s,) * 2)


def test_what_no_schedule_names_goes(store: Store, place: Place) -> None:
    """Files of schedules that are gone or about to go; not those of others, and no file that is not ours."""
    kept, gone, going, never = save(store, b"kept"), save(store, b"gone"), save(store, b"going"), b"never saved"
    stray = store.artifacts.put(never)
    for path in FOREIGN:
        place.write(path, b"foreign")
    store.schedules.remove([key_of(gone)])
    before = place.paths()
    found = look_shared(store, going=[key_of(going)], young_s=0.0)
    assert found is not None
    assert (found.place, found.refused, found.trouble) == (place.where, None, None)
    assert set(found.files) == {gone, going, stray}
    assert found.bytes == len(b"gone") + len(b"going") + len(never)
    assert place.paths() == before
    store.schedules.remove([key_of(going)])
    assert remove_shared(store, found) == SharedRemoved(files=3, bytes=found.bytes)
    assert place.paths() == before - {f"{name[:2]}/{name}" for name in (gone, going, stray)}
    assert store.artifacts.has(gone)  # the state folder's own files are pruned elsewhere
    assert kept in place.names()
    assert look(store).files == {}


def test_young_files_stay(store: Store, place: Place) -> None:
    """A build that has written its files commits its rows soon."""
    name = store.artifacts.put(b"about to be saved")
    assert look(store, young_s=YOUNG_S).files == {}
    assert set(look(store).files) == {name}


@only_folder
def test_age_by_the_clock_of_the_place(store: Store, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day, by the time that it gives to a new file; what this machine's clock says does not matter."""
    young, old = store.artifacts.put(b"young"), store.artifacts.put(b"old")
    make_old(place, young, by_s=YOUNG_S - 60)
    make_old(place, old)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert set(look(store, young_s=YOUNG_S).files) == {old}


def test_a_row_that_comes_late_keeps_its_file(store: Store, place: Place) -> None:
    """Rows are read again just before files go."""
    late, gone = store.artifacts.put(b"late"), store.artifacts.put(b"gone")
    found = look(store)
    assert set(found.files) == {late, gone}
    store.schedules.save(a_schedule(key_of("late"), constant=b"late"), parts=PARTS, now=NOW)
    assert remove_shared(store, found) == SharedRemoved(files=1, bytes=4)
    assert place.names() == {late}


def test_a_row_that_comes_between_batches(store: Store, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if removal has begun."""
    monkeypatch.setattr(shared_prune, "_AT_ONCE", 1)
    texts = {store.artifacts.put(data): data for data in (b"1", b"2", b"3")}
    first, second, third = sorted(texts)
    remove = SharedArtifacts.remove

    def and_save(self: SharedArtifacts, names: list[str]) -> None:
        remove(self, names)
        if names == [first]:
            store.schedules.save(a_schedule(key_of("late"), constant=texts[second]), parts=PARTS, now=NOW)

    monkeypatch.setattr(SharedArtifacts, "remove", and_save)
    found = look(store)
    assert remove_shared(store, found) == SharedRemoved(files=2, bytes=2)
    assert place.names() == {second}
    assert third not in place.names()


def test_a_file_that_is_written_again_stays(store: Store, place: Place) -> None:
    """Its row may come any time."""
    name, gone = store.artifacts.put(b"again"), store.artifacts.put(b"gone")
    found = look(store)
    time.sleep(1.1)  # object stores give whole seconds
    place.write(f"{name[:2]}/{name}", b"again")
    assert remove_shared(store, found) == SharedRemoved(files=1, bytes=4)
    assert place.names() == {name}
    assert gone not in place.names()


@only_folder
def test_a_file_that_is_written_again_by_a_clock_that_was_set_back_stays(store: Store, place: Place) -> None:
    name = store.artifacts.put(b"again")
    make_old(place, name)
    found = look(store, young_s=YOUNG_S)
    assert set(found.files) == {name}
    make_old(place, name, by_s=2 * OLD_S)
    assert remove_shared(store, found) == SharedRemoved()
    assert place.names() == {name}


@only_folder
def test_a_build_makes_old_files_young(store: Store, place: Place, url: str, tmp_path: Path) -> None:
    """Another machine builds what was removed, and finds its file there: it writes it again before its row is there."""
    name = store.artifacts.put(b"again")
    make_old(place, name)
    found = look(store, young_s=YOUNG_S)
    assert set(found.files) == {name}
    with open_store(resolve(str(tmp_path / "other")), url) as other:
        assert other.artifacts.put(b"again") == name
        assert remove_shared(store, found) == SharedRemoved()
        assert look(store, young_s=YOUNG_S).files == {}


@only_folder
def test_links_and_folders_stay(store: Store, place: Place, tmp_path: Path) -> None:
    """Under names of artifacts too."""
    for n, path in enumerate(["ab/" + "ab" * 32, "cd/" + "cd" * 32]):
        (Path(place.where) / path).parent.mkdir()
        if n == 0:
            (Path(place.where) / path).symlink_to(tmp_path)
        else:
            (Path(place.where) / path).mkdir()
    (Path(place.where) / "ef").symlink_to(tmp_path)
    (tmp_path / ("ef" * 32)).write_bytes(b"elsewhere")
    name = store.artifacts.put(b"a file")
    assert set(look(store).files) == {name}


def test_another_database(store: Store, place: Place, tmp_path: Path) -> None:
    """Each knows its own schedules only, so neither removes anything, until the mark of the other one is gone."""
    with postgres.schema() as url, open_store(resolve(str(tmp_path / "other")), url) as other:
        name = store.artifacts.put(b"ours")
        marked = place.paths() - {f"{name[:2]}/{name}"}
        assert look(store).refused is None
        other.artifacts.put(b"ours")  # the file is there already
        (mark,) = place.paths() - marked - {f"{name[:2]}/{name}"}
        for one in (store, other):
            found = look(one)
            assert found.files == {}
            assert found.refused is not None
            assert "files of another database are there too (databases/" in found.refused
        assert f"{mark}: postgresql+psycopg://postgres@/postgres" in str(look(store).refused)
        place.write(mark, b"[")
        assert f"{mark}: a database whose mark is damaged" in str(look(store).refused)
    place.remove(mark)
    assert remove_shared(store, look(store)) == SharedRemoved(files=1, bytes=4)


def test_files_without_a_mark(store: Store, place: Place) -> None:
    """Whose they are cannot be told, before a build over this database has shared a file."""
    place.write("ab/" + "ab" * 32, b"of somebody")
    found = look(store)
    assert (found.files, found.trouble) == ({}, None)
    assert "it has no mark of this database (databases/" in str(found.refused)
    store.artifacts.put(b"ours")
    assert len(look(store).files) == 2


def test_on_sqlite(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A SQLite file shares nothing, and removes nothing; what is in the state folder goes all the same."""
    place.write("ab/" + "ab" * 32, b"of somebody")
    cli = Cli(tmp_path / "home", capsys)
    with cli.store() as store:
        store.artifacts.put(b"stray")
    answer = cli("cache", "prune", "--yes")
    assert answer.code == 0, answer.err
    assert answer.lines == [
        f"cache.shared: nothing is removed from {place.where}: only state folders over PostgreSQL share files",
        "removed 0 schedules and 1 artifact, 5 B",
    ]
    assert len(place.paths()) == 1


def test_an_empty_place(store: Store, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to remove, and nothing is written."""
    assert (look(store).files, look(store).refused, place.paths()) == ({}, None, set())
    monkeypatch.delenv("NIMBLE_JOBS_CACHE_SHARED")
    with open_store(resolve(str(tmp_path / "alone"))) as alone:
        assert look_shared(alone) is None


def test_a_place_that_says_no_times(store: Store, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell which of its files are young."""
    store.artifacts.put(b"stray")
    monkeypatch.setattr(SharedArtifacts, "mark", lambda _self: None)
    assert look(store).refused == "it does not say when a file was written"


def test_a_removal_that_does_nothing(store: Store, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a driver that keeps refusals to itself: what is there still was not removed."""
    store.artifacts.put(b"stray")
    found = look(store)
    monkeypatch.setattr(SharedArtifacts, "remove", lambda _self, _names: None)
    removed = remove_shared(store, found)
    assert (removed.files, removed.unsure) == (0, 0)
    assert removed.trouble == f"{place.where}: 1 file could not be removed; may this user do that?"


def test_another_place_meanwhile(store: Store, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is for the place that was looked at."""
    store.artifacts.put(b"stray")
    found = look(store)
    (tmp_path / "new").mkdir()
    monkeypatch.setenv("NIMBLE_JOBS_CACHE_SHARED", str(tmp_path / "new"))
    with open_store(store.home, store._database.url.render_as_string(hide_password=False)) as again:
        removed = remove_shared(again, found)
    assert removed.trouble == f"no longer {place.where}, so nothing was removed there"
    assert len(place.names()) == 1


class Vanishing(cutting.Proxy):
    """Passes requests on, up to the second deletion. The answer to that is lost, as is all that follows."""

    deletions = 0

    def _respond(self, client: socket.socket, request: bytes) -> None:
        self.deletions += b"?delete" in request.partition(b"\r\n")[0]
        answer = self._answer(request) if self.deletions <= 2 else b""
        if self.deletions < 2:
            client.sendall(answer)
            return
        self.deletions += 1
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@only_s3
def test_a_connection_that_is_lost_in_the_middle(
    store: Store, place: Place, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was removed is counted, and what may have been removed is, apart; another prune does the rest."""
    monkeypatch.setattr(shared_prune, "_AT_ONCE", 2)
    for n in range(6):
        store.artifacts.put(b"%d" % n)
    parts = urlsplit(s3.endpoint())
    proxy = Vanishing((str(parts.hostname), int(parts.port or 0)), 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
    try:
        with open_store(resolve(str(tmp_path / "other")), url) as other:
            found = look(other)
            assert len(found.files) == 6
            removed = remove_shared(other, found)
            assert (removed.files, removed.bytes, removed.unsure) == (2, 2, 2)
            assert str(removed.trouble).endswith("the object store did not answer")
            after = look(other)
            assert (after.files, after.refused) == ({}, None)
            assert str(after.trouble).endswith("the object store did not answer")
    finally:
        proxy.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint())
    assert len(place.names()) == 2
    assert remove_shared(store, look(store)) == SharedRemoved(files=2, bytes=2)


@only_folder
def test_the_command(
    place: Place, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how many files would go and how large they are, asks, and removes what only removed schedules named."""
    monkeypatch.setenv("NIMBLE_JOBS_DB", url)
    cli = Cli(tmp_path / "home", capsys)
    with cli.store() as store:
        kept, gone = save(store, b"kept"), save(store, b"gone and long")
        store.schedules.quarantine(key_of(gone), "odd", NOW)
    assert cli("cache", "prune").lines == ["nothing to remove"]
    make_old(place, kept, gone)
    assert cli("cache", "prune").lines == ["nothing to remove"]
    would = cli("cache", "prune", "--quarantined", "--dry-run")
    assert would.lines[-1].startswith("would remove 1 schedule and 1 artifact, ")
    assert would.lines[-1].endswith(f", and 1 file, 13 B, in {place.where}")
    assert place.names() == {kept, gone}
    asked = cli("cache", "prune", "--quarantined")
    assert asked.code == 2
    assert f"1 file, 13 B, in {place.where}? Not a terminal" in asked.err
    assert cli("cache", "rm", key_of(gone), "--yes", "--json").json["shared"] is None
    assert place.names() == {kept, gone}
    alone = cli("cache", "prune", "--yes", "--json")
    assert alone.code == 0, alone.err
    assert alone.json["shared"] == {
        "place": place.where,
        "files": 1,
        "bytes": 13,
        "problem": None,
        "removed_files": 1,
        "removed_bytes": 13,
        "unsure_files": 0,
    }
    assert place.names() == {kept}
    assert cli("cache", "verify").code == 0


@only_folder
@pytest.mark.parametrize("error", [StoreError, ObjectTrouble, DataError])
def test_the_command_when_removal_breaks_off(
    error: Callable[[str], Exception],
    place: Place,
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says what went, here and there, and why it ended; so does JSON. A place that is away is an error, too."""
    monkeypatch.setenv("NIMBLE_JOBS_DB", url)
    monkeypatch.setattr(shared_prune, "_AT_ONCE", 1)
    cli = Cli(tmp_path / "home", capsys)
    with cli.store() as store:
        names = [store.artifacts.put(data) for data in (b"1", b"2", b"3", b"4", b"5")]
    make_old(place, *names)
    remove, calls = SharedArtifacts.remove, list[object]()

    def broken(self: SharedArtifacts, names: list[str]) -> None:
        calls.append(names)
        if len(calls) % 2 == 0:
            raise error("the cable is cut")
        remove(self, names)

    monkeypatch.setattr(SharedArtifacts, "remove", broken)
    answer = cli("cache", "prune", "--yes")
    assert answer.code == 1
    assert answer.lines == [
        f"removed 0 schedules and 5 artifacts, 5 B, and 1 file, 1 B, in {place.where}, and perhaps 1 more",
        "nimble-jobs: cache.shared: the cable is cut",
    ]
    again = cli("cache", "prune", "--yes", "--json")
    assert again.code == 1
    assert (again.json["shared"]["removed_files"], again.json["shared"]["problem"]) == (1, "the cable is cut")
    monkeypatch.undo()
    monkeypatch.setenv("NIMBLE_JOBS_DB", url)
    monkeypatch.setenv("NIMBLE_JOBS_CACHE_SHARED", str(tmp_path / "nowhere"))
    away = cli("cache", "prune", "--yes")
    assert away.code == 1
    assert away.lines == [
        "nothing to remove",
        f"nimble-jobs: cache.shared: {tmp_path / 'nowhere'}: No such file or directory",
    ]


def test_times_of_other_drivers() -> None:
    """They are read where they name a zone; a file without a time is never old."""
    from nimble_jobs.objects import _stat

    assert _stat({"updated": "2027-01-15T08:00:00.000Z"}).modified_at == NOW
    assert _stat({"last_modified": "yesterday"}).modified_at is None
    assert _stat({"LastModified": "2027-01-15T08:00:00"}).modified_at is None
    assert _stat({}).modified_at is None
    assert not shared_prune._old(SharedFile(size=1, modified_at=None), NOW, 0.0)
