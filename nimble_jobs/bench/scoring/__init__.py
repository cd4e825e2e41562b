"""Whole scoring jobs from files to Parquet: ours beside hand-written loops and Ray Data.

In processing order: photos -> preparation (a process) -> driver -> (a process a run: ours through the command line,
loops by `nimble_jobs.bench.loops`) -> predictions -> results -> plot. `arrays` compares jobs over arrays with the bare
replay. Nothing here loads torch but `preparation` and `bare`, which run in processes of their own.
"""

from nimble_jobs.bench.scoring.measure import measure
from nimble_jobs.bench.scoring.request import System, Wanted, fixed_of, size_of, systems_of
from nimble_jobs.bench.scoring.results import ScoringResults, ScoringRow, Trial
from nimble_jobs.bench.scoring.workshop import Workshop

__all__ = [
    "ScoringResults",
    "ScoringRow",
    "System",
    "Trial",
    "Wanted",
    "Workshop",
    "fixed_of",
    "measure",
    "size_of",
    "systems_of",
]
