"""What systems answered, read from their Parquet files, and how often two of them agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pyarrow.parquet as pq

from nimble_jobs.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a system said about one file."""

    top1: int
    probability: float


Answers = dict[str, Answer]  # by path below the folder of the pictures


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How two systems compare."""

    share: float  # of files with the same top-1; a file that one of them lacks is a difference
    probability: float  # largest difference of probability where top-1 is the same


def read(path: Path, pictures: Path) -> Answers:
    """The answers in a Parquet file, or in those of a folder, about files of the folder `pictures`.

    Raises DataError where there are none.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    found: Answers = {}
    for file in files:
        table = pq.read_table(file, columns=["id", "top1", "probability"])
        for name, top1, probability in zip(*(table[c].to_pylist() for c in table.column_names), strict=True):
            found[name.removeprefix(f"{pictures}/")] = Answer(top1=top1, probability=probability)
    if not found:
        raise DataError(f"{path}: no results; expected Parquet with id, top1 and probability")
    return found


def compare(one: Answers, other: Answers) -> Agreement:
    """Both ways the same."""
    same = [name for name in one.keys() & other.keys() if one[name].top1 == other[name].top1]
    farthest = max((abs(one[name].probability - other[name].probability) for name in same), default=0.0)
    return Agreement(share=len(same) / len(one.keys() | other.keys()), probability=farthest)


def matrix(answers: Mapping[str, Answers]) -> dict[str, dict[str, Agreement]]:
    """Each two systems, both ways."""
    found: dict[str, dict[str, Agreement]] = {}
    for one, other in combinations(answers, 2):
        agreement = compare(answers[one], answers[other])
        found.setdefault(one, {})[other] = found.setdefault(other, {})[one] = agreement
    return found
