#!/usr/bin/env python3
"""One `nimble-jobs` command that writes down where its wall time goes. `measure_run.py --phases` starts it.

    python scripts/run_phases.py FILE COMMAND...

Every thread has an account of its own. Imports are timed by package, an import of the same package inside of another as
part of it; functions of this package without the timed ones that they call. What is left of the main thread is
"everything else", so its phases add up to the time from the first line of this script to the end of the command. FILE
gets one JSON object: for each thread and phase when it began first and ended last, how long it took, and the thread's
CPU seconds in it. A phase takes longer than these where the device or a disk is waited for, or Python's lock.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from phases import Clock

BEGAN, BEGAN_CLOCK = time.time(), time.perf_counter()
WATCHED = {  # functions where they are called from, and the phase that each is
    "nimble_jobs.cli.submit:run": "command",
    "nimble_jobs.worker.early:Early.join": "wait for imports",
    "nimble_jobs.spec:load": "read the spec",
    "nimble_jobs.cli.options:store": "open the store",
    "nimble_jobs.client:submit": "submit",
    "nimble_jobs.worker.early:_make_context": "CUDA's context",
    "nimble_jobs.engine.first_calls:load_operators": "operators",
    "nimble_jobs.worker.foreground:run_inline": "claim and the rest",
    "nimble_jobs.worker.foreground:real_station": "the device",
    "nimble_jobs.workloads:run": "the rest of the job",
    "nimble_jobs.workloads.score:opened": "open the reader",
    "nimble_jobs.workloads.attempt:basis": "basis",
    "nimble_jobs.workloads.attempt:stage_output": "staging",
    "nimble_jobs.workloads.score:prepare": "the rest of loading",
    "nimble_jobs.planner.jobs.prepare:key_parts": "key",
    "nimble_jobs.planner.jobs.prepare:build_module": "module",
    "nimble_jobs.models.build:_placed": "module to its dtype and device",
    "nimble_jobs.models.build:load_weights": "weights",
    "nimble_jobs.planner.jobs.take:read_stored": "look up and artifacts",
    "nimble_jobs.planner.jobs.take:observe_calls": "observe",
    "nimble_jobs.planner.forward.restore:Variants": "fold and lay out",
    "nimble_jobs.planner.sources.source:Variants.use": "fold and lay out",
    "nimble_jobs.planner.forward.restore:compact": "move the weights together",
    "nimble_jobs.planner.forward.restore:unpack": "load compiled kernels",
    "nimble_jobs.planner.search.plans:capture": "bind, workspaces and the rest of capturing",
    "nimble_jobs.engine.capture:_launch": "warm-up runs and capture",
    "nimble_jobs.engine.verify:check": "check: comparison and the rest",
    "nimble_jobs.engine.verify:_eager": "check: eager",
    "nimble_jobs.engine.verify:run_once": "check: replays",
    "nimble_jobs.planner.jobs.loaded:Loaded.take_off": "staging buffers",
    "nimble_jobs.workloads.moving:decided": "first run: decide",
    "nimble_jobs.workloads.moving:capture_quickly": "first run: the rest of the quick candidate",
    "nimble_jobs.planner.forward.build:observe_calls": "observe",
    "nimble_jobs.planner.forward.target:record_source": "record",
    "nimble_jobs.engine.measure:in_turns_us": "time replays",
    "nimble_jobs.workloads.scoring:Scoring.run": "reading, replaying, writing",
    "nimble_jobs.data.staging:Staging.write_shard": "reading, replaying, writing",
    "nimble_jobs.data.staging:Staging.publish": "publish",
    "nimble_jobs.worker.endings:succeeded": "record the end",
    "nimble_jobs.worker.foreground:tidy": "tidy",
    "nimble_jobs.worker.executor:tidy": "tidy",
    "nimble_jobs.cli.submit:_tell": "send notifications",
    "nimble_jobs.cli.submit:_report": "report",
}
PACKAGES = (
    *("torch", "torchvision", "triton", "sympy", "numpy", "PIL", "pyarrow", "safetensors", "cykooz"),
    *(
        "pydantic",
        "transformers",
        "tokenizers",
        "scipy",
        "sqlalchemy",
        "alembic",
        "psutil",
        "yaml",
        "rich",
        "typer",
        "asyncio",
    ),
)
OWN = "nimble_jobs"


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
        if package not in PACKAGES and package != OWN:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is None or found.loader is None or not hasattr(found.loader, "exec_module"):
            return found
        execute = found.loader.exec_module
        name = "import this package" if package == OWN else f"import {package}"

        def timed(module: ModuleType) -> None:
            if self._clock.within(name):
                execute(module)
            else:
                self._clock.timed(execute, name)(module)
            self._patch(module)

        found.loader.exec_module = timed  # type: ignore[method-assign]
        return found

    def _patch(self, module: ModuleType) -> None:
        for path, name in self._places.get(module.__name__, ()):
            self._clock.patch(module, path, name)


def main() -> None:
    """Run the command, write, and leave as the command does."""
    file, words = Path(sys.argv[1]), sys.argv[2:]
    clock = Clock(start=BEGAN_CLOCK)
    sys.meta_path.insert(0, Watching(clock))
    clock.turn("everything else")
    from nimble_jobs.cli import main as cli

    code = cli.main(words)
    clock.turn(None)
    ended = time.time()
    threads = {thread: {n: asdict(p) for n, p in phases.items()} for thread, phases in clock.threads.items()}
    facts = {
        "threads": threads,
        "began": BEGAN,
        "ended": ended,
        "modules": len(sys.modules),
        "cpu_s": time.process_time(),
    }
    file.write_text(json.dumps(facts))
    leave = getattr(cli, "leave", sys.exit)
    leave(code)


if __name__ == "__main__":
    main()
