"""Jobs that score only what is new: nothing is lost, nothing is scored twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from nimble_jobs.data import Staging
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.timer_tables import TickRow, TimerRow
from nimble_jobs.worker.executor import execute
from nimble_jobs.workloads import score
from nimble_jobs.workloads.context import JobContext, Outcome, Stop
from tests.cli import Cli
from tests.inbox import Inbox, Killed, age, counts


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def inbox(store: Store, tmp_path: Path) -> Inbox:
    return Inbox(store, tmp_path)


@pytest.fixture
def pictures(store: Store, tmp_path: Path) -> Inbox:
    return Inbox(store, tmp_path, "images")


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


def dying(where: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[JobContext], Outcome]:
    """A run that is killed before its output is published, or after that and before the job's end is written."""

    def run(context: JobContext) -> Outcome:
        with monkeypatch.context() as patched:
            if where == "before":
                patched.setattr(Staging, "publish", _kill)
            score.run(context)
        raise Killed

    return run


def _kill(*_: Any, **__: Any) -> None:
    raise Killed


@pytest.mark.parametrize("where", ["before", "after"])
def test_killed_around_the_publication(inbox: Inbox, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt has the same list, whatever came or went; each file is published and seen exactly once."""
    inbox.put("a.npy")
    inbox.put("b.npy")
    inbox.submit()
    assert inbox.work(dying(where, monkeypatch)).state is JobState.QUEUED
    assert inbox.seen() == {}
    inbox.put("0.npy")
    done = inbox.work()
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 2)
    assert inbox.ids(done) == ["a.npy:0", "a.npy:1", "b.npy:0", "b.npy:1"]
    assert inbox.seen() == dict.fromkeys(("a.npy", "b.npy"), done.id)
    assert inbox.ids(inbox.job()) == ["0.npy:0", "0.npy:1"]
    assert not list(inbox.base.glob(".out-*"))


def test_published_and_then_everything_is_gone(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was published is seen, even if nothing of the input is left when the job's end is written at last."""
    inbox.put("a.npy")
    inbox.submit()
    inbox.work(dying("after", monkeypatch))
    (inbox.folder / "a.npy").unlink()
    done = inbox.work()
    assert done.state is JobState.SUCCEEDED
    assert inbox.seen() == {"a.npy": done.id}


def between(change: Callable[[], object]) -> Callable[[JobContext], Outcome]:
    """A run during which the input changes once it has been listed."""

    def run(context: JobContext) -> Outcome:
        def event(kind: str, message: str, data: dict[str, Any]) -> None:
            if kind == "only-new":
                change()
            context.event(kind, message, data)

        return score.run(JobContext(**{**vars(context), "event": event}))

    return run


@pytest.mark.parametrize("format_", ["images", "npy", "csv", "npz"])
@pytest.mark.parametrize("what", ["vanishes", "grows"])
def test_files_that_change_after_they_were_listed(store: Store, tmp_path: Path, format_: str, what: str) -> None:
    """They are bad records, counted, and not seen: the next run has them again."""
    inbox = Inbox(store, tmp_path, format_)
    suffix = {"images": ".png"}.get(format_, f".{format_}")
    for name in ("a", "b", "c"):
        inbox.put(f"{name}{suffix}")
    victim = inbox.folder / f"b{suffix}"
    change = victim.unlink if what == "vanishes" else lambda: inbox.put(victim.name, 7.0, rows=5, age_s=900)
    inbox.submit()
    failed = inbox.work(between(change))
    assert failed.state is JobState.FAILED
    assert f"{'vanished' if what == 'vanishes' else 'changed'} after it was listed" in str(failed.error)
    inbox.put(victim.name)
    inbox.run = {"error_threshold": 0.5}
    inbox.submit()
    job = inbox.work(between(change))
    assert job.state is JobState.SUCCEEDED
    assert job.records_bad == 1
    count = {"vanishes": "vanished", "grows": "moved"}[what]
    assert counts(job) == {"listed": 3, "new": 3, count: 1}
    assert inbox.seen() == dict.fromkeys((f"a{suffix}", f"c{suffix}"), job.id)
    inbox.put(victim.name)
    assert counts(inbox.job()) == {"listed": 3, "new": 1, "skipped": 2}


def test_everything_vanishes(pictures: Inbox) -> None:
    """Nothing is left to read: an empty run where that is tolerated."""
    path = pictures.put("a.png")
    pictures.run = {"error_threshold": -1}
    pictures.submit()
    job = pictures.work(between(path.unlink))
    assert job.outputs["empty"]
    assert counts(job) == {"listed": 1, "new": 1, "vanished": 1}
    assert not list(pictures.base.glob(".out-*"))


def test_a_file_that_grows_while_it_is_read(inbox: Inbox) -> None:
    """It is noticed at the end of the job, and the file is not seen."""
    path = inbox.put("a.npy")
    inbox.put("b.npy")
    inbox.submit()

    def run(context: JobContext) -> Outcome:
        def report(**given: Any) -> None:
            if given.get("phase") == "publish":
                age(path, 500.0)
            context.report(**given)

        return score.run(JobContext(**{**vars(context), "report": report}))

    job = inbox.work(run)
    assert counts(job) == {"listed": 2, "new": 2, "moved": 1}
    assert inbox.seen() == {"b.npy": job.id}


def test_two_jobs_at_once(inbox: Inbox) -> None:
    """The second leaves to the first what is on its list; if that one fails in the end, a later run has it."""
    inbox.put("a.npy")
    inbox.submit()

    def run(context: JobContext) -> Outcome:
        inbox.put("b.npy")
        inbox.submit()
        second = inbox.work()
        assert counts(second) == {"listed": 2, "new": 1, "elsewhere": 1}
        assert inbox.ids(second) == ["b.npy:0", "b.npy:1"]
        raise Killed

    first = inbox.work(lambda context: between(lambda: run(context))(context))
    inbox.store.jobs.cancel(first.id, time.time())
    assert list(inbox.seen()) == ["b.npy"]
    assert inbox.ids(inbox.job()) == ["a.npy:0", "a.npy:1"]


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
    assert cli("seen", "ls").err == "no file is seen; jobs with input.only_new remember what they scored\n"
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
        (("ls", "m"), 102, "nimble-jobs: m: no file is seen under this name; see the names with: nimble-jobs seen ls"),
        (
            ("forget", "m"),
            102,
            "nimble-jobs: m: no file is seen under this name; see the names with: nimble-jobs seen ls",
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


def test_shards_of_an_earlier_attempt_are_kept(pictures: Inbox) -> None:
    """A picture that was read and then written to stays in its shard, once; it is not seen. Later shards go on."""
    for i in range(6):
        pictures.put(f"{i}.png", 10 * i)
    pictures.output = {"shard_size": 2}
    pictures.submit()
    shards: list[int] = []

    def run(context: JobContext) -> Outcome:
        def stop() -> Stop:
            if len(shards) == 1:
                raise Killed
            return context.stop()

        def report(**given: Any) -> None:
            if given.get("done") == 2:
                shards.append(1)
            context.report(**given)

        return score.run(JobContext(**{**vars(context), "stop": stop, "report": report}))

    assert pictures.work(run).state is JobState.QUEUED
    pictures.put("0.png", 99, age_s=500)
    pictures.put("zz.png")
    done = pictures.work()
    assert done.state is JobState.SUCCEEDED
    assert pictures.ids(done) == [f"{i}.png" for i in range(6)]
    assert counts(done) == {"listed": 6, "new": 6, "moved": 1}
    assert sorted(pictures.seen()) == [f"{i}.png" for i in range(1, 6)]
    last = pictures.job()
    assert pictures.ids(last) == ["0.png", "zz.png"]


def test_a_stale_attempt_publishes_first(inbox: Inbox) -> None:
    """An overtaken attempt puts its folder in place at the last moment: the newer one takes it, and its marks."""
    inbox.put("a.npy")
    inbox.put("b.npy")
    inbox.run = {"error_threshold": 0.6}
    inbox.submit()
    old = inbox.claim()

    def stale(context: JobContext) -> Outcome:
        outcome = score.run(context)
        inbox.lose(old)
        return outcome

    execute(old, type(inbox.station)(**{**vars(inbox.station), "run": stale}))
    assert inbox.seen() == {}
    done = inbox.work()
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 2)
    assert sorted(inbox.seen()) == ["a.npy", "b.npy"]


def test_pipes_and_broken_links(inbox: Inbox) -> None:
    """They are counted and named, keep nobody waiting, and are new once they are files."""
    os.mkfifo(inbox.folder / "a.npy")
    inbox.put("b.npy")
    job = inbox.job()
    assert counts(job) == {"listed": 2, "new": 1, "unusable": 1}
    (event,) = [e for e in inbox.store.jobs.events(job.id) if e.kind == "unusable"]
    assert event.message == "1 are no files that can be read, and are left out: a.npy"
    (inbox.folder / "a.npy").unlink()
    inbox.put("a.npy")
    assert inbox.ids(inbox.job()) == ["a.npy:0", "a.npy:1"]


def test_a_list_that_was_lost(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published, but nobody knows what: the job succeeds, says so, and the next run scores the files again."""
    inbox.put("a.npy")
    inbox.submit()
    job = inbox.work(dying("after", monkeypatch))
    (inbox.base / f".out-1.{job.id}" / "files.jsonl").write_text("?")
    done = inbox.work()
    assert done.state is JobState.SUCCEEDED
    assert [e.kind for e in inbox.store.jobs.events(job.id)].count("list-gone") == 1
    assert inbox.ids(inbox.job()) == inbox.ids(done)


@pytest.mark.parametrize("format_", ["images", "csv"])
def test_away_only_while_it_was_read(store: Store, tmp_path: Path, format_: str) -> None:
    """A file that was away for a moment, and is back as it was, has not been read, and is not seen."""
    inbox = Inbox(store, tmp_path, format_)
    suffix = {"images": ".png"}.get(format_, f".{format_}")
    inbox.run = {"error_threshold": 0.5}
    inbox.output = {"shard_size": 1}
    for name in ("a", "b", "c"):
        inbox.put(name + suffix)
    victim, hidden = inbox.folder / f"b{suffix}", inbox.base / "away"
    inbox.submit()

    def run(context: JobContext) -> Outcome:
        def report(**given: Any) -> None:
            if given.get("phase") == "publish":
                hidden.rename(victim)
            context.report(**given)

        return between(lambda: victim.rename(hidden))(JobContext(**{**vars(context), "report": report}))

    job = inbox.work(run)
    assert counts(job) == {"listed": 3, "new": 3, "vanished": 1}
    assert sorted(inbox.seen()) == [f"a{suffix}", f"c{suffix}"]
    assert counts(inbox.job()) == {"listed": 3, "new": 1, "skipped": 2}
