"""Where the benchmark works: folders, the log, and the steps that need torch, each in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimble_jobs.bench.process import ProcessDied
from nimble_jobs.bench.scoring import process
from nimble_jobs.bench.scoring.process import Ended, Start
from nimble_jobs.bench.scoring.results import ScoringResults
from nimble_jobs.errors import NimbleError, UsageError


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What all systems share."""

    folder: Path  # for specs, weights and outputs
    home: Path  # the state folder of our jobs
    log: Path
    limit_s: float
    told: Callable[[str], None] = lambda _: None
    kept: Callable[[ScoringResults], None] = lambda _: None  # gets the results after every run
    start: Start = process.start_alone
    seen: Callable[[Any], None] = lambda _: None  # gets each process when it has started
    room: str = "nimble_jobs.bench.scoring"  # the module that has the steps

    @property
    def weights(self) -> Path:
        """What all systems load."""
        return self.folder / "weights.safetensors"

    def module(self, name: str, *words: str | Path, env: Mapping[str, str] | None = None) -> Ended:
        """Run one of our modules to its end."""
        command = [sys.executable, "-m", name, *map(str, words)]
        return process.run(command, log=self.log, limit_s=self.limit_s, start=self.start, env=env, seen=self.seen)

    def step(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """What a step of `room` answers.

        Raises UsageError if it refuses, ProcessDied if it dies.
        """
        asked, result = self.folder / f"{name}.json", self.folder / f"{name}-result.json"
        asked.write_text(json.dumps(request))
        result.unlink(missing_ok=True)
        ended = self.module(self.room, name, asked, result)
        if result.exists():
            answer: dict[str, Any] = json.loads(result.read_text())
            if "refused" in answer:
                raise UsageError(answer["refused"])
            return answer
        raise ProcessDied(f"{name}: {ended.error}")


def answer(steps: Mapping[str, Callable[[dict[str, Any]], Any]], name: str, request: Path, result: Path) -> int:
    """What the process of a step does. Where the step refuses what was asked for, the result says why.

    Returns the exit code: 2 for a refusal.
    """
    asked = json.loads(request.read_text())
    try:
        found = steps[name](asked)
    except NimbleError as e:
        result.write_text(json.dumps({"refused": str(e), "exit_code": e.exit_code}))
        return 2
    result.write_text(json.dumps(found))
    return 0
