"""How patient a worker is: with trouble for very long in all, but never for long at once; with jobs that should end."""

from __future__ import annotations

import os
from pathlib import Path

from nimble_jobs.errors import UsageError
from nimble_jobs.patience import DEFAULT_LIMIT_S
from nimble_jobs.spec.units import BadValue, parse_duration
from nimble_jobs.store import Store, open_store

PATIENCE = "NIMBLE_JOBS_PATIENCE"

# How long a job has to stop by itself; then the process that runs it ends.
OVERTIME_S = 10.0  # after its timeout
CANCEL_GRACE_S = 20.0  # after `cancel`: it asks between batches, but a read may never return
CANCELLED_S = 1.0  # after `cancel --now`, or a second Ctrl-C


def patience_s() -> float:
    """How long a worker waits for a full disk or a store that cannot be used, in seconds. Raises UsageError."""
    text = os.environ.get(PATIENCE)
    if not text:
        return DEFAULT_LIMIT_S
    try:
        return parse_duration(text)
    except BadValue as e:
        raise UsageError(f"{PATIENCE}: {e}") from e


def open_impatient(home: Path, *, create: bool) -> Store:
    """A store whose transactions fail early, so that a worker hears signals and messages between two tries."""
    return open_store(home, create=create, busy_timeout_s=1.0, patience_s=2.0)
