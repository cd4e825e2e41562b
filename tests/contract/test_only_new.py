"""Jobs that score only what is new: nothing is lost, nothing is scored twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.timer_tables import TickRow, TimerRow
from tests.cli import Cli
from tests.inbox import Inbox, age, counts


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


@pytest.fixture
def inbox(store: Store, tmp_path: Path) -> Inbox:
    return Inbox(store, tmp_path)


def test_three_nights(inbox: Inbox) -> None:
    """Each run scores what came since; a file with an old time that arrives late is new as any other."""
    inbox.put("b.npy")
    first = inbox.job()
    assert inbox.ids(first) == ["b.npy:0", "b.npy:1"]
    inbox.put("c.npy")
    inbox.put("a.npy", age_s=1e8)
    second = inbox.job()
    assert inbox.ids(second) == ["a.npy:0", "a.npy:1", "c.npy:0", "c.npy:1"]
    assert counts(second) == {"listed": 3, "new": 2, "skipped": 1}
    third = inbox.job()
    assert third.state is JobState.SUCCEEDED
    assert counts(third) == {"listed": 3, "skipped": 3}
    assert inbox.seen() == {"a.npy": second.id, "b.npy": first.id, "c.npy": second.id}


def test_nothing_new(inbox: Inbox, tmp_path: Path) -> None:
    """A run without new files succeeds, says so, and leaves no folder behind."""
    before = sorted(tmp_path.iterdir())
    job = inbox.job()
    assert (job.state, job.outputs["empty"], job.records_total) == (JobState.SUCCEEDED, True, 0)
    assert "path" not in job.outputs
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_away_is_not_empty(inbox: Inbox) -> None:
    """A disk that is not mounted fails the job."""
    inbox.folder.rmdir()
    job = inbox.job()
    assert job.state is JobState.FAILED
    assert f"{inbox.folder}: no such" in str(job.error)


def test_changed_files(inbox: Inbox) -> None:
    """They are scored again, left alone, or fail the job; each is seen as it was scored last."""
    for name in ("a.npy", "b.npy"):
        inbox.put(name)
    first = inbox.job()
    inbox.put("a.npy", 3.0, rows=3)
    inbox.settings = {"changed": "fail"}
    failed = inbox.job()
    assert failed.state is JobState.FAILED
    assert "1 file has changed since an earlier run scored it: a.npy;" in str(failed.error)
    inbox.settings = {"changed": "ignore"}
    ignored = inbox.job()
    assert (counts(ignored), ignored.outputs["empty"]) == ({"listed": 2, "skipped": 1, "ignored": 1}, True)
    inbox.settings = {}
    second = inbox.job()
    assert counts(second) == {"listed": 2, "changed": 1, "skipped": 1}
    assert inbox.ids(second) == ["a.npy:0", "a.npy:1", "a.npy:2"]
    assert inbox.seen() == {"a.npy": second.id, "b.npy": first.id}
    assert inbox.job().outputs["empty"]


def test_young_files_settle(inbox: Inbox) -> None:
    """A file that was just written waits for a later run; `settle: 0s` takes it at once."""
    inbox.put("a.npy", age_s=5.0)
    assert counts(inbox.job()) == {"listed": 1, "settling": 1}
    inbox.settings = {"settle": "0s"}
    assert counts(inbox.job()) == {"listed": 1, "new": 1}


@pytest.mark.parametrize(("choice", "again"), [("new", 0), ("all", 2)])
def test_another_model(inbox: Inbox, choice: str, again: int) -> None:
    """`all` scores everything again once, `new` nothing, and both take what is new."""
    inbox.put("a.npy")
    inbox.put("b.npy")
    inbox.job()
    inbox.model = {"args": {"scale": 2.0}}
    inbox.settings = {"model_change": choice}
    inbox.put("c.npy")
    job = inbox.job()
    expected = {"listed": 3, "new": 1, "again": again, "skipped": 2 - again}
    assert counts(job) == {name: n for name, n in expected.items() if n}
    assert inbox.job().outputs["empty"]


def test_failed_jobs_see_nothing(inbox: Inbox) -> None:
    """The next run scores what a failed one had on its list."""
    inbox.put("a.npy")
    (inbox.folder / "b.npy").write_bytes(b"no array")
    age(inbox.folder / "b.npy", 100)
    failed = inbox.job()
    assert failed.state is JobState.FAILED
    assert "b.npy: cannot be read" in str(failed.error)
    assert inbox.seen() == {}
    inbox.run = {"error_threshold": 0.5}
    job = inbox.job()
    assert (job.records_bad, inbox.ids(job)) == (1, ["a.npy:0", "a.npy:1"])
    assert inbox.seen() == {"a.npy": job.id, "b.npy": job.id}
    assert not list(inbox.base.glob(".out-*"))


def test_names_and_folders_are_apart(inbox: Inbox) -> None:
    """Another name, and another folder with files of equal names, have sets of their own."""
    inbox.put("a.npy")
    inbox.job()
    inbox.submit(name="other")
    assert counts(inbox.work()) == {"listed": 1, "new": 1}
    inbox.folder = inbox.base / "in2"
    os.link(inbox.base / "in" / "a.npy", inbox.put("b.npy").parent / "a.npy")
    inbox.source = str(inbox.folder / "*.npy")
    assert counts(inbox.job()) == {"listed": 2, "new": 2}


def test_a_tick_without_new_files(inbox: Inbox) -> None:
    """The tick of an empty run says so, from the moment on when the job has succeeded."""
    tick = TickRow(timer="n", due=60, kind="scheduled", outcome="submitted", job=inbox.submit().id, at=60.0)

    def add(session: Session) -> None:
        timer = {"name": "n", "state": "active", "since": 0.0, "moved_at": 0.0, "created_at": 0.0, "edited_at": 0.0}
        session.add(TimerRow(**timer, file="f", base="/", allow_python="[]", digest="", spec="{}"))
        session.flush()
        session.add(tick)

    inbox.store.jobs._db.write(add)
    inbox.put("a.npy", age_s=1.0)
    inbox.work()
    (found,) = inbox.store.jobs._db.read(lambda session: list(session.scalars(select(TickRow))))
    assert (found.outcome, found.reason) == ("empty", "no new files")


def test_show_and_ls(inbox: Inbox, capsys: pytest.CaptureFixture[str]) -> None:
    """They say how many files were what, and which jobs were empty."""
    cli = Cli(inbox.store.home, capsys)
    inbox.put("a.npy")
    inbox.put("b.npy", age_s=1.0)
    full, empty = inbox.job(), inbox.job()
    shown = cli("show", full.id)
    assert [line for line in shown.out.splitlines() if line.startswith("files.")] == [
        "files.listed: 2",
        "files.new: 1",
        "files.settling: 1 written too recently; the next run scores them",
    ]
    said = cli("show", empty.id, "--json").json
    assert (said["only_new"]["new"], said["only_new"]["skipped"], said["only_new"]["settling"]) == (0, 1, 1)
    assert said["outputs"]["empty"] is True
    assert "empty" in next(line for line in cli("ls").out.splitlines() if empty.id in line)
    assert cli("wait", empty.id).err.splitlines() == [f"n {empty.id} succeeded: empty, no new files"]


def test_seen_commands(inbox: Inbox, capsys: pytest.CaptureFixture[str]) -> None:
    """What is seen can be looked at and forgotten, as a whole or by path; then it is scored again."""
    cli = Cli(inbox.store.home, capsys)
    assert cli("seen", "ls").err == "no seen files; jobs with input.only_new remember the files that they scored\n"
    for name in ("a.npy", "b.npy", "c.npy"):
        inbox.put(name)
    job = inbox.job()
    (source,) = cli("seen", "ls", "--json").json
    assert (source["name"], source["root"], source["files"], source["runs"]) == ("n", str(inbox.folder), 3, 1)
    assert cli("seen", "ls", "n", "-q").out.split() == ["a.npy", "b.npy", "c.npy"]
    (row,) = cli("seen", "ls", "n", "--path", "b*", "--json").json
    assert (row["path"], row["job"], row["bytes"]) == ("b.npy", job.id, (inbox.folder / "b.npy").stat().st_size)
    assert cli("seen", "ls", "n", "-n", "1").err == ""
    for words, code, line in (
        (("ls", "m"), 102, "nimble-jobs: no job named m has seen files; list the names with: nimble-jobs seen ls"),
        (
            ("forget", "m"),
            102,
            "nimble-jobs: no job named m has seen files; list the names with: nimble-jobs seen ls",
        ),
        (("forget", "n", "--path", "z*"), 0, "no seen file of n matches z*"),
        (("forget", "n", "--dry-run"), 0, "would forget 3 files of n (all)"),
        (("forget", "n", "--path", "[ab]*", "--yes"), 0, "forgot 2 files of n (a.npy, b.npy)"),
    ):
        answer = cli("seen", *words)
        assert (answer.code, answer.lines) == (code, [line])
    assert cli("seen", "forget", "n").code == 2
    assert list(inbox.seen()) == ["c.npy"]
    assert inbox.ids(inbox.job()) == ["a.npy:0", "a.npy:1", "b.npy:0", "b.npy:1"]
    assert cli("seen", "forget", "n", "--yes", "--json").json == {"name": "n", "files": 3, "forgotten": True}
    assert cli("seen", "ls", "--json").json == []


def test_a_folder_that_is_taken(inbox: Inbox) -> None:
    """A second run into the same folder stops before it scores, and says what it needs; nothing is lost."""
    inbox.put("a.npy")
    first = inbox.job()
    inbox.put("b.npy")
    inbox.count -= 1
    second = inbox.job()
    assert second.state is JobState.FAILED
    assert "expected a folder of its own for each run of input.only_new" in str(second.error)
    assert inbox.ids(first) == ["a.npy:0", "a.npy:1"]
    assert inbox.ids(inbox.job()) == ["b.npy:0", "b.npy:1"]


def test_pipes_and_broken_links(inbox: Inbox) -> None:
    """They are counted and named, keep nobody waiting, and are new once they are files."""
    os.mkfifo(inbox.folder / "a.npy")
    inbox.put("b.npy")
    job = inbox.job()
    assert counts(job) == {"listed": 2, "new": 1, "unusable": 1}
    (event,) = [e for e in inbox.store.jobs.events(job.id) if e.kind == "unusable"]
    assert event.message == "left out 1, not readable as a file: a.npy"
    (inbox.folder / "a.npy").unlink()
    inbox.put("a.npy")
    assert inbox.ids(inbox.job()) == ["a.npy:0", "a.npy:1"]
