"""What a job does: read, replay, write."""

from __future__ import annotations

from dataclasses import replace

from nimble_jobs.models.pictures import with_model_transform
from nimble_jobs.workloads import score, training
from nimble_jobs.workloads.context import JobContext, Outcome, Stop
from nimble_jobs.workloads.fetching import fetched

__all__ = ["JobContext", "Outcome", "Stop", "run"]


def run(context: JobContext) -> Outcome:
    """Run one attempt of a job as its spec asks. Raises NimbleError with what went wrong, and Stopped."""
    with fetched(replace(context, spec=with_model_transform(context.spec))) as local:
        if local.spec.kind == "score":
            return score.run(local)
        return training.run(local)
