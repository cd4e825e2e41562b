"""The devices that work, or worked, on one job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nimble_jobs.job import Job, JobState, Member
from nimble_jobs.plural import count
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row
from nimble_jobs.views.jobs import unit

if TYPE_CHECKING:
    from nimble_jobs.store import Store


def members_of(store: Store, job: Job) -> Sequence[Member]:
    """The members of a job's newest attempt; none for a job of one device."""
    return store.shards.members(job.id) if job.gpus > 1 else ()


def busy_workers(store: Store) -> dict[str, str]:
    """The id of the job that each busy worker works on, by worker."""
    return {job.worker: job.id for job in store.jobs.running() if job.worker} | store.shards.working()


def rows(job: Job, members: Sequence[Member]) -> list[Row]:
    """The JSON rows of a job's devices, the first to join first."""
    return [
        {
            "worker": member.worker,
            "device": member.device,
            "works": _works(job, member),
            "leads": job.worker == member.worker,
            "phase": member.phase if _works(job, member) else None,
            "records_done": member.records_done,
            "records_per_s": _rate(member),
            "unit": unit(job),
            "joined_at": figures.iso(member.joined_at),
            "left_at": figures.iso(member.left_at),
            "failures": member.failures,
            "error": member.error,
            "software": member.software,
        }
        for member in members
    ]


def lines(found: Sequence[Row]) -> list[tuple[str, str]]:
    """The rows as lines of name and value."""
    return [(row["device"], ", ".join(filter(None, _words(row)))) for row in found]


def _words(row: Row) -> list[str | None]:
    failed = f"failed {count(row['failures'], 'time')}, the last time: {row['error']}" if row["failures"] else None
    return [
        count(row["records_done"], row["unit"]),
        figures.rate(row["records_per_s"]) if row["records_per_s"] else None,
        ("leads" if row["leads"] else "works") if row["works"] else "led" if row["leads"] else "left",
        row["phase"],
        f"worker {row['worker']}",
        failed,
    ]


def _works(job: Job, member: Member) -> bool:
    return job.state is JobState.RUNNING and member.left_at is None


def _rate(member: Member) -> float | None:
    """Records a second from joining to its last finished shard."""
    seconds = member.moved_at - member.joined_at
    return round(member.records_done / seconds, 3) if member.records_done and seconds > 0 else None
