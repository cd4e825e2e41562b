"""From what a job asks for to something that replays: key, lookup, build, residency."""

from nimble_jobs.planner.jobs.ahead import explain_schedule, explained
from nimble_jobs.planner.jobs.background import Builders
from nimble_jobs.planner.jobs.improve import improve, leave
from nimble_jobs.planner.jobs.loaded import Loaded, Resident, Residents, Siblings
from nimble_jobs.planner.jobs.prepare import prepare
from nimble_jobs.planner.jobs.prepared import Prepared, Progress
from nimble_jobs.planner.keys.request import Request, key_parts, schedule_key

__all__ = [
    "Builders",
    "Loaded",
    "Prepared",
    "Progress",
    "Request",
    "Resident",
    "Residents",
    "Siblings",
    "explain_schedule",
    "explained",
    "improve",
    "key_parts",
    "leave",
    "prepare",
    "schedule_key",
]
