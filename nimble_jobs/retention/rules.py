"""Which jobs that have ended stay. Pure: time and rows are arguments."""

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
    """A job stays if any of the rules that are set keeps it. Ages count from its end, in seconds; None is for ever."""

    keep_s: float | None = KEEP_S  # of jobs that succeeded or were cancelled
    keep_failed_s: float | None = KEEP_FAILED_S  # of failed and quarantined ones
    per_name: int | None = None  # the newest jobs of each name that stay, whatever their age
    by_age: bool = True  # False: `per_name` alone decides
    logs_s: float | None = KEEP_S  # of workers' logs, and of those whose job is unknown

    def age_s(self, state: JobState) -> float | None:
        """How long a job that ended so stays."""
        return self.keep_failed_s if state in BAD else self.keep_s


def rules_of(
    settings: Settings,
    *,
    keep_s: float | None = None,
    keep_failed_s: float | None = None,
    per_name: int | None = None,
) -> Rules:
    """The rules that a command names, or else those of the settings; None is one that is not named.

    A number for each name that is set alone decides alone. Beside an age both keep jobs, and an age that is missing is
    that of the settings.
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
    """What keeps jobs from going whatever their age, as it was read before the first one goes."""

    needed: frozenset[str] = frozenset()  # that unfinished jobs wait for, or whose array is unfinished
    newest: Mapping[str, int] = field(default_factory=dict)  # by name: the lowest number that `per_name` keeps
    timed: Mapping[str, bool] = field(default_factory=dict)  # jobs of timers: is it one of the newest of its timer?


def goes(job: Ended, rules: Rules, spared: Spared, now: float) -> bool:
    """Does this job go? `now` in Unix seconds.

    Of a timer's jobs the newest `cron.keep` stay, and failed ones as long as others that failed.
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
