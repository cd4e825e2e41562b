"""Scoring jobs over a folder of pictures, run in this process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nimble_jobs import spec as specs
from nimble_jobs.job import Job
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Store
from nimble_jobs.worker.foreground import run_inline
from tests.store_samples import queued


def spec_of(folder: Path, *, input: dict[str, Any], output: dict[str, Any], **sections: Any) -> JobSpec:  # noqa: A002
    """A job over `folder`, with the model that `net` in the net.py beside it makes; bad records do not end it."""
    return specs.restore(
        {
            "version": 1,
            "name": "n",
            "kind": "score",
            "model": {"source": f"python:{folder.parent}/net.py:net"},
            "input": {"source": str(folder), "format": "images", **input},
            "output": {"fields": ["id", "logits"], **output},
            "run": {"error_threshold": -1.0},
            **sections,
        }
    )


def ran(store: Store, spec: JobSpec) -> Job:
    """The job, once it ended. It may execute what lies beside its output."""
    made = queued(
        store,
        spec=specs.dump(spec),
        name="n",
        kind="score",
        foreground=True,
        allow_python=[str(spec.output.path.parent)],
        now=time.time(),
    )
    return run_inline(store, made.id)
