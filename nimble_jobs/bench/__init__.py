"""The paper's evaluation on this machine: every system on every model, measured alike, compared, kept as JSON.

In processing order: request -> driver -> (one process a model: child -> cell -> systems -> timing, memory, busy) ->
row -> ratios -> results -> plot. Nothing here loads torch before a child process runs.
"""

from nimble_jobs.bench.driver import run
from nimble_jobs.bench.ratios import Comparison, compare, geometric_means
from nimble_jobs.bench.request import FAMILIES, SYSTEMS, Request, Unit
from nimble_jobs.bench.results import Results
from nimble_jobs.bench.row import Row

__all__ = [
    "FAMILIES",
    "SYSTEMS",
    "Comparison",
    "Request",
    "Results",
    "Row",
    "Unit",
    "compare",
    "geometric_means",
    "run",
]
