"""SIGKILL before each lasting step of a job that scores only what is new: each file is published and seen once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from itertools import chain
from pathlib import Path

import dying_scorer

from nimble_jobs.data import hidden
from nimble_jobs.job import JobState
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.inbox import Inbox
from tests.seeds import seed
from tests.waiting import PATIENCE_S

AMONG = 1 if os.environ.get(prefork.COLD) else 12  # one of so many steps; with --all each one


def score_until(base: Path, step: int) -> int | None:
    """Score, with a SIGKILL before step number `step`. Returns how many steps there were, or None after the kill."""
    command = [sys.executable, dying_scorer.__file__, str(base), str(step)]
    done = prefork.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def prepared(base: Path) -> None:
    """Queue a job for two files."""
    base.mkdir()
    with open_store(resolve(str(base / "home"))) as store:
        inbox = Inbox(store, base)
        for name in ("a.npy", "b.npy"):
            inbox.put(name)
        inbox.submit()


def outcome(base: Path) -> tuple[int, str]:
    """Resume the killed job, run another one, and check both. Returns the first one's attempts, and its state when it
    was killed.
    """
    with open_store(base / "home") as store:
        inbox = Inbox(store, base)
        (job,) = store.jobs.list()
        if job.state is JobState.RUNNING:
            inbox.lose(job)
        killed_as = job.state.value
        inbox.put("0.npy")
        while not (job := store.jobs.get(job.id)).state.final:
            inbox.work()
        assert job.state is JobState.SUCCEEDED
        inbox.count = 1
        second = inbox.job()
        published = {job.id: inbox.ids(job), second.id: inbox.ids(second)}  # before the list was kept, 0.npy is on it
        assert sorted(chain(*published.values())) == [f"{name}.npy:{i}" for name in "0ab" for i in (0, 1)]
        assert inbox.seen() == {id_.split(":")[0]: job_id for job_id, ids in published.items() for id_ in ids}
        if killed_as == "succeeded":  # it died before it could tidy up; prune and doctor find what it left
            assert set(hidden.left([job])) == set(base.glob(".out-1.*"))
            hidden.tidy(job, store.home)
        assert not list(base.glob(".out-*")), "a hidden folder was left behind"
        assert store.check() == []
        return job.attempt, killed_as


def test_killed_before_each_step(tmp_path: Path) -> None:
    """Whichever step comes last before the kill, no file is lost, published twice, or marked as seen unpublished."""
    whole = tmp_path / "whole"
    prepared(whole)
    steps = score_until(whole, 0)
    assert steps is not None
    assert steps > 10
    chosen = range(random.Random(seed()).randrange(AMONG) + 1, steps + 1, AMONG)
    states = []
    for step in chosen:
        base = tmp_path / str(step)
        prepared(base)
        assert score_until(base, step) is None, step
        states.append(outcome(base))
        shutil.rmtree(base)
    assert len(states) >= steps // AMONG
    assert {attempts for attempts, _ in states} <= {1, 2}


def test_it_lives_without_a_kill(tmp_path: Path) -> None:
    """Without a kill, the helper process runs the job in one attempt."""
    prepared(tmp_path / "base")
    assert score_until(tmp_path / "base", 0)
    assert outcome(tmp_path / "base") == (1, "succeeded")
