"""Rows of results, what is computed from them, and the JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from nimble_jobs.bench.results import write_json
from nimble_jobs.bench.scoring.predictions import Agreement
from nimble_jobs.bench.scoring.request import System
from nimble_jobs.errors import UsageError

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
    prepare_s: float | None = None  # ours: building the schedule; others: what their process does before the clock
    searched: tuple[dict[str, Any], ...] = ()  # settings that were tried, with records/s or an error
    same_top1: float | None = None  # share of records with the top-1 of the reference
    probability_difference: float | None = None  # the largest, from the reference, where top-1 is the same
    bare_records_per_s: float | None = None  # arrays: the same schedule's replays alone, as many in flight
    facts: dict[str, Any] = field(default_factory=dict)
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
    def outside_s(self) -> float | None:
        """What the process needs beside the run: imports, loading, compilation, publication."""
        return median(trial.wall_s - trial.run_s for trial in self.trials) if self.trials else None

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
    agreement: dict[str, dict[str, Agreement]] = field(default_factory=dict)  # of each two systems

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
                "outside_s": row.outside_s,
                "files": row.files,
                "over_best_loop": self.over(row, best),
                "of_bare": row.of_bare,
                "with_copies_us": None,  # of every benchmark's rows; here the job's own copies are in its rate
                "peak_bytes": None,
            }
            rows.append(asdict(row) | derived)
        agreement = {one: {other: asdict(a) for other, a in row.items()} for one, row in self.agreement.items()}
        return {"environment": self.environment, "results": rows, "agreement": agreement}

    def save(self, path: Path) -> None:
        """Write the file whole, or leave the older one."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> ScoringResults:
        """Raises UsageError for a file that holds something else."""
        try:
            raw = json.loads(path.read_text())
            names = {f.name for f in fields(ScoringRow)}
            rows = [{k: v for k, v in row.items() if k in names} for row in raw["results"]]
            for row in rows:
                row["trials"] = tuple(Trial(**trial) for trial in row["trials"])
            agreement = {o: {p: Agreement(**a) for p, a in row.items()} for o, row in raw["agreement"].items()}
            return cls(environment=raw["environment"], rows=[ScoringRow(**row) for row in rows], agreement=agreement)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise UsageError(f"{path}: not results of bench scoring: {type(e).__name__}: {e}") from e


def is_scoring(path: Path) -> bool:
    """Whether a file looks like results of `bench scoring`."""
    try:
        return "agreement" in json.loads(path.read_text())
    except (OSError, ValueError, TypeError):
        return False


def _fastest(rows: Sequence[ScoringRow]) -> ScoringRow | None:
    return max((row for row in rows if row.records_per_s), key=lambda row: row.records_per_s or 0.0, default=None)
