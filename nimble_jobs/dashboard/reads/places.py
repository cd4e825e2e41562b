"""Where a job's files are: staged while it runs, published once it succeeded."""

from __future__ import annotations

from pathlib import Path

from nimble_jobs.data import publish
from nimble_jobs.data.hidden import output_of, staging_root
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store


def file_of(store: Store, job: Job, name: str) -> Path | None:
    """A file in the job's output; None without one. It need not exist.

    The output of an ended job counts only if this job published it: another one may have replaced it.
    """
    path = output_of(job)
    if path is None:
        return None
    if not job.state.final:
        return staging_root(path, job.id) / f"attempt-{job.attempt}" / name
    if job.state is not JobState.SUCCEEDED:
        return None
    found = publish.find(path, store.publications)
    if found is None or found.doubt is not None or found.manifest.get("job_id") != job.id:
        return None
    return path / name
