"""Small values for the tests of the store, and what its other processes do."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import insert
from sqlalchemy.orm import Session

from nimble_jobs.job import After, Job, JobState
from nimble_jobs.schedule import (
    Buffer,
    BufferKind,
    GraphFacts,
    Plan,
    Port,
    Program,
    Schedule,
    Task,
    View,
)
from nimble_jobs.store import NewJob, Store, open_store
from nimble_jobs.store.ids import new_id
from nimble_jobs.store.ranks import AGING_S
from nimble_jobs.store.records import dump, sha256
from nimble_jobs.store.tables import EventRow, JobRow

NOW = 1_800_000_000.0
PARTS = {"model.source": "torchvision:resnet18", "model.dtype": "fp32", "input": "x:float32[4]", "mode": "inference"}


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder where syncing costs nothing, if there is one: for tests of thousands of commits."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def add_events(store: Store, count: int, message: str = "happened") -> None:
    """Events in one transaction."""
    rows = [{"at": 1.0, "job": None, "attempt": None, "kind": "k", "message": message, "data": "{}"}] * count
    store.jobs._db.write(lambda session: session.execute(insert(EventRow), rows))


def many_jobs(store: Store, count: int, *, now: float) -> list[str]:
    """Jobs, one a second, in one transaction: of ten one failed, three wait, six succeeded. Returns their ids."""
    text = dump(
        {
            "name": "n",
            "model": {"source": "torchvision:resnet18", "args": {"num_classes": 10}},
            "padding": "x" * 1200,  # a resolved spec has 1.5 kB
        }
    )
    ended = {
        "timings": dump({"records_per_s": 720.0}),
        "rate": 720.0,
        "schedule": dump({"hit": "stored", "runs": "schedule"}),
        "hit": "stored",
        "runs": "schedule",
    }
    others = {"timings": "{}", "schedule": "{}", "rate": None, "hit": None, "runs": None}
    jobs, events = [], []
    for n in range(count):
        state = ("failed", "queued", "queued", "queued", *["succeeded"] * 6)[n % 10]
        began = None if state == "queued" else now + n
        jobs.append(
            {
                "id": new_id(now + n),
                "name": f"job-{n % 7}",
                "kind": "score",
                "state": state,
                "priority": n % 3,
                "attempt": 0 if began is None else 1,
                "max_attempts": 3,
                "device": "cpu",
                "foreground": False,
                "cancel_requested": False,
                "after": "[]",
                "not_before": 0.0,
                "worker": None if began is None else "w",
                "created_at": now + n,
                "queued_at": now + n,
                "urgency": n % 3,
                "rank": now + n - n % 3 * AGING_S,
                "started_at": began,
                "finished_at": None if began is None else began + n % 11,
                "records_done": 0 if began is None else n,
                "records_bad": 0,
                "error": "no such file" if state == "failed" else None,
                "allow_python": "[]",
                "spec_digest": sha256(text),
                "spec": text,
                "outputs": "{}",
                "output": f"/data/{n % 50}/out-{n}",
                **(ended if state == "succeeded" else others),
            }
        )
        said = {"job": jobs[-1]["id"], "attempt": None, "data": "{}"}
        events += [said | {"at": now + n, "kind": kind, "message": f"{kind} as n"} for kind in ("submitted", state)]

    def work(session: Session) -> None:
        # By the tables, not the mapped classes: those would make a statement of its own for each state that differs.
        session.execute(insert(JobRow.__table__), jobs)
        session.execute(insert(EventRow.__table__), events)

    store.jobs._db.write(work)
    return [job["id"] for job in jobs]


def key_of(name: str) -> str:
    """A key as the planner makes them."""
    return hashlib.sha256(name.encode()).hexdigest()


def a_schedule(key: str, *, tasks: int = 3, constant: bytes | None = None, **values: Any) -> Schedule:
    """A schedule of `tasks` in a row, which nothing could run."""
    view = View(buffer=0, dtype="float32", itemsize=4, shape=(4,), stride=(1,))
    buffers = [Buffer(index=0, kind=BufferKind.INPUT, nbytes=16, name="x")]
    constants: tuple[Port, ...] = ()
    if constant is not None:
        name = hashlib.sha256(constant).hexdigest()
        buffers.append(Buffer(index=1, kind=BufferKind.CONSTANT, nbytes=len(constant), name=name))
        held = View(buffer=1, dtype="uint8", itemsize=1, shape=(len(constant),), stride=(1,))
        constants = (Port(name=name, view=held),)
    program = Program(
        buffers=tuple(buffers),
        tasks=tuple(
            Task(
                index=i,
                op="aten.relu_.default",
                args=(view,),
                kwargs=(),
                outputs=view,
                reads=(view,),
                writes=(view,),
                mutates=(view,),
            )
            for i in range(tasks)
        ),
        inputs=(Port(name="x", view=view),),
        outputs=(Port(name="y", view=view),),
        state=(),
        constants=constants,
    )
    facts = GraphFacts(
        tasks=tasks,
        edges=tasks - 1,
        meg_edges=tasks - 1,
        matching=tasks - 1,
        width=1,
        streams=1,
        syncs_needed=0,
        syncs_used=0,
    )
    known: dict[str, Any] = {
        "tolerance": 1e-3,
        "error": 0.0,
        "device": "cpu",
        "eager_us": 20.5,
        "replay_us": 10.25,
        "peak_bytes": 16,
        "build_s": 0.1,
    }
    return Schedule(
        key=key,
        program=program,
        plan=Plan(order=tuple(range(tasks)), stream_of=(0,) * tasks, syncs=()),
        facts=facts,
        durations_us=(),
        candidates=(),
        **(known | values),
    )


def queued(store: Store, *, now: float, after: Sequence[After | str] = (), **values: Any) -> Job:
    """Queue a job; `values` are those of a `NewJob`."""
    return store.jobs.queue(NewJob(after=tuple(after), **values), now)


def submit(store: Store, name: str = "a", *, retry: dict[str, Any] | None = None, **values: Any) -> Job:
    """Submit a job whose spec says nothing but its name and how to retry."""
    spec: dict[str, Any] = {"name": name}
    if retry is not None:
        spec["run"] = {"retry": retry}
    return queued(store, **({"spec": spec, "name": name, "kind": "score", "now": NOW} | values))


def claim_everything(home: str, go: Any, results: Any) -> None:
    """Process: claim and finish jobs until all have ended; put the ids, and the most that ran at once of each group."""
    with open_store(Path(home)) as store, store.workers.hold({"device": "cpu"}) as lease:
        go.wait()
        mine: list[str] = []
        most: dict[str, int] = {}
        while store.jobs.counts()[JobState.QUEUED]:
            job = store.jobs.claim(lease.id, device="cpu", now=NOW)
            for name, (running, _limit) in store.jobs.group_limits(["g", "h"]).items():
                most[name] = max(running, most.get(name, 0))
            if job is not None:
                assert store.jobs.finish(job.id, job.attempt, outputs={}, timings={}, schedule={}, now=NOW)
                mine.append(job.id)
        results.put((mine, most))


def work_until_killed(home: str, ready: Any, seed: int) -> None:
    """Process: submit, claim, report and finish without end."""
    with open_store(Path(home)) as store, store.workers.hold({"device": "cpu"}) as lease:
        ready.set()
        n = 0
        while True:
            submit(store, f"{seed}-{n}", max_attempts=1000, retry={"initial": 0.0})
            job = store.jobs.claim(lease.id, device="cpu", now=NOW)
            if job is not None:
                store.jobs.progress(job.id, job.attempt, done=1, total=2, bad=0)
                store.schedules.save(a_schedule(key_of(str(n % 7))), parts=PARTS, now=NOW)
                store.jobs.finish(job.id, job.attempt, outputs={"n": n}, timings={}, schedule={}, now=NOW)
            n += 1


def hold_worker(home: str, ready: Any, done: Any) -> None:
    """Process: be a worker until told to go."""
    with open_store(Path(home)) as store, store.workers.hold({"device": "cpu"}) as lease:
        ready.put(lease.id)
        done.wait()


def open_as(uid: int, home: str, results: Any) -> None:
    """Process: open the store as another user; put the error's type and text."""
    from nimble_jobs.errors import NimbleError
    from nimble_jobs.store.home import resolve

    os.setuid(uid)
    try:
        with open_store(resolve(home)) as store:
            submit(store)
        results.put(("none", ""))
    except NimbleError as e:
        results.put((type(e).__name__, str(e)))
