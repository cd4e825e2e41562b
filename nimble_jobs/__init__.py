"""nimble-jobs: ahead-of-time GPU task schedules, kept in a store and replayed by a batch job runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nimble_jobs.version import __version__

if TYPE_CHECKING:
    from nimble_jobs.client import submit, wait
    from nimble_jobs.nimble import Nimble
    from nimble_jobs.queue import hold, release, retry, submit_array

__all__ = ["Nimble", "__version__", "hold", "release", "retry", "submit", "submit_array", "wait"]


def __getattr__(name: str) -> Any:
    """Load the client, or torch, on its first use: importing the package alone must stay cheap."""
    if name in ("submit", "wait"):
        from nimble_jobs import client

        return getattr(client, name)
    if name in ("hold", "release", "retry", "submit_array"):
        from nimble_jobs import queue

        return getattr(queue, name)
    if name == "Nimble":
        from nimble_jobs.nimble import Nimble

        return Nimble
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
