"""The paper's algorithms and our additions, as pure functions over frozen values.

In processing order: dag -> reduction -> matching -> streams -> check, with bounds and memory beside them. `plan` runs
all of these steps.
"""

from __future__ import annotations

from nimble_jobs.graph.check import check_plan
from nimble_jobs.graph.plan import Analysis, make_plan, single_stream

__all__ = ["Analysis", "check_plan", "make_plan", "single_stream"]
