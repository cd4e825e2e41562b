"""Rows of results, what is computed from them, and the JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from nimble_jobs.bench.results import write_json
from nimble_jobs.errors import UsageError

MODE = "text"


@dataclass(frozen=True, kw_only=True)
class TextTrial:
    """One whole run of one system, in a process of its own."""

    wall_s: float  # of the whole process, from its start to its end
    start_s: float  # until the first batch of embeddings is there
    host_peak_bytes: int
    device_peak_bytes: int | None = None
    padded_tokens: int | None = None  # of all batches, padding included


@dataclass(frozen=True, kw_only=True)
class TextRow:
    """What was found out about one system with one model. What was not measured is None."""

    model: str
    system: str
    dtype: str
    device: str
    batch: int | None = None  # None: ours, by tokens
    compile_mode: str | None = None
    mode: str = MODE
    texts: int = 0
    tokens: int = 0  # of all texts, cut at max_length, without padding
    trials: tuple[TextTrial, ...] = ()
    prepare_s: float | None = None  # ours, stored: the command that builds the schedules
    searched: tuple[dict[str, Any], ...] = ()  # settings that were tried, with texts/s or an error
    relative_norm: float | None = None  # largest of all texts, of the difference from the reference's embedding
    facts: dict[str, Any] = field(default_factory=dict)
    note: str | None = None  # what the figures do not say, such as that some schedules are missing
    error: str | None = None

    @property
    def wall_s(self) -> float | None:
        return median(trial.wall_s for trial in self.trials) if self.trials else None

    @property
    def texts_per_s(self) -> float | None:
        """End to end: over the seconds of the whole process."""
        return self.texts / self.wall_s if self.wall_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Real tokens, end to end."""
        return self.tokens / self.wall_s if self.wall_s else None

    @property
    def start_s(self) -> float | None:
        return median(trial.start_s for trial in self.trials) if self.trials else None

    @property
    def after_start(self) -> float | None:
        """Texts a second after the first batch: what a much longer job would come to."""
        rates = [self.texts / (trial.wall_s - trial.start_s) for trial in self.trials if trial.wall_s > trial.start_s]
        return median(rates) if rates else None

    @property
    def padding_share(self) -> float | None:
        """The share of padding among the tokens that the model computes."""
        padded = self.trials[-1].padded_tokens if self.trials else None
        return 1 - self.tokens / padded if padded else None

    def derived(self) -> dict[str, Any]:
        """What follows from the fields."""
        rates = [self.texts / trial.wall_s for trial in self.trials]
        peaks = [trial.device_peak_bytes for trial in self.trials if trial.device_peak_bytes is not None]
        return {
            "texts_per_s": self.texts_per_s,
            "texts_per_s_low": min(rates, default=None),
            "texts_per_s_high": max(rates, default=None),
            "after_start_texts_per_s": self.after_start,
            "tokens_per_s": self.tokens_per_s,
            "padding_share": self.padding_share,
            "start_s": self.start_s,
            "wall_s": self.wall_s,
            "host_peak_bytes": max((trial.host_peak_bytes for trial in self.trials), default=None),
            "peak_bytes": max(peaks, default=None),  # of every benchmark's rows: device memory
            "replay_us": None,  # of every benchmark's rows; here a job has a schedule a bucket
            "with_copies_us": None,
        }


@dataclass(kw_only=True)
class TextResults:
    """The environment, and a row a system and model."""

    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[TextRow] = field(default_factory=list)

    def over_best(self, row: TextRow) -> float | None:
        """How many times as fast a row is as the fastest loop over the same model, end to end."""
        others = [r.texts_per_s for r in self.rows if r.model == row.model and not r.system.startswith("ours")]
        best = max((rate for rate in others if rate), default=None)
        return row.texts_per_s / best if best and row.texts_per_s else None

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(row) | row.derived() | {"over_best_loop": self.over_best(row)} for row in self.rows]
        return {"environment": self.environment, "results": rows}

    def save(self, path: Path) -> None:
        """Write the file whole, or leave the older one."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> TextResults:
        """Raises UsageError for a file that holds something else."""
        try:
            raw = json.loads(path.read_text())
            names = {f.name for f in fields(TextRow)}
            rows = [{k: v for k, v in row.items() if k in names} for row in raw["results"]]
            for row in rows:
                row["trials"] = tuple(TextTrial(**trial) for trial in row["trials"])
                row["searched"] = tuple(row["searched"])
            return cls(environment=raw["environment"], rows=[TextRow(**row) for row in rows])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise UsageError(f"{path}: not results of bench text: {type(e).__name__}: {e}") from e


def is_text(path: Path) -> bool:
    """Whether a file looks like results of `bench text`."""
    try:
        return any(row.get("mode") == MODE for row in json.loads(path.read_text())["results"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
