"""Which state folder is used, and which are refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import tempfile
from pathlib import Path

import pytest

from nimble_jobs.errors import Damaged, StateFolderRefused, StoreError
from nimble_jobs.store import open_store
from nimble_jobs.store.home import DATABASE, MARKER, choose, resolve
from tests.store_samples import NOW, open_as, submit
from tests.waiting import PATIENCE_S

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument wins over NIMBLE_JOBS_HOME, that over ./cache, and that over the user's cache folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("NIMBLE_JOBS_HOME", raising=False)
    assert choose(None) == tmp_path / "user" / "nimble-jobs"
    (tmp_path / "cache").mkdir()
    assert choose(None) == tmp_path / "cache"
    monkeypatch.setenv("NIMBLE_JOBS_HOME", str(tmp_path / "env"))
    assert choose(None) == tmp_path / "env"
    assert choose("named") == tmp_path / "named"


def test_made_private(tmp_path: Path) -> None:
    """A new state folder is ours alone, as is all that the store puts into it."""
    old = os.umask(0)
    try:
        home = resolve(str(tmp_path / "a" / "home"))
        with open_store(home) as store, store.workers.hold({}):
            store.artifacts.put(b"x")
    finally:
        os.umask(old)
    assert {mode(path) for path in [home, *home.rglob("*")] if path.is_dir()} == {0o700}
    assert mode(home / DATABASE) == 0o600
    assert not [path for path in home.rglob("*") if mode(path) & 0o022]


def test_tightened(tmp_path: Path) -> None:
    """A folder that others may only read, as a fresh checkout's `cache` is, is closed to them."""
    home = tmp_path / "cache"
    home.mkdir()
    home.chmod(0o755)
    assert resolve(str(home)) == home
    assert mode(home) == 0o700


@pytest.mark.parametrize("bits", [0o775, 0o757, 0o1777])
def test_writable_by_others(tmp_path: Path, bits: int) -> None:
    """A folder that others can write to is refused, as is such a subfolder; nothing is changed."""
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(bits)
    with pytest.raises(StateFolderRefused, match=f"others can write to it .mode {bits:04o}."):
        resolve(str(home))
    assert mode(home) == bits
    home.chmod(0o700)
    resolve(str(home))
    (home / "artifacts").chmod(bits)
    with pytest.raises(StateFolderRefused, match="artifacts"):
        resolve(str(home))


@needs_root
def test_owned_by_another(tmp_path: Path) -> None:
    """A folder of somebody else is refused."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    with pytest.raises(StateFolderRefused, match=f"belongs to user {NOBODY}"):
        resolve(str(home))


@needs_root
def test_read_only() -> None:
    """A folder, or a database, that we may not write is refused with a sentence, in another user's process."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folder is closed to other users, time and again
        _check_read_only(Path(folder))


def _check_read_only(folder: Path) -> None:
    folder.chmod(0o711)
    home = resolve(str(folder / "home"))
    open_store(home).close()
    for path in [home, *home.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    found = []
    for folder_mode, database_mode in [(0o500, 0o600), (0o700, 0o400), (0o700, 0o600)]:
        (home / DATABASE).chmod(database_mode)
        home.chmod(folder_mode)
        process = spawn.Process(target=open_as, args=(NOBODY, str(home), results))
        process.start()
        found.append(results.get(timeout=PATIENCE_S))
        process.join(PATIENCE_S)
        process.close()
    results.close()
    assert found[0][0] == "StoreTrouble"
    assert "read-only" in found[0][1]
    assert found[1][0] == "StoreTrouble"
    assert "cannot be written" in found[1][1]
    assert found[2] == ("none", "")


def test_file_in_the_way(tmp_path: Path) -> None:
    """A path that is no folder is an error that names it."""
    (tmp_path / "home").write_text("x")
    for path in (tmp_path / "home", tmp_path / "home" / "below"):
        with pytest.raises(StoreError, match="home"):
            resolve(str(path))


@pytest.mark.parametrize(("damage", "words"), [("missing", "is missing"), ("empty", "is empty")])
def test_vanished_database(tmp_path: Path, damage: str, words: str) -> None:
    """An initialised folder without its database is refused: it must not begin anew in silence."""
    home = resolve(str(tmp_path / "home"))
    open_store(home).close()
    assert json.loads((home / MARKER).read_text())["format"] == 1
    if damage == "missing":
        (home / DATABASE).unlink()
    else:
        (home / DATABASE).write_bytes(b"")
    for _ in range(2):
        with pytest.raises(StoreError, match=words):
            open_store(home)
    (home / MARKER).unlink()
    open_store(home).close()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}'])
def test_marker(tmp_path: Path, text: str) -> None:
    """A marker that is not ours, or of another format, is an error that names the file."""
    home = resolve(str(tmp_path / "home"))
    open_store(home).close()
    (home / MARKER).write_text(text)
    with pytest.raises(StoreError, match=MARKER):
        open_store(home)


def test_interrupted_initialisation(tmp_path: Path) -> None:
    """A folder whose first process died before the database was complete is initialised by the next."""
    home = resolve(str(tmp_path / "home"))
    (home / DATABASE).write_bytes(b"")
    with open_store(home) as store:
        submit(store)
        assert store.check() == []


def test_smashed_header(tmp_path: Path) -> None:
    """A database with a smashed header is reported as damaged."""
    home = resolve(str(tmp_path / "home"))
    open_store(home).close()
    with (home / DATABASE).open("r+b") as file:
        file.write(b"\0" * 64)
    with pytest.raises(Damaged, match=DATABASE):
        open_store(home)


def test_smashed_pages(tmp_path: Path) -> None:
    """With smashed pages the store raises Damaged or its check says so; there is no other error."""
    home = resolve(str(tmp_path / "home"))
    with open_store(home) as store:
        for i in range(50):
            submit(store, str(i))
    size = (home / DATABASE).stat().st_size
    seen = 0
    for page in range(1, size // 4096):
        original = (home / DATABASE).read_bytes()
        with (home / DATABASE).open("r+b") as file:
            file.seek(page * 4096)
            file.write(b"\xa5" * 4096)
        try:
            with open_store(home) as store:
                seen += bool(store.check())
                store.jobs.list()
                store.jobs.claim("0-w", device="cpu", now=NOW)
        except Damaged:
            seen += 1
        (home / DATABASE).write_bytes(original)
    assert seen >= size // 4096 - 1


def test_gone_meanwhile(tmp_path: Path) -> None:
    """A state folder that vanishes is a sentence for those who use it, also for a worker that tells its status."""
    home = resolve(str(tmp_path / "home"))
    with open_store(home) as store, store.workers.hold({}) as lease:
        home.rename(tmp_path / "elsewhere")
        for use in (lambda: lease.update(status="busy"), lambda: store.artifacts.put(b"x"), lambda: open_store(home)):
            with pytest.raises(StoreError, match="home"):
                use()
        with pytest.raises(StoreError, match="home"):
            store.workers.hold({})
