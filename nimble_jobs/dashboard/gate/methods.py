"""Methods of HTTP: those that only read, and POST for the declared changes."""

from __future__ import annotations

from nimble_jobs.dashboard.gate.asked import METHODS, Asked, Refused

READ_ONLY = "this dashboard is read-only; start it without --read-only to make changes"


def check(asked: Asked) -> Refused | None:
    """Whether the method is one of ours. Whether a path takes it is decided later."""
    if asked.method not in METHODS:
        return Refused(status=405, kind="method", message="this method is not allowed here")
    return None


def check_read_only(asked: Asked, *, read_only: bool) -> Refused | None:
    """Whether changes are allowed, if this is one."""
    if read_only and asked.changes:
        return Refused(status=403, kind="read-only", message=READ_ONLY)
    return None
