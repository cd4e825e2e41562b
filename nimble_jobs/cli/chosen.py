"""The workers that a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nimble_jobs.errors import NotFound, UsageError

if TYPE_CHECKING:
    from nimble_jobs.store import WorkerInfo


def chosen(live: list[WorkerInfo], wanted: Sequence[str]) -> list[WorkerInfo]:
    """Those whose ids begin so; all of them without names. Raises NotFound, UsageError for one that fits several."""
    if not wanted:
        return live
    found: dict[str, WorkerInfo] = {}
    for prefix in wanted:
        fits = [worker for worker in live if worker.id == prefix] or [w for w in live if w.id.startswith(prefix)]
        if not fits:
            raise NotFound(f"no running worker {prefix!r}; see them with: nimble-jobs worker ls")
        if len(fits) > 1:
            raise UsageError(f"{prefix!r} could be {', '.join(worker.id for worker in fits)}; type more of it")
        found[fits[0].id] = fits[0]
    return list(found.values())
