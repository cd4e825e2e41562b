"""Files and attempts that change while a job scores what is new: nothing is lost, or scored twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.data import BadRecord, Staging
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import execute
from nimble_jobs.workloads import only_new, score
from nimble_jobs.workloads.bad_records import of_failed_shard
from nimble_jobs.workloads.context import JobContext, Outcome, Stop
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
    assert [each.job for each in inbox.store.expiry.published(above="", limit=9)] == [done.id]
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


@pytest.mark.parametrize("format_", ["images", "npz", "csv", "parquet"])
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


@pytest.mark.parametrize("format_", ["images", "npy", "csv"])
def test_files_in_a_shard_that_failed(
    store: Store, tmp_path: Path, format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they were at fault is not known, so the next run has them again, as a whole. Others are seen."""
    inbox = Inbox(store, tmp_path, format_)
    suffix = {"images": ".png"}.get(format_, f".{format_}")
    for name in ("a", "b", "c"):
        inbox.put(f"{name}{suffix}", rows=2)
    inbox.submit()
    index = 1 if format_ == "images" else 3
    reason = of_failed_shard(1, "the device faulted")
    lost = BadRecord(index=index, id="odd", reason=f"b.csv:5: {reason}" if format_ == "csv" else reason)

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "bad", property(lambda staging: [lost] if staging.done else []))
        job = inbox.work()
    assert job.state is JobState.SUCCEEDED, job.error
    assert counts(job) == {"listed": 3, "new": 3, "failed": 1}
    assert inbox.seen() == dict.fromkeys((f"a{suffix}", f"c{suffix}"), job.id)
    (event,) = [event for event in store.jobs.events(job.id) if event.kind == "unscored"]
    assert event.message == f"1 file was in shards that failed; the next run scores them: b{suffix}"
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


def test_a_job_waits_while_another_one_lists(inbox: Inbox) -> None:
    """Each would miss the other's list. The wait says whose it is, and can be cancelled; another name goes on."""
    inbox.put("a.npy")
    key = only_new._lock_key("n")

    def run(context: JobContext) -> Outcome:
        def event(kind: str, message: str, data: dict[str, Any]) -> None:
            context.event(kind, message, data)
            if kind == "wait":
                inbox.store.jobs.cancel(context.job.id, time.time())

        return score.run(JobContext(**{**vars(context), "event": event}))

    with inbox.store.builds.turn(key, limit_s=1.0, waiting=lambda _: None):
        inbox.submit()
        waited = inbox.work(run)
        inbox.submit(name="other")
        assert inbox.work().state is JobState.SUCCEEDED
    assert waited.state is JobState.CANCELLED
    (event,) = [e for e in inbox.store.jobs.events(waited.id) if e.kind == "wait"]
    text = "is listing the input of another job with this name; this job waits until it has finished"
    assert event.message == f"process {os.getpid()} {text}"
    assert inbox.job().state is JobState.SUCCEEDED


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
