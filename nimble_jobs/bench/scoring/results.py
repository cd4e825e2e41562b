"""Rows of results, what is computed from them, and the JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from nimble_jobs.bench.scoring.request import System

MODE = "scoring"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One whole run of one system, in a process of its own."""

    run_s: float  # from the first to the last record; start-up, compilation and loading left out
    wall_s: float  # of the whole process
    files: str  # cached | uncached | what became of it


@dataclass(frozen=True, kw_only=True)
class ScoringRow:
    """What was found out about one system. What was not measured is None."""

    model: str
    system: str
    dtype: str
    batch: int | None = None
    workers: int | None = None
    mode: str = MODE
    records: int = 0
    trials: tuple[Trial, ...] = ()
    replay_us: float | None = None  # ours: of the stored schedule
    with_copies_us: float | None = None
    prepare_s: float | None = None  # ours: building the schedule; others: what their process does before the clock
    peak_bytes: int | None = None
    searched: tuple[dict[str, Any], ...] = ()  # settings that were tried, with records/s or an error
    same_top1: float | None = None  # share of records with the top-1 of the reference
    bare_records_per_s: float | None = None  # arrays: the same schedule's replays alone, as many in flight
    facts: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    error: str | None = None

    @property
    def rates(self) -> list[float]:
        """Records a second of each trial."""
        return [self.records / trial.run_s for trial in self.trials]

    @property
    def records_per_s(self) -> float | None:
        return median(self.rates) if self.trials else None

    @property
    def wall_s(self) -> float | None:
        return median(trial.wall_s for trial in self.trials) if self.trials else None

    @property
    def files(self) -> str | None:
        """Whether the files were cached, in all trials."""
        return "; ".join(dict.fromkeys(trial.files for trial in self.trials)) or None

    @property
    def of_bare(self) -> float | None:
        """Job's records a second over those of the bare replay."""
        if self.records_per_s is None or self.bare_records_per_s is None:
            return None
        return self.records_per_s / self.bare_records_per_s


@dataclass(kw_only=True)
class ScoringResults:
    """The environment, and a row a system."""

    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[ScoringRow] = field(default_factory=list)
    equal: dict[str, dict[str, float]] = field(default_factory=dict)  # share of equal top-1 of two systems

    def best_by_hand(self) -> ScoringRow | None:
        """The fastest hand-written loop."""
        return _fastest([row for row in self.rows if row.system in set(System) and System(row.system).by_hand])

    def over(self, row: ScoringRow, other: ScoringRow | None) -> float | None:
        """How many times as fast a row is as another."""
        if other is None or not row.records_per_s or not other.records_per_s:
            return None
        return row.records_per_s / other.records_per_s

    def to_json(self) -> dict[str, Any]:
        best = self.best_by_hand()
        rows = []
        for row in self.rows:
            derived = {
                "records_per_s": row.records_per_s,
                "records_per_s_low": min(row.rates, default=None),
                "records_per_s_high": max(row.rates, default=None),
                "wall_s": row.wall_s,
                "files": row.files,
                "over_best_loop": self.over(row, best),
                "of_bare": row.of_bare,
            }
            rows.append(dataclasses.asdict(row) | derived)
        return {"environment": self.environment, "results": rows, "equal_top1": self.equal}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def _fastest(rows: Sequence[ScoringRow]) -> ScoringRow | None:
    return max((row for row in rows if row.records_per_s), key=lambda row: row.records_per_s or 0.0, default=None)
