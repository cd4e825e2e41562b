"""Timers for tests: a store, a spec whose files exist, and a clock that is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nimble_jobs import spec as specs
from nimble_jobs.job import Job
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Store, Tick, Timer
from nimble_jobs.timers import Firer, put

MINUTE, HOUR, DAY = 60, 3600, 86400
NOON = datetime(2027, 3, 1, 12, tzinfo=UTC).timestamp()


def spec_of(folder: Path, name: str = "nightly", **changes: Any) -> JobSpec:
    """A spec that scores a folder of pictures once an hour; `changes` go into its `cron`, those with dots elsewhere."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    value: dict[str, Any] = {
        "version": 1,
        "name": name,
        "kind": "score",
        "model": {"source": "torchvision:resnet18"},
        "input": {"source": str(folder / "in"), "format": "images"},
        "output": {"path": str(folder / "out" / "{{ tick:%Y-%m-%dT%H%M }}")},
        "cron": {"expression": "0 * * * *"},
    }
    for field, given in changes.items():
        *around, last = (field if "." in field else f"cron.{field}").split(".")
        place = value
        for part in around:
            place = place.setdefault(part, {})
        place[last] = given
    return specs.restore(value)


def add(store: Store, folder: Path, name: str = "nightly", *, now: float = NOON, **changes: Any) -> Timer:
    """A timer for such a spec."""
    spec = spec_of(folder, name, **changes)
    return put(store, spec, file=folder / f"{name}.yaml", now=now)[0]


def fire(store: Store, now: float) -> list[Tick]:
    """Everything that is due at a time, as a worker does it: part after part."""
    firer = Firer(store)
    ticks: list[Tick] = []
    while True:
        fired = firer.run(now)
        ticks += fired.ticks
        if not fired.more:
            return ticks


def start(store: Store, job: str, now: float) -> Job:
    """Let a worker take the job."""
    taken = store.jobs.claim("0-test", device="cpu", now=now)
    assert taken is not None
    assert taken.id == job
    return taken


def end(store: Store, job: Job, now: float) -> None:
    """It succeeded, or stopped when it was asked to."""
    if store.jobs.get(job.id).cancel_requested:
        assert store.jobs.cancelled(job.id, job.attempt, now)
    else:
        assert store.jobs.finish(job.id, job.attempt, outputs={}, timings={}, schedule={}, now=now)


def told(ticks: Sequence[Tick]) -> list[tuple[int, str, str]]:
    """Hours after noon, kind and outcome of each tick."""
    return [(round((tick.due - NOON) / HOUR), tick.kind.value, tick.outcome.value) for tick in ticks]


def rows(store: Store, name: str = "nightly") -> list[tuple[int, str, str]]:
    """The same of every row of a timer, oldest first."""
    return told(store.timers.ticks(name)[::-1])
