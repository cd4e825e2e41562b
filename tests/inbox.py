"""A folder that grows, and the jobs that score what is new in it, run in this process without a schedule."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from nimble_jobs import spec as specs
from nimble_jobs.job import Job
from nimble_jobs.store import Store
from nimble_jobs.worker.executor import execute, real_station
from nimble_jobs.workloads import score
from nimble_jobs.workloads.context import JobContext, Outcome
from tests.store_samples import queued

MODEL = """\
import torch

class Mean(torch.nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(float(scale)))

    def forward(self, x):
        return x.flatten(1)[:, :2] * self.scale
"""
OLD_S = 1000.0  # long settled


class Killed(KeyboardInterrupt):
    """The process ends here."""


class Inbox:
    """`self.folder` holds the files. Each job publishes in a folder of its own."""

    def __init__(self, store: Store, base: Path, format_: str = "npy") -> None:
        self.store, self.base, self.format = store, base, format_
        self.folder = base / "in"
        self.folder.mkdir(exist_ok=True)
        (base / "model.py").write_text(MODEL)
        self.station = real_station(store, "w", "cpu", None)
        self.settings: dict[str, Any] = {}
        self.model: dict[str, Any] = {}
        self.run: dict[str, Any] = {}
        self.output: dict[str, Any] = {}
        self.source = str(self.folder)
        self.count = 0

    def put(self, name: str, value: float = 1.0, *, rows: int = 2, age_s: float = OLD_S) -> Path:
        """A file of `rows` records, or one picture, last written `age_s` ago."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        match path.suffix:
            case ".png":
                Image.fromarray(np.full((4, 4, 3), int(value), dtype=np.uint8)).save(path)
            case ".npy":
                np.save(path, np.full((rows, 3), value, dtype=np.float32))
            case ".npz":
                np.savez(path, x=np.full((rows, 3), value, dtype=np.float32))
            case ".csv":
                path.write_text("a,b,c\n" + f"{value},{value},{value}\n" * rows)
            case ".parquet":
                pq.write_table(pa.table({name: [float(value)] * rows for name in "abc"}), path)
            case _:
                path.write_bytes(b"?")
        age(path, age_s)
        return path

    def submit(self, *, name: str = "n") -> Job:
        """Queue a job."""
        self.count += 1
        spec = {
            "version": 1,
            "name": name,
            "kind": "score",
            "model": {"source": f"python:{self.base}/model.py:Mean", **self.model},
            "input": {"source": self.source, "format": self.format, "batch_size": 4, "only_new": self.settings},
            "schedule": {"on_miss": "eager"},
            "output": {
                "path": str(self.base / f"out-{self.count}"),
                "format": "jsonl",
                "fields": ["id", "logits"],
                **self.output,
            },
            "run": self.run,
        }
        if self.format in ("csv", "parquet"):
            spec["input"]["fields"] = {"x": "a,b,c"}  # type: ignore[index]
        resolved = specs.dump(specs.restore(spec))
        allowed = [str(self.base)]
        return queued(self.store, spec=resolved, name=name, kind="score", allow_python=allowed, now=time.time())

    def claim(self) -> Job:
        """Begin the next attempt, however long it should wait."""
        job = self.store.jobs.claim("w", device="cpu", now=time.time() + 1e6)
        assert job is not None
        return job

    def work(self, run: Callable[[JobContext], Outcome] = score.run) -> Job:
        """Run the next attempt to its end, or until Killed, after which the job is queued again."""
        job = self.claim()
        try:
            execute(job, type(self.station)(**{**vars(self.station), "run": run}))
        except Killed:
            self.lose(job)
        return self.store.jobs.get(job.id)

    def lose(self, job: Job) -> None:
        """The worker that ran this attempt has died."""
        self.store.jobs.fail(job.id, job.attempt, error="the worker died", retry=True, lost=True, now=time.time())

    def job(self) -> Job:
        """Submit a job and run it."""
        self.submit()
        return self.work()

    def ids(self, job: Job) -> list[str]:
        """The records that a job published; none if it was empty."""
        if job.outputs.get("empty"):
            return []
        parts = sorted(Path(job.outputs["path"]).glob("part-*.jsonl"))
        return [json.loads(line)["id"] for part in parts for line in part.read_text().splitlines()]

    def seen(self, name: str = "n") -> dict[str, str]:
        """The files that are seen, each with its job."""
        return {seen.path: seen.job for seen in self.store.seen.files(name)}


def age(path: Path, seconds: float) -> None:
    """Let the file have been written so long ago."""
    at = time.time() - seconds
    os.utime(path, (at, at))


def counts(job: Job) -> dict[str, int]:
    """The counts of a job that are not zero."""
    return {name: n for name, n in job.outputs["only_new"].items() if n}
