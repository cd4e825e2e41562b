#!/usr/bin/env python3
"""One `nimble-jobs` command that writes down where its wall time goes. `measure_run.py --phases` starts it.

    python scripts/run_phases.py FILE COMMAND...

Imports are timed one by one, an import inside of another as part of it; functions of the package without the timed ones
that they call. FILE gets one JSON object: seconds by phase of the main thread, and by name of the other threads.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

BEGAN = time.time()
WATCHED = {  # functions where they are called from, and the phase that each is
    "nimble_jobs.cli.submit:run": "command",
    "nimble_jobs.spec:load": "read the spec",
    "nimble_jobs.cli.options:store": "open the store",
    "nimble_jobs.client:submit": "submit",
    "nimble_jobs.worker.foreground:run_inline": "claim and the rest",
    "nimble_jobs.worker.foreground:real_station": "the device",
    "nimble_jobs.workloads:run": "the rest of the job",
    "nimble_jobs.workloads.score:open_reader": "open the reader",
    "nimble_jobs.workloads.score:basis": "basis",
    "nimble_jobs.workloads.score:Staging": "staging",
    "nimble_jobs.planner.jobs.prepare:key_parts": "key",
    "nimble_jobs.planner.jobs.prepare:build_module": "module",
    "nimble_jobs.models.build:_placed": "module to its dtype and device",
    "nimble_jobs.models.build:load_weights": "weights",
    "nimble_jobs.planner.jobs.take:read_stored": "look up and artifacts",
    "nimble_jobs.planner.jobs.take:observe_calls": "observe",
    "nimble_jobs.planner.sources.source:Variants.use": "fold and lay out",
    "nimble_jobs.planner.forward.restore:unpack": "load compiled kernels",
    "nimble_jobs.planner.search.plans:capture": "warm-up runs and capture",
    "nimble_jobs.engine.verify:check": "check: eager",
    "nimble_jobs.engine.verify:run_once": "check: replays",
    "nimble_jobs.planner.jobs.loaded:Loaded.take_off": "staging buffers",
    "nimble_jobs.workloads.scoring:Scoring.run": "reading, replaying, writing",
    "nimble_jobs.data.staging:Staging.write_shard": "reading, replaying, writing",
    "nimble_jobs.data.staging:Staging.publish": "publish",
    "nimble_jobs.worker.endings:succeeded": "record the end",
    "nimble_jobs.cli.submit:_report": "report",
}
PACKAGES = ("torch", "torchvision", "pydantic", "sqlalchemy", "numpy", "pyarrow", "PIL", "rich", "typer", "triton")


class Clock:
    """Seconds by phase of each thread. While an inner phase runs, the outer one's clock stands still."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._mine = threading.local()

    def turn(self, begins: str | None) -> None:
        """A phase begins; None: the present one ends."""
        now = time.perf_counter()
        stack: list[str] = self._mine.__dict__.setdefault("stack", [])
        if stack:
            self.seconds[threading.current_thread().name][stack[-1]] += now - self._mine.since
        self._mine.since = now
        if begins is None:
            stack.pop()
        else:
            stack.append(begins)

    def within(self, name: str) -> bool:
        """Is the present phase of this thread called so?"""
        return name in self._mine.__dict__.get("stack", ())

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, as the phase `name`."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.turn(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn(None)

        return call


class Watching(importlib.abc.MetaPathFinder):
    """Times each module that is imported, and the functions in it that are watched."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._places: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for place, name in WATCHED.items():
            module, _, path = place.partition(":")
            self._places[module].append((path, name))

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """As the finders after this one, with a loader that is timed."""
        package = fullname.partition(".")[0]
        if package not in PACKAGES and fullname not in self._places:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is None or found.loader is None or not hasattr(found.loader, "exec_module"):
            return found
        execute = found.loader.exec_module

        def timed(module: ModuleType) -> None:
            if self._clock.within(f"import {package}") or package not in PACKAGES:
                execute(module)
            else:
                self._clock.timed(execute, f"import {package}")(module)
            self._patch(module)

        found.loader.exec_module = timed  # type: ignore[method-assign]
        return found

    def _patch(self, module: ModuleType) -> None:
        for path, name in self._places.get(module.__name__, ()):
            owner: Any = module
            *folders, last = path.split(".")
            for part in folders:
                owner = getattr(owner, part)
            if hasattr(owner, last):
                setattr(owner, last, self._clock.timed(getattr(owner, last), name))
            else:
                print(f"not timed, as it is not there: {module.__name__}.{path} ({name})", file=sys.stderr)


def main() -> None:
    """Run the command, write, and leave as the command does."""
    file, words = Path(sys.argv[1]), sys.argv[2:]
    clock = Clock()
    sys.meta_path.insert(0, Watching(clock))
    clock.turn("everything else")
    from nimble_jobs.cli import main as cli

    code = cli.main(words)
    clock.turn(None)
    threads = {thread: dict(seconds) for thread, seconds in clock.seconds.items()}
    file.write_text(json.dumps({"threads": threads, "began": BEGAN, "ended": time.time()}))
    leave = getattr(cli, "leave", sys.exit)
    leave(code)


if __name__ == "__main__":
    main()
