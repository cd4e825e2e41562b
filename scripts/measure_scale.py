#!/usr/bin/env python3
"""Measure what members of a job ask of the store, over tables of ten thousand to ten million shards on PostgreSQL.

    python scripts/measure_scale.py [--shards 10000,100000,1000000,10000000] [--members 1000] [--json FILE]

Half of the shards are done, each member holds one claim, and the others are open. The server is the one that the tests
start: on this machine, over a socket, with fsync off. Rows that are loaded for measuring are vacuumed first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import ROOT, environment, save, summary
from sqlalchemy import event, text

sys.path.insert(0, str(ROOT))

from nimble_jobs.job import Job
from nimble_jobs.store import NewJob, Store, open_store
from nimble_jobs.store.home import resolve
from tests import postgres
from tests.store_samples import folder_in_memory

CALLS, LONGEST_S = 20, 20.0  # of one operation: how often it is called, unless that takes too long
RECORDS = 1024  # in a shard
HELD = 32  # shards that each member holds


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", default="10000,100000,1000000")
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--opened", type=int, default=1_000_000, help="the most shards to open as a job opens them")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    postgres.begin()
    rows: list[dict[str, Any]] = []
    for shards in map(int, given.shards.split(",")):
        with shared_store() as store:
            rows += measure(store, shards, given.members, opened=shards <= given.opened)
    save(given.json, {"environment": environment(), "members": given.members, "rows": rows})
    return 0


@contextmanager
def shared_store() -> Iterator[Store]:
    """A new store on PostgreSQL."""
    with folder_in_memory() as folder, postgres.schema() as url, open_store(resolve(f"{folder}/home"), url) as store:
        yield store


def measure(store: Store, shards: int, members: int, *, opened: bool) -> list[dict[str, Any]]:
    """Each operation over one table."""
    job = begun(store)
    rows: list[dict[str, Any]] = []

    def row(what: str, call: Callable[[int], object], calls: int = CALLS) -> None:
        rows.append({"shards": shards, "what": what, **timed(store, call, calls)})
        print(rows[-1], flush=True)

    bounds = [(first * RECORDS, (first + 1) * RECORDS) for first in range(shards if opened else 1)]
    if opened:
        row("open all", lambda _: store.shards.open(job, "cuda:0", bounds, (), bad=0, now=time.time()), 1)
    else:
        store.shards.open(job, "cuda:0", bounds, (), bad=0, now=time.time())
    held = fill(store, job, shards, members)
    mine = [replace(job, worker=f"w{n}") for n in range(members)]
    of = shards // 2  # the first shard of the first member
    row("finish a shard", lambda n: store.shards.finish(mine[n], of + n * held, 0, time.time()))
    row("claim", lambda n: store.shards.claim(mine[n], time.time(), idle=False))
    row("claim, suspects too", lambda n: store.shards.claim(mine[n], time.time(), idle=True))
    row("count open shards for a claim's batches", lambda _: store.shards.counts(job))
    row("report progress", lambda n: store.membership(mine[n]).progress(job.id, job.attempt, done=0, total=1, bad=0))
    row("look for shards to copy", lambda _: store.shards.in_flight(job))
    row("look at members", lambda _: store.shards.members(job.id, job.attempt))
    row("take a copy", lambda n: store.shards.second(mine[n], of + (n + 1) * held + 1, time.time(), idle=True))
    row("give claims back", lambda n: store.shards.release(mine[n]))
    row("leave with an error", lambda n: store.shards.leave(mine[n + 1], now=time.time(), error="died"))
    row("look for a job to join", lambda _: store.shards.join("new", "cuda:9", time.time()), 1)
    nothing: dict[str, Any] = {}

    def end(_number: int) -> bool:
        now = time.time()
        return store.jobs.finish(job.id, job.attempt, outputs=nothing, timings=nothing, schedule=nothing, now=now)

    row("end the job", end, 1)
    return rows


def begun(store: Store) -> Job:
    """A job that its leading member has claimed."""
    spec = {"version": 1, "name": "n", "run": {"gpus": 4096}}
    store.jobs.queue_array([NewJob(spec=spec, name="n", kind="score")], time.time())
    job = store.jobs.claim("w0", device="cuda:0", now=time.time())
    assert job is not None
    return job


def fill(store: Store, job: Job, shards: int, members: int) -> int:
    """Put so many rows into the tables. Returns how many shards each member holds."""
    held = min(HELD, shards // 4 // members)
    running = shards // 2 + members * held  # behind these, all are open
    rows = f"""
        INSERT INTO shards (job, index, start, stop, state, attempt, failures, worker, sha256)
        SELECT '{job.id}', i, i::bigint * {RECORDS}, (i::bigint + 1) * {RECORDS},
            CASE WHEN i < {shards // 2} THEN 'done' WHEN i < {running} THEN 'running' ELSE 'open' END,
            CASE WHEN i < {running} THEN 1 ELSE 0 END, 0,
            CASE WHEN i < {shards // 2} THEN 'w' || i % {members}
                 WHEN i < {running} THEN 'w' || (i - {shards // 2}) / {held} END,
            CASE WHEN i < {shards // 2} THEN repeat('s', 64) END
        FROM generate_series(0, {shards - 1}) AS i"""
    others = f"""
        INSERT INTO members (job, attempt, worker, device, joined_at, moved_at, records_done, failures)
        SELECT '{job.id}', 1, 'w' || i, 'cuda:' || i % 8, 1, 2, 10, 0 FROM generate_series(1, {members - 1}) AS i"""
    with store._database._engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        for statement in ("TRUNCATE shards", rows, others, "VACUUM ANALYZE shards", "VACUUM ANALYZE members"):
            connection.execute(text(statement))
    return held


def timed(store: Store, call: Callable[[int], object], calls: int) -> dict[str, Any]:
    """How long the calls took, how many statements one sends, and which tables it read from end to end."""
    sent: list[tuple[str, Any]] = []

    def see(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        sent.append((statement, parameters))

    engine = store._database._engine
    event.listen(engine, "before_cursor_execute", see)
    times_ms: list[float] = []
    statements = 0
    deadline = time.monotonic() + LONGEST_S
    for number in range(calls):
        sent.clear()
        start = time.perf_counter()
        call(number)
        times_ms.append((time.perf_counter() - start) * 1e3)
        statements = len(sent)
        if time.monotonic() > deadline:
            break
    event.remove(engine, "before_cursor_execute", see)
    return {**summary(times_ms), "statements": statements, "plans": plans(store, sent)}


def plans(store: Store, sent: list[tuple[str, Any]]) -> list[str]:
    """How the server reads shards and members for these statements: a scan, and the rows that it reads."""
    found: list[str] = []
    for statement, parameters in sent[-20:]:
        about = "shards" in statement or "members" in statement
        if isinstance(parameters, list) or not about or not statement.startswith(("SELECT", "UPDATE")):
            continue
        with store._database._engine.connect() as connection, connection.begin() as transaction:
            answer = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters).scalar_one()
            transaction.rollback()
        found += [each for each in scans(answer[0]["Plan"]) if each not in found]
    return found


def scans(node: dict[str, Any]) -> Iterator[str]:
    """The scans of a plan."""
    if node.get("Relation Name") in ("shards", "members"):
        yield f"{node['Node Type']} of {node['Relation Name']}, {node['Plan Rows']:,} rows"
    elif node["Node Type"] == "Sort":
        yield f"Sort, {node['Plan Rows']:,} rows"
    for each in node.get("Plans", ()):
        yield from scans(each)


if __name__ == "__main__":
    sys.exit(main())
