"""A SQLite database belongs to one state folder, by whose locks its workers are known."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from nimble_jobs.errors import StoreError
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import DATABASE, resolve
from tests.cli import Cli
from tests.store_samples import NOW, submit


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SQLite file beside the state folders, which NIMBLE_JOBS_DB names."""
    path = tmp_path / "shared.db"
    monkeypatch.setenv("NIMBLE_JOBS_DB", f"sqlite:///{path}")
    return path


def folder(tmp_path: Path, name: str) -> Path:
    return resolve(str(tmp_path / name))


def run_job(store: Store, worker: str) -> str:
    job = submit(store)
    assert store.jobs.claim(worker, device="cpu", now=NOW) is not None
    return job.id


def unmark(file: Path) -> None:
    """As an earlier version made the file."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DROP TABLE state_folder")


def test_another_folder_is_refused(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would take running jobs away from workers whose locks it does not see. Nothing changes in the file."""
    mine, other = folder(tmp_path, "mine"), folder(tmp_path, "other")
    with open_store(mine) as store, store.workers.hold({"role": "worker"}) as lease:
        job = run_job(store, lease.id)
        before = file.read_bytes()
        with pytest.raises(StoreError, match=f"belongs to state folder {mine}, not to {other}.*PostgreSQL"):
            open_store(other)
        for command in (["ls"], ["worker", "start", "--max-idle", "1s"], ["doctor"]):
            answer = Cli(other, capsys)(*command)
            assert answer.code != 0
            assert str(mine) in answer.out + answer.err
            assert "Traceback" not in answer.out + answer.err
        assert file.read_bytes() == before
        assert store.jobs.get(job).state is JobState.RUNNING
    assert not (other / "folder.json").exists()


def test_a_folder_may_move_and_its_copy_is_another(tmp_path: Path, file: Path) -> None:
    """The id moves with the folder. A copy has it too, and is refused as long as the folder is where it was."""
    mine = folder(tmp_path, "mine")
    with open_store(mine) as store:
        job = submit(store)
    shutil.copytree(mine, tmp_path / "copy")
    with pytest.raises(StoreError, match=f"{tmp_path / 'copy'} is a copy of it"):
        open_store(folder(tmp_path, "copy"))
    mine.rename(tmp_path / "moved")
    with open_store(folder(tmp_path, "moved")) as store:
        assert store.jobs.get(job.id) == job
    with pytest.raises(StoreError, match=f"belongs to state folder {tmp_path / 'moved'}"):
        open_store(folder(tmp_path, "copy"))
    shutil.rmtree(tmp_path / "moved")
    with pytest.raises(StoreError, match=f"if {tmp_path / 'moved'} is gone, move the file to"):
        open_store(folder(tmp_path, "third"))


def test_a_folder_that_was_made_anew(tmp_path: Path, file: Path) -> None:
    """At the same place it is the owner again, unless a job runs in a worker of which it knows nothing."""
    mine = folder(tmp_path, "mine")
    with open_store(mine) as store:
        kept = submit(store)
    shutil.rmtree(mine)
    assert folder(tmp_path, "mine") == mine
    with open_store(mine) as store:
        assert store.jobs.get(kept.id).state is JobState.QUEUED
        assert store.jobs.claim("0-gone", device="cpu", now=NOW) is not None
    shutil.rmtree(mine)
    assert folder(tmp_path, "mine") == mine
    with pytest.raises(StoreError, match=f"its job {kept.id} runs.*stop all of its workers, and move the file to"):
        open_store(mine)


def test_the_database_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no mark, so a moved or copied folder works; no other folder may open it by its address."""
    monkeypatch.delenv("NIMBLE_JOBS_DB", raising=False)
    mine = folder(tmp_path, "mine")
    with open_store(mine) as store:
        job = submit(store)
    with closing(sqlite3.connect(mine / DATABASE)) as connection:
        assert connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'state_folder'").fetchone() is None
    shutil.copytree(mine, tmp_path / "copy")
    mine.rename(tmp_path / "moved")
    for name in ("copy", "moved"):
        with open_store(folder(tmp_path, name)) as store:
            assert store.jobs.get(job.id) == job
    with pytest.raises(StoreError, match=f"belongs to state folder {tmp_path / 'moved'}, not to"):
        open_store(folder(tmp_path, "other"), f"sqlite:///{tmp_path / 'moved' / DATABASE}")
    with open_store(folder(tmp_path, "moved"), f"sqlite:///{tmp_path / 'moved' / DATABASE}") as store:
        assert store.jobs.get(job.id) == job


def test_a_link_in_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database of a folder may be a link to a larger disk, but not in two folders to the same file."""
    monkeypatch.delenv("NIMBLE_JOBS_DB", raising=False)
    mine, other = folder(tmp_path, "mine"), folder(tmp_path, "other")
    for each in (mine, other):
        (each / DATABASE).symlink_to(tmp_path / "big.db")
    for _ in range(2):
        open_store(mine).close()
    with pytest.raises(StoreError, match=f"belongs to state folder {mine}"):
        open_store(other)


def test_a_file_moved_into_a_folder_becomes_its_own(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a database whose folder was lost can be used again, but not while workers of the other folder are alive."""
    mine, other = folder(tmp_path, "mine"), folder(tmp_path, "other")
    with open_store(mine) as store:
        job = submit(store)
        monkeypatch.delenv("NIMBLE_JOBS_DB")
        with store.workers.hold({"role": "worker"}):
            shutil.copy(file, other / DATABASE)
            with pytest.raises(StoreError, match="stop the workers there first"):
                open_store(other)
    for _ in range(2):
        with open_store(other) as store:
            assert store.jobs.get(job.id) == job


def test_a_file_of_an_earlier_version(tmp_path: Path, file: Path) -> None:
    """The first folder that opens it gets it, except while one of its jobs may run in a worker of another folder."""
    mine, other = folder(tmp_path, "mine"), folder(tmp_path, "other")
    with open_store(mine) as store, store.workers.hold({"role": "worker"}) as lease:
        job = run_job(store, lease.id)
        unmark(file)
        expected = f"its job {job} runs, but not in a worker that state folder {other} knows"
        with pytest.raises(StoreError, match=expected):
            open_store(other)
        open_store(mine).close()
        with pytest.raises(StoreError, match=f"belongs to state folder {mine}"):
            open_store(other)
        store.jobs.requeue(job, 1, reason="test", now=NOW)
        unmark(file)
    open_store(other).close()
    with pytest.raises(StoreError, match=f"belongs to state folder {other}"):
        open_store(mine)


def test_a_file_that_takes_the_place_of_the_open_one(tmp_path: Path, file: Path) -> None:
    """It is used if it is a backup, and refused if it belongs to another folder."""
    mine, other = folder(tmp_path, "mine"), folder(tmp_path, "other")
    theirs = tmp_path / "theirs.db"
    open_store(other, f"sqlite:///{theirs}").close()
    with open_store(mine) as store:
        job = submit(store)
        shutil.copy(file, tmp_path / "backup.db")
        (tmp_path / "backup.db").rename(file)
        assert store.jobs.get(job.id) == job
        theirs.rename(file)
        with pytest.raises(StoreError, match=f"belongs to state folder {other}, not to {mine}"):
            store.jobs.get(job.id)
