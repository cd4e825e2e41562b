"""How patient a worker is: it waits for very long in all, and never for long at once."""

from __future__ import annotations

import os
from pathlib import Path

from nimble_jobs.errors import UsageError
from nimble_jobs.patience import DEFAULT_LIMIT_S
from nimble_jobs.spec.units import BadValue, parse_duration
from nimble_jobs.store import Store, open_store

PATIENCE = "NIMBLE_JOBS_PATIENCE"


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
