"""Rows of results, and the JSON file that holds them: written after every unit, so that a killed run keeps its rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nimble_jobs.bench.ratios import compare
from nimble_jobs.bench.request import Unit
from nimble_jobs.bench.row import Row
from nimble_jobs.errors import UsageError
from nimble_jobs.whole import write_whole


@dataclass(kw_only=True)
class Results:
    """The environment, and one row a key; a newer row takes the place of an older one."""

    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows in, at the place of older ones with the same key."""
        position = {row.key: i for i, row in enumerate(self.rows)}
        for row in rows:
            if row.key in position:
                self.rows[position[row.key]] = row
            else:
                position[row.key] = len(self.rows)
                self.rows.append(row)

    def done(self, unit: Unit, in_flight: tuple[int, ...] = (), *, idle: bool = False) -> bool:
        """Whether every system of the unit has a row without an error, with the idle share where that is wanted."""
        found = {row.key: row for row in self.rows if row.error is None}
        wanted: list[tuple[str, int | None]] = [(system, None) for system in unit.systems]
        if unit.family == "ours":
            wanted += [("ours", number) for number in in_flight]
        rows = [found.get((unit.mode, unit.model, s, unit.dtype, unit.batch, unit.layout, n)) for s, n in wanted]
        return all(rows) and (not idle or any(row.idle_share is not None for row in rows if row))

    def adopt(self, environment: dict[str, Any]) -> None:
        """Note where the rows come from. Raises UsageError where earlier rows come from elsewhere."""
        before, now = _origin(self.environment), _origin(environment)
        if self.rows and before != now:
            raise UsageError(f"the earlier results are from {before}, this run is on {now}; write to another file")
        earlier = self.environment.get("runs", []) if self.rows else []
        run = {"commit": environment.get("commit"), "date": environment.get("date")}
        self.environment = {**environment, "runs": [*earlier, *environment.get("runs", [run])]}

    def to_json(self) -> dict[str, Any]:
        """The environment, every row, and what follows from the rows: one comparison a model, dtype and batch size."""
        return {
            "environment": self.environment,
            "results": [dataclasses.asdict(row) for row in self.rows],
            "comparisons": [comparison.to_json() for comparison in compare(self.rows)],
        }

    def save(self, path: Path) -> None:
        """Write the file whole, or leave the older one."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Results:
        """Raises UsageError for a file that holds something else."""
        try:
            raw = json.loads(path.read_text())
            return cls(environment=dict(raw["environment"]), rows=[Row(**row) for row in raw["results"]])
        except OSError as e:
            raise UsageError(f"{path}: {e.strerror}; expected results that `bench --json` wrote") from e
        except (ValueError, KeyError, TypeError) as e:
            raise UsageError(f"{path}: not results that `bench --json` wrote ({type(e).__name__}: {e})") from e


def write_json(path: Path, value: object) -> None:
    """Write the file whole, or leave the older one."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode(), mode=0o666)


def _origin(environment: dict[str, Any]) -> str:
    """What rows must have in common to stand in one file."""
    return f"{environment.get('device')} with torch {environment.get('versions', {}).get('torch')}"
