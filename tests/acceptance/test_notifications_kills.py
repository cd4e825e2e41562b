"""SIGKILL of processes that end jobs and send notifications: none is lost, none arrives before its job has ended.

There are four times NIMBLE_JOBS_KILL_ROUNDS kills; NIMBLE_JOBS_KILL_SEED sets their moments.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import notifying
import worker_fakes
from worker_processes import Start, ended

from nimble_jobs.job import JobState
from nimble_jobs.store import Store
from nimble_jobs.store.home import DATABASE
from nimble_jobs.store.notices import NoticeState
from tests import prefork
from tests.configured import configure
from tests.receiver import Message, receiving
from tests.seeds import seed
from tests.waiting import PATIENCE_S, until

KILLS = 4 * int(os.environ["NIMBLE_JOBS_KILL_ROUNDS"])
SEED = seed()


def begin(home: Path, what: str) -> Any:
    return prefork.start([sys.executable, notifying.__file__, str(home), what])


def test_none_is_lost_and_none_comes_early(store: Store) -> None:
    """Meanwhile the receiver fails, hangs, redirects and recovers. It looks up each message's job in the database."""
    chance = random.Random(SEED)
    early: list[str] = []

    def look(message: Message) -> None:
        with closing(sqlite3.connect(f"file:{store.home / DATABASE}?mode=ro", uri=True, timeout=30)) as connection:
            query = "SELECT state FROM jobs WHERE id = ?"
            if connection.execute(query, (message.json["job"],)).fetchone() != ("failed",):
                early.append(message.text)

    with receiving(look) as receiver:
        hosts = f"hosts: ['{receiver.host}']"
        configure(
            store.home, f"notify: {{{hosts}, webhook: '{receiver.url}/all', timeout: 0.2s, command_timeout: 0.2s}}\n"
        )
        # More attempts than kills: after three kills in a row a job would be quarantined.
        names = [f"job-{number}" for number in range(KILLS)]
        jobs = [worker_fakes.submit(store, store.home, name=name, do="x", max_attempts=100) for name in names]
        crew = {name: begin(store.home, name.partition(" ")[0]) for name in ("end", "send 1", "send 2")}
        try:
            for _ in range(KILLS):
                receiver.status = chance.choice([200, 200, 200, 500, 503, 307])
                receiver.headers = {"Location": "/moved"} if receiver.status == 307 else {}
                receiver.hang_s = chance.choice([0.0, 0.0, 0.0, 0.4])
                time.sleep(chance.uniform(0.02, 0.15))
                name = chance.choice(list(crew))
                crew[name].kill()
                crew[name].wait()
                crew[name] = begin(store.home, name.partition(" ")[0])
            receiver.status, receiver.headers, receiver.hang_s = 200, {}, 0.0
            until(lambda: store.jobs.counts().get(JobState.FAILED) == len(jobs))
            until(lambda: store.outbox.counts() == {NoticeState.SENT: len(jobs)})
        finally:
            for process in crew.values():
                process.kill()
                process.wait()
    assert early == [], f"seed {SEED}"
    notices = store.outbox.list()
    assert Counter(notice.job_id for notice in notices) == Counter(job.id for job in jobs), f"seed {SEED}"
    taken = {message.json["id"] for message in receiver.taken}
    assert taken >= {notice.id for notice in notices}, f"seed {SEED}: a notification is marked as sent that never came"
    assert {message.json["id"] for message in receiver.messages} == taken


def test_a_worker_sends_while_a_receiver_hangs(store: Store, start: Start, tmp_path: Path) -> None:
    """A hanging receiver does not hold up jobs. The next worker sends what a killed one could not."""
    with receiving() as receiver:
        configure(store.home, f"notify: {{hosts: ['{receiver.host}'], webhook: '{receiver.url}/all', timeout: 1s}}\n")
        receiver.hang_s = 60.0
        worker = start()
        bad = [worker_fakes.submit(store, tmp_path, name=f"bad-{n}", do="raise", error="data") for n in range(3)]
        ended(store, *bad)
        good = [worker_fakes.submit(store, tmp_path, name=f"good-{n}", do="batches") for n in range(3)]
        assert {job.state for job in ended(store, *good)} == {JobState.SUCCEEDED}
        assert store.outbox.counts() == {NoticeState.PENDING: 3}
        worker.kill()
        worker.wait()
        receiver.hang_s = 0.0
        receiver.released.set()
        store.outbox.retry([notice.id for notice in store.outbox.list()], time.time())
        start()
        until(lambda: store.outbox.counts().get(NoticeState.SENT) == 3)
    assert {message.json["name"] for message in receiver.taken} == {"bad-0", "bad-1", "bad-2"}


def test_where_no_worker_runs_cron_serve_sends(store: Store) -> None:
    """On SIGTERM `cron serve` sends what is due and exits with 0."""
    with receiving() as receiver:
        configure(store.home, f"notify: {{hosts: ['{receiver.host}'], webhook: '{receiver.url}/all'}}\n")
        process = begin(store.home, "cron")
        try:
            until(lambda: store.workers.live())
            job = worker_fakes.submit(store, store.home, name="bad", do="x")
            store.jobs.claim("0-w", device="cpu", now=time.time())
            store.jobs.fail(job.id, 1, error="bad", retry=False, lost=False, now=time.time())
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
    (message,) = receiver.taken
    assert message.json["job"] == job.id
