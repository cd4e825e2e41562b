"""A worker's patience: long in all, but short at a time, with store errors; and with jobs that should stop."""

from __future__ import annotations

from pathlib import Path

from nimble_jobs.settings import Watched
from nimble_jobs.store import Store, open_store

# How long a job may take to stop by itself, before its process is ended:
OVERTIME_S = 10.0  # after its timeout
CANCEL_GRACE_S = 20.0  # after `cancel`: it asks between batches, but a read may never return
CANCELLED_S = 1.0  # after `cancel --now`, or a second Ctrl-C


def patience_s(home: Path) -> float:
    """Seconds that a worker waits for a full disk or an unusable store: limits.patience.

    Raises SettingsError for a bad environment variable. If the file is broken, its value is ignored.
    """
    return Watched(home).usable().limits.patience


def open_impatient(home: Path, *, create: bool) -> Store:
    """A store whose transactions give up early, so that a worker handles signals and messages between two tries."""
    return open_store(home, create=create, busy_timeout_s=1.0, patience_s=2.0)
