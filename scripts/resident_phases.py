#!/usr/bin/env python3
"""A worker that writes down where the time of each job goes. `bench_resident.py --phases` starts it.

    python scripts/resident_phases.py HOME DEVICE FILE [--max-idle-s 5]

Functions of the package are timed, each without the timed ones that it calls. On a GPU the launch of a replay returns
at once, so that the wait for it falls into `the batches`; `schedule.replay_us` of the job says how long the device
worked.
Each line of FILE is JSON about one job: stamps of the monotonic clock, milliseconds by phase, and counts of what waits
for the disk. SQLite's own syncs are told by its commits: 5 each with a rollback journal (journal twice, its folder, the
database, the emptied journal), 1 each with a write-ahead log.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phases import Clock

FILE = "NIMBLE_BENCH_PHASES"  # names the file to the worker's processes
CHILD = {  # functions where they are called from, and the phase that each is
    "nimble_jobs.spec:restore": "read the spec",
    "nimble_jobs.workloads.score:open_reader": "open the reader",
    "nimble_jobs.workloads.attempt:basis": "basis",
    "nimble_jobs.workloads.attempt:stage_output": "staging",
    "nimble_jobs.workloads.score:prepare": "prepare",
    "nimble_jobs.planner.jobs.prepare:key_parts": "key",
    "nimble_jobs.planner.jobs.prepare:_still_serves": "still stored?",
    "nimble_jobs.workloads.scoring:Scoring.run": "the batches",
    "nimble_jobs.engine.capture:_CallInstance.replay": "replay",
    "nimble_jobs.engine.capture:_GraphInstance.replay": "replay",
    "nimble_jobs.data.staging:Staging.write_shard": "write the shard",
    "nimble_jobs.data.staging:Staging.publish": "publish",
    "nimble_jobs.store.publications:Publications.key": "look before the publication",
    "nimble_jobs.store.jobs:Jobs.event_soon": "events",
    "nimble_jobs.worker.endings:succeeded": "record the end",
    "nimble_jobs.worker.executor:tidy": "tidy",
    "nimble_jobs.workloads:run": "the rest of the job",
    "nimble_jobs.worker.executor:execute": "log, pulse and the rest",
}
SUPERVISOR = {
    "nimble_jobs.store.jobs:Jobs.claim": "claim",
    "nimble_jobs.worker.process:Child.run": "send the job",
    "nimble_jobs.worker.supervisor:Supervisor._beat": "supervisor: beat",
}
COUNTS = ("commits", "statements", "fsyncs", "files opened")


class Counting(Clock):
    """A clock of one process that also counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def count(self) -> None:
        """Count transactions, statements, syncs and opened files of this process from now on."""
        from sqlalchemy import event
        from sqlalchemy.engine import Engine

        event.listen(Engine, "commit", lambda _connection: self._add("commits"))
        event.listen(Engine, "before_cursor_execute", lambda *_: self._add("statements"))
        sync = os.fsync

        def counted(fd: Any) -> None:
            self._add("fsyncs")
            sync(fd)

        os.fsync = counted
        sys.addaudithook(lambda name, _arguments: self._add("files opened") if name == "open" else None)

    def take(self) -> dict[str, Any]:
        """Milliseconds and counts since the last call."""
        found = {"ms": {name: s * 1e3 for name, s in self.seconds.items()}, "counts": dict(self.counts)}
        self.threads.clear()
        self.counts.clear()
        return found

    def _add(self, name: str) -> None:
        self.counts[name] += 1


def write(**line: Any) -> None:
    """One more line of FILE."""
    with open(os.environ[FILE], "a") as file:  # noqa: PTH123
        file.write(json.dumps(line) + "\n")


def child(*arguments: Any) -> None:
    """As `worker.child.main`, timed."""
    from nimble_jobs import workloads
    from nimble_jobs.worker import child as child_process
    from nimble_jobs.worker import executor

    clock = Counting()
    clock.watch(CHILD)
    clock.count()
    execute = executor.execute
    assert workloads.run is not None

    def timed(job: Any, *args: Any, **kwargs: Any) -> bool:
        clock.take()
        begin = time.monotonic()
        sound = execute(job, *args, **kwargs)
        end = time.monotonic()
        write(job=job.id, name=job.name, begin=begin, end=end, **clock.take())
        return bool(sound)

    executor.execute = timed
    child_process.main(*arguments)


def main() -> int:
    """Be the worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("home", type=Path)
    parser.add_argument("device")
    parser.add_argument("file", type=Path)
    parser.add_argument("--max-idle-s", type=float, default=5.0)
    options = parser.parse_args()
    os.environ[FILE] = str(options.file)
    from nimble_jobs.worker import charge, serve

    clock = Counting()
    clock.watch(SUPERVISOR)
    clock.count()
    take, done = charge.Charge.take, charge.Charge.done

    def timed_take(self: charge.Charge, *args: Any) -> bool:
        begin = time.monotonic()
        found = take(self, *args)
        if found and self.job:
            write(job=self.job.id, claiming=begin, claimed=time.monotonic(), **clock.take())
        return found

    def timed_done(self: charge.Charge, job_id: str, attempt: int) -> bool:
        write(job=job_id, heard=time.monotonic())
        return done(self, job_id, attempt)

    charge.Charge.take, charge.Charge.done = timed_take, timed_done  # type: ignore[method-assign,assignment]
    return serve.run(options.home, devices=(options.device,), max_idle_s=options.max_idle_s, target=child)


def summary(file: Path, jobs: Iterable[str]) -> dict[str, dict[str, float]]:
    """Medians over these jobs: milliseconds by phase, and counts of both processes together."""
    lines: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text().splitlines():
        read = json.loads(line)
        lines[read["job"]].append(read)
    ms: defaultdict[str, list[float]] = defaultdict(list)
    counts: defaultdict[str, list[int]] = defaultdict(list)
    heard_before: float | None = None
    for job in jobs:
        said: dict[str, Any] = {}
        spent: defaultdict[str, float] = defaultdict(float)
        counted: Counter[str] = Counter()
        for told in lines[job]:
            said |= told
            counted.update(told.get("counts", {}))
            for name, value in told.get("ms", {}).items():
                spent[name] += value
        if heard_before is not None:
            spent["from the last job to the claim"] = (said["claiming"] - heard_before) * 1e3
        heard_before = said["heard"]
        spent["hand over to the child"] = (said["begin"] - said["claimed"]) * 1e3
        spent["tell the supervisor"] = (said["heard"] - said["end"]) * 1e3
        spent["in all, from claim to hearing of the end"] = (said["heard"] - said["claiming"]) * 1e3
        for name, value in spent.items():
            ms[name].append(value)
        for name in COUNTS:
            counts[name].append(counted[name])
    return {
        "ms": {name: round(statistics.median(values), 3) for name, values in ms.items()},
        "counts": {name: statistics.median(values) for name, values in counts.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
