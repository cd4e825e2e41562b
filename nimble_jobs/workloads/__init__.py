"""What a job does: read, replay, write."""

from __future__ import annotations

import logging
from dataclasses import replace

from nimble_jobs.engine import process_settings
from nimble_jobs.models.pictures import with_model_transform
from nimble_jobs.workloads import score
from nimble_jobs.workloads.context import JobContext, Outcome, Stop
from nimble_jobs.workloads.fetching import fetched

__all__ = ["JobContext", "Outcome", "Stop", "run"]

log = logging.getLogger(__name__)


def run(context: JobContext) -> Outcome:
    """Run one attempt of a job as its spec asks. Raises NimbleError with what went wrong, and Stopped.

    Settings of the process that its model changes are put back for the next job.
    """
    settings = process_settings.taken()
    try:
        with fetched(replace(context, spec=with_model_transform(context.spec))) as local:
            if local.spec.kind == "score":
                return score.run(local)
            from nimble_jobs.workloads import training  # which no scoring job needs

            return training.run(local)
    finally:
        if changed := process_settings.put(settings):
            log.info("put back for the next job what the model's code has set: %s", ", ".join(changed))
