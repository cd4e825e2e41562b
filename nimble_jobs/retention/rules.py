"""Rules about which ended jobs stay. Pure: time and rows are arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nimble_jobs.job import JobState
from nimble_jobs.settings import Settings
from nimble_jobs.settings.model import DEFAULT
from nimble_jobs.store.expiry import Ended

DAY_S = 86400.0
KEEP_S, KEEP_FAILED_S = 30 * DAY_S, 90 * DAY_S
BAD = (JobState.FAILED, JobState.QUARANTINED)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A job stays if any rule that is set keeps it. Ages are seconds since its end; None is for ever."""

    keep_s: float | None = KEEP_S  # for succeeded and cancelled jobs
    keep_failed_s: float | None = KEEP_FAILED_S  # for failed and quarantined jobs
    per_name: int | None = None  # how many of the newest jobs of each name stay at any age
    by_age: bool = True  # False: `per_name` alone decides
    logs_s: float | None = KEEP_S  # for logs of workers and of unknown jobs

    def age_s(self, state: JobState) -> float | None:
        """How long a job with this end stays."""
        return self.keep_failed_s if state in BAD else self.keep_s


def rules_of(
    settings: Settings,
    *,
    keep_s: float | None = None,
    keep_failed_s: float | None = None,
    per_name: int | None = None,
) -> Rules:
    """The rules of a command, or else of the settings; None: not given.

    `per_name` alone decides alone. Beside an age both keep jobs, and a missing age comes from the settings.
    """
    ours = settings.retention
    if keep_s is keep_failed_s is per_name is None:
        aged = any(settings.origin(f"retention.{name}") != DEFAULT for name in ("keep", "keep_failed"))
        per_name = ours.per_name
    else:
        aged = keep_s is not None or keep_failed_s is not None
    return Rules(
        keep_s=ours.keep if keep_s is None else keep_s,
        keep_failed_s=ours.keep_failed if keep_failed_s is None else keep_failed_s,
        per_name=per_name,
        by_age=aged or per_name is None,
        logs_s=ours.logs if keep_s is None else keep_s,
    )


@dataclass(frozen=True, kw_only=True)
class Spared:
    """Jobs that stay at any age, as read before the first removal."""

    needed: frozenset[str] = frozenset()  # jobs that unfinished jobs wait for, or whose array is unfinished
    newest: Mapping[str, int] = field(default_factory=dict)  # by name: the lowest number that `per_name` keeps
    # For jobs of timers, whether it is one of its timer's newest.
    timed: Mapping[str, bool] = field(default_factory=dict)


def goes(job: Ended, rules: Rules, spared: Spared, now: float) -> bool:
    """Whether to remove this job. `now` in Unix seconds.

    A timer's newest `cron.keep` jobs stay, and its failed jobs stay as long as other failed jobs.
    """
    if job.id in spared.needed:
        return False
    age_s = rules.age_s(job.state)
    young = age_s is None or now - job.finished_at < age_s
    if job.id in spared.timed:
        return not spared.timed[job.id] and not (young and job.state in BAD)
    if rules.per_name is not None and job.seq >= spared.newest.get(job.name, 0):
        return False
    return not (rules.by_age and young)
