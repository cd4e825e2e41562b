"""The state folder: jobs, attempts, events, schedules, artifacts and worker locks."""

from nimble_jobs.store.again import Again
from nimble_jobs.store.artifacts import Artifacts
from nimble_jobs.store.builds import Builds, Wait
from nimble_jobs.store.jobs import Jobs
from nimble_jobs.store.membership import Membership
from nimble_jobs.store.new_job import NewJob
from nimble_jobs.store.records import ArtifactRef, ScheduleEntry, ScheduleState, StoredSchedule, WorkerInfo
from nimble_jobs.store.schedules import Lookup, Schedules
from nimble_jobs.store.shards import Left, Shards
from nimble_jobs.store.store import Store, open_store
from nimble_jobs.store.timer_records import Due, Tick, TickKind, TickOutcome, Timer, TimerChange, TimerState
from nimble_jobs.store.timers import Timers
from nimble_jobs.store.wanted import Demand, Miss, WantedSchedule, WantedState
from nimble_jobs.store.worker_orders import Order, Wanted
from nimble_jobs.store.workers import WorkerLease, Workers

__all__ = [
    "Again",
    "ArtifactRef",
    "Artifacts",
    "Builds",
    "Demand",
    "Due",
    "Jobs",
    "Left",
    "Lookup",
    "Membership",
    "Miss",
    "NewJob",
    "Order",
    "ScheduleEntry",
    "ScheduleState",
    "Schedules",
    "Shards",
    "Store",
    "StoredSchedule",
    "Tick",
    "TickKind",
    "TickOutcome",
    "Timer",
    "TimerChange",
    "TimerState",
    "Timers",
    "Wait",
    "Wanted",
    "WantedSchedule",
    "WantedState",
    "WorkerInfo",
    "WorkerLease",
    "Workers",
    "open_store",
]
