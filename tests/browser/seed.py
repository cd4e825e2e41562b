"""The state folder that the browser tests look at: jobs in every state, schedules, timers, and names that attack."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nimble_jobs import spec as specs
from nimble_jobs.job import Job
from nimble_jobs.store import Store
from nimble_jobs.store.workers import WorkerLease
from tests import timers
from tests.store_samples import PARTS, a_schedule, key_of, queued

# Markup, a control sequence of terminals, a mark that turns text around, and Arabic.
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e\u0645\u0631\u062d\u0628\u0627"
SHOWN = "<img src=x onerror=alert(1)>\\u001b[31m\\u202e\u0645\u0631\u062d\u0628\u0627"
ERROR = "2 of 4 records are bad, more than run.error_threshold 0 tolerates"
STAGES = [
    {"name": "read", "busy": 0.2, "depth": 1.5, "items": 9, "limit": 4, "unit": "thread", "workers": 2},
    {"name": "replay", "busy": 0.93, "depth": 0.0, "items": 9, "limit": 0, "unit": "replay in flight", "workers": 1},
]
TIMINGS = {
    "load_s": 0.5,
    "build_s": 3.25,
    "run_s": 2.0,
    "records_per_s": 720.0,
    "stages": STAGES,
    "bottleneck": "replay",
}


@dataclass(kw_only=True)
class Seeded:
    """The store, its ids by what they are, and a worker that is this process."""

    store: Store
    folder: Path
    lease: WorkerLease
    jobs: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def submit(self, name: str, *, kind: str = "score", **more: Any) -> Job:
        """Queue a job."""
        return queued(self.store, spec=spec_of(self.folder, name, kind), name=name, kind=kind, now=time.time(), **more)

    def take(self, job: Job) -> Job:
        """Run the job, which must be the next one."""
        self.alive()
        taken = self.store.jobs.claim(self.lease.id, device="cpu", now=time.time())
        assert taken is not None
        assert taken.id == job.id, (taken.name, job.name)
        return taken

    def alive(self, **info: Any) -> None:
        """The worker's sign of life."""
        now = time.monotonic()
        self.lease.update(status="ready", seen_at=now, moved_at=now, **info)

    def log(self, job: str, text: str) -> None:
        """More of a job's log."""
        path = self.store.home / "logs" / f"{job}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)


def spec_of(folder: Path, name: str, kind: str) -> dict[str, Any]:
    """A resolved spec; its name may be anything, as in a database that somebody else wrote."""
    value: dict[str, Any] = {
        "version": 1,
        "name": "seeded",
        "kind": kind,
        "model": {"source": "torchvision:resnet18"},
        "input": {"source": str(folder / "x.npy"), "format": "npy"},
        "output": {"path": str(folder / "out")},
    }
    if kind == "finetune":
        value |= {"train": {"epochs": 2}}
        value["input"]["fields"] = {"x": "x", "label": "label"}
        value["input"]["format"] = "npz"
    return specs.dump(specs.restore(value)) | {"name": name}


@contextmanager
def seed(store: Store) -> Iterator[Seeded]:
    """Fill the store. The worker is alive inside of the `with`."""
    with store.workers.hold({"role": "worker", "device": "cpu", "status": "ready", "pid": 4242}) as lease:
        found = Seeded(store=store, folder=store.home.parent, lease=lease)
        found.alive()
        _schedules(found)
        _ended(found)
        _timers(found)
        waiting = found.submit("waits-its-turn", priority=-5)
        held = found.submit("held-back", priority=-5)
        store.jobs.hold([held.id], time.time())
        found.jobs |= {"queued": waiting.id, "held": held.id}
        yield found


def _schedules(found: Seeded) -> None:
    for name, model in (("ready", "torchvision:resnet18"), ("quarantined", "timm:resnet26")):
        key = key_of(name)
        found.store.schedules.save(a_schedule(key, tasks=5), parts=PARTS | {"model.source": model}, now=time.time())
        found.keys[name] = key
    found.store.schedules.quarantine(found.keys["quarantined"], "its stored bytes have changed", time.time())


def _ended(found: Seeded) -> None:
    store = found.store
    schedule = {"key": found.keys["ready"], "hit": "stored", "replay_us": 10.25, "eager_us": 20.5, "device": "cpu"}
    schedule |= {"streams": 1, "syncs": 0, "tolerance": 1e-3, "error": 0.0, "runs": "schedule", "peak_bytes": 16}

    def finished(name: str, *, kind: str = "score") -> str:
        job = found.take(found.submit(name, kind=kind))
        progress: Any = {"done": 360, "total": 360, "bad": 0, "phase": "run"}
        store.jobs.progress(job.id, job.attempt, **progress)
        outputs = {"path": str(found.folder / "out"), "files": ["part-0.parquet"], "bytes": 2048, "records": 360}
        store.jobs.finish(job.id, job.attempt, outputs=outputs, timings=TIMINGS, schedule=schedule, now=time.time())
        found.log(job.id, f"2027-01-01T00:00:00.000Z INFO {name}: attempt 1\n")
        return job.id

    found.jobs["succeeded"] = finished("digits-score")
    found.jobs["trained"] = finished("digits-train", kind="finetune")
    found.jobs["hostile"] = finished(HOSTILE)
    found.log(found.jobs["hostile"], f"{HOSTILE}\n<script>alert(2)</script>\n")
    failing = found.take(found.submit("inbox-photos"))
    store.jobs.fail(failing.id, failing.attempt, error=ERROR, retry=False, now=time.time())
    leaving = found.submit("cancelled-one")
    store.jobs.cancel(leaving.id, time.time())
    found.jobs |= {"failed": failing.id, "cancelled": leaving.id}


def _timers(found: Seeded) -> None:
    now = time.time()
    timers.add(found.store, found.folder, "nightly", now=now - 3 * timers.HOUR)
    timers.add(found.store, found.folder, "unused", now=now, expression="15 2 * * *")
    fired = timers.fire(found.store, now)
    for tick in fired:
        if tick.job is not None:
            found.store.jobs.cancel(tick.job, now)
