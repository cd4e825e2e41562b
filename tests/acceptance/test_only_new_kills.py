"""SIGKILL before each lasting step of a job that scores only what is new: each file is published and seen once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from itertools import chain
from pathlib import Path

import dying_scorer

from nimble_jobs.data import hidden
from nimble_jobs.job import JobState
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.inbox import Inbox

AMONG = 1 if os.environ.get(prefork.COLD) else 12  # one of so many steps, by chance; with --all each one


def score_until(base: Path, step: int) -> int | None:
    """How many steps there were; None when it died before one of them."""
    command = [sys.executable, dying_scorer.__file__, str(base), str(step)]
    done = prefork.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def prepared(base: Path) -> None:
    """A job is queued for two files."""
    base.mkdir()
    with open_store(resolve(str(base / "home"))) as store:
        inbox = Inbox(store, base)
        for name in ("a.npy", "b.npy"):
            inbox.put(name)
        inbox.submit()


def outcome(base: Path) -> tuple[int, str]:
    """After the kill the job goes on, and another one comes. How many attempts the first one needed, and its state."""
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
            hidden.tidy(job)
        assert not list(base.glob(".out-*")), "a hidden folder was left behind"
        assert store.check() == []
        return job.attempt, killed_as


def test_killed_before_each_step(tmp_path: Path) -> None:
    """Whatever was the last step, nothing is lost, published twice, or marked without having been published."""
    whole = tmp_path / "whole"
    prepared(whole)
    steps = score_until(whole, 0)
    assert steps is not None
    assert steps > 10
    chosen = range(random.Random(time.time()).randrange(AMONG) + 1, steps + 1, AMONG)
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
    """The helper itself changes nothing."""
    prepared(tmp_path / "base")
    assert score_until(tmp_path / "base", 0)
    assert outcome(tmp_path / "base") == (1, "succeeded")
