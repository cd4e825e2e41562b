"""Metric families about jobs, schedules, timers, groups and notifications."""

from __future__ import annotations

from collections.abc import Callable

from nimble_jobs.job import JobState
from nimble_jobs.metrics.family import Family, Kind, Samples
from nimble_jobs.metrics.labels import REASONS, bounded, label
from nimble_jobs.metrics.sight import Sight
from nimble_jobs.store import ScheduleState, TickOutcome, TimerState
from nimble_jobs.store.figures import GroupFigures
from nimble_jobs.store.notices import NoticeState
from nimble_jobs.store.routes import Channel
from nimble_jobs.store.totals import Total

JOB_KINDS = ("score", "finetune")
ATTEMPT_OUTCOMES = ("succeeded", "failed", "lost", "stalled", "requeued", "cancelled")
_FINAL = tuple(state.value for state in JobState if state.final)
_DECIDED = tuple(outcome.value for outcome in TickOutcome if outcome is not TickOutcome.WAITING)
_DELIVERY = (NoticeState.SENT.value, NoticeState.GIVEN_UP.value)
_STORED = (ScheduleState.READY.value, ScheduleState.QUARANTINED.value)


def _total(sight: Sight, what: Total, kind: str = "", outcome: str = "") -> tuple[int, float]:
    return sight.figures.totals.get((what.value, kind, outcome), (0, 0.0))


def _counts(what: Total, kinds: tuple[str, ...], outcomes: tuple[str, ...]) -> Callable[[Sight], Samples]:
    """The counts of a total by kind and outcome, with zeros for what has not happened yet."""

    def read(sight: Sight) -> Samples:
        for kind in kinds:
            for outcome in outcomes:
                yield tuple(filter(None, (kind, outcome))), _total(sight, what, kind, outcome)[0]

    return read


def _jobs(sight: Sight) -> Samples:
    for state in JobState:
        for kind in JOB_KINDS:
            yield (state.value, kind), sight.figures.jobs.get((state.value, kind), 0)


def _due(sight: Sight) -> Samples:
    return [((kind,), sight.figures.due.get(kind, (0, 0.0))[0]) for kind in JOB_KINDS]


def _oldest(sight: Sight) -> Samples:
    return [((kind,), sight.figures.due.get(kind, (0, 0.0))[1]) for kind in JOB_KINDS]


def _attempts(sight: Sight) -> Samples:
    for kind in JOB_KINDS:
        for outcome in ATTEMPT_OUTCOMES:
            yield (kind, outcome), _total(sight, Total.ATTEMPT, kind, outcome)


def _records(sight: Sight) -> Samples:
    for kind in JOB_KINDS:
        yield (kind,), _total(sight, Total.RECORDS, kind)[0] + sight.figures.records_running.get(kind, 0)


def _uses(sight: Sight) -> Samples:
    uses = sight.figures.uses
    yield ("resident", ""), uses.resident
    yield ("stored", ""), uses.stored
    for reason, count in bounded(uses.misses.items(), REASONS).items():
        yield ("miss", reason), count


def _last_successes(sight: Sight) -> Samples:
    for name, timer in sight.figures.timers.items():
        if timer.last_success_at is not None:
            yield (label(name),), timer.last_success_at


def _lateness(sight: Sight) -> Samples:
    return [((label(name),), timer.late_s) for name, timer in sight.figures.timers.items()]


def _group(value: Callable[[GroupFigures], int]) -> Callable[[Sight], Samples]:
    return lambda sight: [((label(name),), value(group)) for name, group in sight.figures.groups.items()]


def _store_bytes(sight: Sight) -> Samples:
    yield ("json",), sight.figures.schedules.json_bytes
    yield ("artifacts",), sight.figures.schedules.artifacts_bytes


def _database(sight: Sight) -> Samples:
    size = sight.figures.database_bytes
    return [] if size is None else [((), size)]


_JOBS = (
    Family(
        name="nimble_jobs_jobs",
        kind=Kind.GAUGE,
        labels=("state", "kind"),
        help="Jobs in the store, by state and kind. Pruned jobs are not included.",
        read=_jobs,
    ),
    Family(
        name="nimble_jobs_jobs_due",
        kind=Kind.GAUGE,
        labels=("kind",),
        help="Queued jobs that a worker on a device for them may start now: not on hold, not delayed, not waiting for "
        "another job.",
        read=_due,
    ),
    Family(
        name="nimble_jobs_jobs_held",
        kind=Kind.GAUGE,
        help="Queued jobs that are on hold.",
        read=lambda sight: [((), sight.figures.held)],
    ),
    Family(
        name="nimble_jobs_oldest_due_job_age_seconds",
        kind=Kind.GAUGE,
        labels=("kind",),
        help="How long ago the first of the jobs that may start now became free to start; 0 if there is none.",
        read=_oldest,
    ),
    Family(
        name="nimble_jobs_jobs_submitted",
        kind=Kind.COUNTER,
        labels=("kind",),
        help="Jobs that were queued, by commands and by timers. A retry does not count.",
        read=_counts(Total.SUBMITTED, JOB_KINDS, ("",)),
    ),
    Family(
        name="nimble_jobs_jobs_ended",
        kind=Kind.COUNTER,
        labels=("kind", "state"),
        help="Jobs that reached a final state. A job that is retried counts again when it ends again.",
        read=_counts(Total.ENDED, JOB_KINDS, _FINAL),
    ),
    Family(
        name="nimble_jobs_attempt_duration_seconds",
        kind=Kind.SUMMARY,
        labels=("kind", "outcome"),
        help="Number and total time of attempts that ended. A lost attempt ends when its loss is noticed.",
        read=_attempts,
    ),
    Family(
        name="nimble_jobs_records_done",
        kind=Kind.COUNTER,
        labels=("kind",),
        help="Records that jobs have finished, including running jobs. Repeats by later attempts do not count.",
        read=_records,
    ),
    Family(
        name="nimble_jobs_replays",
        kind=Kind.COUNTER,
        labels=("kind",),
        help="Batches and training steps that successful attempts ran by replaying a schedule.",
        read=_counts(Total.REPLAYS, JOB_KINDS, ("",)),
    ),
    Family(
        name="nimble_jobs_group_limit",
        kind=Kind.GAUGE,
        labels=("group",),
        help="How many jobs of the group may run at once. Groups without open jobs are left out.",
        read=_group(lambda group: group.limit),
        optional=True,
    ),
    Family(
        name="nimble_jobs_group_running",
        kind=Kind.GAUGE,
        labels=("group",),
        help="Running jobs of the group.",
        read=_group(lambda group: group.running),
        optional=True,
    ),
    Family(
        name="nimble_jobs_group_queued",
        kind=Kind.GAUGE,
        labels=("group",),
        help="Queued jobs of the group.",
        read=_group(lambda group: group.queued),
        optional=True,
    ),
)

_SCHEDULES = (
    Family(
        name="nimble_jobs_schedule_uses",
        kind=Kind.COUNTER,
        labels=("hit", "reason"),
        help="How often a schedule was needed, and was resident on the device, stored, or missing, with the reason.",
        read=_uses,
    ),
    Family(
        name="nimble_jobs_build_duration_seconds",
        kind=Kind.SUMMARY,
        help="Number of schedules that were built and stored, and total time of their searches. Imports do not count.",
        read=lambda sight: [((), _total(sight, Total.BUILD))],
    ),
    Family(
        name="nimble_jobs_build_saved_seconds",
        kind=Kind.COUNTER,
        help="Build time that hits saved: each hit saves the time that its schedule took to build.",
        read=lambda sight: [((), sight.figures.uses.saved_s)],
    ),
    Family(
        name="nimble_jobs_schedules",
        kind=Kind.GAUGE,
        labels=("state",),
        help="Stored schedules. Ready ones may be stale after an upgrade; see: nimble-jobs cache stats.",
        read=lambda sight: [((state,), sight.figures.schedules.by_state.get(state, 0)) for state in _STORED],
    ),
    Family(
        name="nimble_jobs_store_bytes",
        kind=Kind.GAUGE,
        labels=("part",),
        help="Bytes of the stored schedules: their JSON, in the database, and their artifacts, each once.",
        read=_store_bytes,
    ),
    Family(
        name="nimble_jobs_database_bytes",
        kind=Kind.GAUGE,
        help="Size of the database file. Left out for a database that is not a SQLite file.",
        read=_database,
        optional=True,
    ),
    Family(
        name="nimble_jobs_database_free_bytes",
        kind=Kind.GAUGE,
        help="Free space inside the database file, which new rows will use.",
        read=lambda sight: [((), sight.figures.free_bytes)] if sight.figures.database_bytes is not None else [],
        optional=True,
    ),
)

_TIMERS = (
    Family(
        name="nimble_jobs_timers",
        kind=Kind.GAUGE,
        labels=("state",),
        help="Timers, by state.",
        read=lambda sight: [
            ((state.value,), sight.figures.timers_by_state.get(state.value, 0)) for state in TimerState
        ],
    ),
    Family(
        name="nimble_jobs_timer_last_success_timestamp_seconds",
        kind=Kind.GAUGE,
        labels=("timer",),
        help="When a job of the timer last succeeded. Left out until one has. For `other`, the earliest.",
        read=_last_successes,
        optional=True,
    ),
    Family(
        name="nimble_jobs_timer_lateness_seconds",
        kind=Kind.GAUGE,
        labels=("timer",),
        help="How long the timer's next tick has been due; 0 if it is in the future. For `other`, the longest.",
        read=_lateness,
        optional=True,
    ),
    Family(
        name="nimble_jobs_timer_processes",
        kind=Kind.GAUGE,
        help="Processes that fire timers and send notifications: workers and `cron serve`.",
        read=lambda sight: [((), sight.firing)],
    ),
    Family(
        name="nimble_jobs_ticks",
        kind=Kind.COUNTER,
        labels=("outcome",),
        help="Outcomes of ticks. A submitted tick whose job finds nothing new counts again, as empty.",
        read=_counts(Total.TICK, ("",), _DECIDED),
    ),
    Family(
        name="nimble_jobs_ticks_waiting",
        kind=Kind.GAUGE,
        help="Ticks whose job will be submitted once another job has ended.",
        read=lambda sight: [((), sight.figures.ticks_waiting)],
    ),
    Family(
        name="nimble_jobs_notifications_pending",
        kind=Kind.GAUGE,
        help="Notifications in the outbox that are still to be sent.",
        read=lambda sight: [((), sight.figures.outbox.pending)],
    ),
    Family(
        name="nimble_jobs_notifications_oldest_age_seconds",
        kind=Kind.GAUGE,
        help="Age of the oldest notification that is still to be sent; 0 if there is none.",
        read=lambda sight: [((), sight.figures.outbox.oldest_s)],
    ),
    Family(
        name="nimble_jobs_notifications_given_up",
        kind=Kind.GAUGE,
        help="Notifications in the outbox that were given up after failed attempts. Pruned ones are not included.",
        read=lambda sight: [((), sight.figures.outbox.given_up)],
    ),
    Family(
        name="nimble_jobs_notifications",
        kind=Kind.COUNTER,
        labels=("channel", "outcome"),
        help="Notifications that were sent, or given up.",
        read=_counts(Total.NOTIFICATION, tuple(channel.value for channel in Channel), _DELIVERY),
    ),
)

FAMILIES = (*_JOBS, *_SCHEDULES, *_TIMERS)
