"""What systems answered: top-1 by file name, read from their Parquet files, and how often two of them agree."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path, PurePath

import pyarrow.parquet as pq

from nimble_jobs.errors import DataError


def top1_of(path: Path) -> dict[str, int]:
    """Top-1 by file name, of a Parquet file or of those in a folder. Raises DataError where there are none."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    found: dict[str, int] = {}
    for file in files:
        table = pq.read_table(file, columns=["id", "top1"])
        ids = (PurePath(name).name for name in table["id"].to_pylist())
        found.update(zip(ids, table["top1"].to_pylist(), strict=True))
    if not found:
        raise DataError(f"{path}: no results; expected Parquet with id and top1")
    return found


def agreement(answers: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    """Share of files with the same top-1, for each two systems, both ways. A file that one lacks is a difference."""
    shares: dict[str, dict[str, float]] = {}
    for one, other in combinations(answers, 2):
        first, second = answers[one], answers[other]
        names = first.keys() | second.keys()
        equal = sum(first.get(name, -1) == second.get(name, -2) for name in names) / len(names)
        shares.setdefault(one, {})[other] = shares.setdefault(other, {})[one] = equal
    return shares
