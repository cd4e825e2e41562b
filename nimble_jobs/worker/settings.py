"""How patient a worker is: with trouble for very long in all, but never for long at once; with jobs that should end."""

from __future__ import annotations

from pathlib import Path

from nimble_jobs.settings import Watched
from nimble_jobs.store import Store, open_store

# How long a job has to stop by itself; then the process that runs it ends.
OVERTIME_S = 10.0  # after its timeout
CANCEL_GRACE_S = 20.0  # after `cancel`: it asks between batches, but a read may never return
CANCELLED_S = 1.0  # after `cancel --now`, or a second Ctrl-C


def patience_s(home: Path) -> float:
    """How long a worker waits for a full disk or a store that cannot be used, in seconds: limits.patience.

    Raises SettingsError for what stands in the environment; a broken file only means that its value is not known.
    """
    return Watched(home).usable().limits.patience


def open_impatient(home: Path, *, create: bool) -> Store:
    """A store whose transactions fail early, so that a worker hears signals and messages between two tries."""
    return open_store(home, create=create, busy_timeout_s=1.0, patience_s=2.0)
