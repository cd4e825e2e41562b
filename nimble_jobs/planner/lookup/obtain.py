"""What a job does without a stored schedule: as its spec says, and only one process builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nimble_jobs.errors import JobFailed, ModelChanged
from nimble_jobs.job import Hit
from nimble_jobs.store import Store, Wait

Waiting = Callable[[Wait], None]

BUILD_WAIT_S = 600.0  # how long a job waits for another process that builds the schedule it needs


def eager_instead(on_miss: str, reason: str) -> str | None:
    """Why a job that missed runs in eager; None where it is to build. Raises JobFailed where it is to fail."""
    match on_miss:
        case "fail":
            raise JobFailed(f"schedule.on_miss is fail, and there is no stored schedule: {reason}")
        case "eager":
            return f"schedule.on_miss is eager, and there is no stored schedule: {reason}"
    return None


def in_turn(
    key: str, reason: str, *, store: Store, waiting: Waiting, take: Callable[[], bool], build: Callable[[], None]
) -> tuple[Hit, str | None]:
    """Take what another process has built since the miss, or build, alone. Returns the hit; for a miss its reason.

    `take` says whether there was something. What `waiting` raises comes through.
    """
    with store.builds.turn(key, limit_s=BUILD_WAIT_S, waiting=waiting) as alone:
        if take():
            return Hit.STORED, None
        build()
    return Hit.MISS, reason if alone else f"{reason}; another process was still building it after {BUILD_WAIT_S:.0f} s"


def check_unchanged(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """What ran must be what the key names: its parts, `before`, were made before the code ran. Raises ModelChanged."""
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if changed:
        raise ModelChanged(f"the model changed while it was being loaded: {', '.join(changed)}; retrying may succeed")
