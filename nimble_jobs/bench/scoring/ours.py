"""Our own jobs, through the command line, as users run them: a spec, a stored schedule, a process for each run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nimble_jobs.bench.loops.normal import MEAN, STD
from nimble_jobs.bench.scoring.process import Ended
from nimble_jobs.bench.scoring.workshop import Workshop


@dataclass(frozen=True, kw_only=True)
class Job:
    """A scoring job, and where it keeps its schedules."""

    name: str
    spec: dict[str, Any]
    shop: Workshop
    allow_python: Path | None = None
    output_spec: Mapping[str, Any] = field(default_factory=lambda: {"fields": ["id", "top1", "probability"]})

    @property
    def output(self) -> Path:
        return self.shop.folder / f"{self.name}-out"

    def build(self) -> tuple[dict[str, Any] | None, str | None]:
        """Store the schedule. What `cache build` says of it, and why it failed."""
        ended = self._cli("cache", "build", str(self._written()), "--json", "--quiet", *self._allowed())
        return (json.loads(ended.out)[0] if ended.out.strip() else None), ended.error

    def run(self) -> tuple[dict[str, Any] | None, Ended]:
        """One job. Its row as `show --json` gives it, None where it failed."""
        ended = self._cli("run", str(self._written()), "--json", "--quiet", *self._allowed())
        return (json.loads(ended.out) if ended.error is None else None), ended

    def manifest(self) -> dict[str, Any]:
        """What the output says of how it was made."""
        found: dict[str, Any] = json.loads((self.output / "manifest.json").read_text())
        return found

    def _allowed(self) -> list[str]:
        return ["--allow-python", str(self.allow_python)] if self.allow_python else []

    def _cli(self, *words: str) -> Ended:
        return self.shop.module("nimble_jobs.cli.main", "--home", self.shop.home, *words)

    @property
    def spec_file(self) -> Path:
        return self.shop.folder / f"{self.name}.yaml"

    def _written(self) -> Path:
        path = self.spec_file
        output = {
            "path": str(self.output),
            "format": "parquet",
            "if_exists": "replace",
            **self.output_spec,
        }
        path.write_text(
            yaml.safe_dump({"version": 1, "name": self.name, "kind": "score", **self.spec, "output": output})
        )
        return path


def picture_input(images: Path, side: int, batch_size: int, decode: str) -> dict[str, Any]:
    """`input` of a job over a folder of JPEGs."""
    transform = {"resize": [side, side], "mean": list(MEAN), "std": list(STD)}
    return {
        "source": str(images),
        "format": "images",
        "batch_size": batch_size,
        "decode": decode,
        "transform": transform,
    }


def array_input(file: Path, batch_size: int) -> dict[str, Any]:
    """`input` of a job over a uint8 npy [n, H, W, 3]."""
    transform = {"layout": "hwc", "mean": list(MEAN), "std": list(STD)}
    return {"source": str(file), "format": "npy", "batch_size": batch_size, "transform": transform}
