"""The workers that a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nimble_jobs.errors import NotFound, UsageError

if TYPE_CHECKING:
    from nimble_jobs.store import WorkerInfo


def chosen(live: list[WorkerInfo], wanted: Sequence[str]) -> list[WorkerInfo]:
    """The workers whose ids begin with these prefixes; without any, all workers.

    Raises NotFound for a prefix that matches none, UsageError for one that matches several.
    """
    if not wanted:
        return live
    matched: dict[str, WorkerInfo] = {}
    for prefix in wanted:
        fits = [worker for worker in live if worker.id == prefix] or [w for w in live if w.id.startswith(prefix)]
        if not fits:
            raise NotFound(
                f"no running worker has an id that begins with {prefix!r}; list them with: nimble-jobs worker ls"
            )
        if len(fits) > 1:
            raise UsageError(f"{prefix!r} matches {', '.join(worker.id for worker in fits)}; type more characters")
        matched[fits[0].id] = fits[0]
    return list(matched.values())
