"""Rows of results, and the JSON file that holds them: written after every unit, so that a killed run keeps its rows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nimble_jobs.bench.request import Unit
from nimble_jobs.errors import UsageError

Key = tuple[str, str, str, str, int, str, int | None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found out about one system on one model. What was not measured is None."""

    model: str
    system: str
    batch: int
    dtype: str
    mode: str = "inference"
    layout: str  # contiguous | channels-last | own choice
    in_flight: int | None = None  # instances replayed at once; None for rows of latency
    replay_us: float | None = None  # median of one call or replay, input and output on the device
    replay_low_us: float | None = None  # first quartile
    replay_high_us: float | None = None  # third quartile
    with_copies_us: float | None = None  # median, from pinned host memory and back to it
    records_per_s: float | None = None
    records_per_s_with_copies: float | None = None
    prepare_s: float | None = None  # from the module on the device to a first finished call
    caches: str | None = None  # cold | shared: compilers' caches while preparing
    peak_bytes: int | None = None  # device memory beyond weights and inputs while running
    build_peak_bytes: int | None = None  # the same while preparing
    relative_norm: float | None = None  # largest difference from eager on fresh inputs; training: of losses, on average
    busy_us: float | None = None  # time of one call in which at least one kernel runs
    kernels: int | None = None  # launched by one call
    idle_share: float | None = None  # of the GPU: 1 - busy_us / replay_us
    facts: dict[str, Any] = field(default_factory=dict)  # ours: tasks, width, streams, syncs, bounds
    candidates: list[dict[str, Any]] = field(default_factory=list)  # ours: everything that was built and measured
    note: str | None = None
    error: str | None = None

    @property
    def key(self) -> Key:
        return (self.mode, self.model, self.system, self.dtype, self.batch, self.layout, self.in_flight)


def failed(unit: Unit, systems: Iterable[str], error: str) -> list[Row]:
    """A row for each system, saying why there is no figure."""
    return [
        Row(
            model=unit.model,
            system=system,
            batch=unit.batch,
            dtype=unit.dtype,
            mode=unit.mode,
            layout=unit.layout,
            error=error,
        )
        for system in systems
    ]


def in_words(error: BaseException) -> str:
    """One line for an error row."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0][:300] if lines else ""
    name = type(error).__name__
    if name == "OutOfMemoryError":
        return f"out of memory: {said}"
    own = type(error).__module__.startswith("nimble_jobs.")
    return said if own else f"{name}: {said}"


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
        return {"environment": self.environment, "results": [dataclasses.asdict(row) for row in self.rows]}

    def save(self, path: Path) -> None:
        """Write the file whole, or leave the older one."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Results:
        """Raises UsageError for a file that holds something else."""
        try:
            raw = json.loads(path.read_text())
            return cls(environment=dict(raw["environment"]), rows=[Row(**row) for row in raw["results"]])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UsageError(f"{path}: not results of this benchmark: {type(e).__name__}: {e}") from e


def write_json(path: Path, value: object) -> None:
    """Write the file whole, or leave the older one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise


def _origin(environment: dict[str, Any]) -> str:
    """What rows must have in common to stand in one file."""
    return f"{environment.get('device')} with torch {environment.get('versions', {}).get('torch')}"
