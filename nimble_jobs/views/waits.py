"""Why a queued job does not run yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from nimble_jobs.job import Job, JobState, When
from nimble_jobs.views import figures
from nimble_jobs.views.members import busy_workers

if TYPE_CHECKING:
    from nimble_jobs.store import Store, WorkerInfo

START = "start one with: nimble-jobs worker start --detach"


def reasons(store: Store, jobs: Sequence[Job], now: float) -> dict[str, str]:
    """A reason for each queued job among these, by id."""
    queued = [job for job in jobs if job.state is JobState.QUEUED]
    if not queued:
        return {}
    from nimble_jobs import client

    live = client.live_workers(store=store)
    awaited = store.jobs.awaited([job.id for job in queued])
    busy = busy_workers(store).keys() | {worker.id for worker in live if worker.info.get("lent")}
    groups = store.jobs.group_limits(sorted({job.group for job in queued if job.group}))
    return {job.id: _held(job) or _reason(job, awaited.get(job.id, []), groups, live, busy, now) for job in queued}


def changed_groups(store: Store, jobs: Sequence[Job]) -> list[str]:
    """Messages about group limits that these jobs changed when they were queued."""
    return store.jobs.messages("group", [job.id for job in jobs if job.group])


def in_line(why: str) -> bool:
    """Whether a job with this reason waits only for its turn."""
    return not why.startswith(("held", "waits for", "group"))


def takes(worker: WorkerInfo, job: Job) -> bool:
    """Whether this worker will run the job once its turn comes."""
    return _has_device(worker, job) and job.world_size <= worker.info.get("most_ranks", job.world_size)


def _has_device(worker: WorkerInfo, job: Job) -> bool:
    """Whether this worker stays and is on a device for the job, however many the job needs."""
    return not _leaves(worker) and (
        (job.device == "auto" and not (job.world_size > 1 and worker.device == "cpu"))
        or job.device in (worker.device, worker.device.partition(":")[0])
        or worker.device == "auto"  # it has not reported its device yet
    )


def paused(job: Job, live: Sequence[WorkerInfo]) -> str | None:
    """A message if all workers that could run the job are paused, with how to resume them; else None."""
    takers = [worker for worker in live if takes(worker, job)]
    if not takers or any(worker.info.get("wanted") != "pause" for worker in takers):
        return None
    which = "the only worker that can run it is" if len(takers) == 1 else "all workers that can run it are"
    return f"{which} paused; resume with: nimble-jobs worker resume"


def _leaves(worker: WorkerInfo) -> bool:
    return worker.status == "draining" or worker.info.get("wanted") == "drain"


def no_worker(job: Job, live: Sequence[WorkerInfo]) -> str:
    """A message that no live worker will run the job, with how to start one that does."""
    room = {worker.device: worker.info.get("most_ranks") for worker in live if _has_device(worker, job)}
    if room:
        have = ", ".join(
            f"{device}: {most}{' cores' if device == 'cpu' else ''}" for device, most in sorted(room.items())
        )
        found = f"run.gpus: found {job.world_size}, but no worker's machine has so many devices ({have})"
        return f"{found}; start a worker on a larger one, or ask for fewer"
    which, option = ("", "") if job.device == "auto" else (f" for {job.device}", f" --device {job.device}")
    if job.device == "auto" and job.world_size > 1:
        which, option = f" for run.gpus: {job.world_size}", " --device cuda, or set run.device: cpu"
    others = sorted({worker.device for worker in live if not _leaves(worker)})
    beside = f" (only on {', '.join(others)})" if others else ""
    return f"no worker{which} is running{beside}; {START}{option}"


def _held(job: Job) -> str | None:
    return f"held; release it with: nimble-jobs release {job.id}" if job.held else None


def _reason(
    job: Job,
    awaited: Sequence[Job],
    groups: Mapping[str, tuple[int, int]],
    live: Sequence[WorkerInfo],
    busy: Collection[str | None],
    now: float,
) -> str:
    if awaited:
        names = ", ".join(
            f"{parent.name} {parent.id} ({_awaited_end(job, parent)}{parent.state.value})" for parent in awaited[:3]
        )
        return f"waits for {names}" + (f" and {len(awaited) - 3} more" if len(awaited) > 3 else "")
    if job.foreground:
        return "its run command has not started it yet"
    if job.not_before > now:
        when = f"{figures.clock(job.not_before)}, in {figures.duration(job.not_before - now)}"
        return f"attempt {job.attempt + 1} begins at {when}" if job.attempt else f"held back until {when}"
    running, most = groups.get(job.group or "", (0, 1))
    if running >= most:
        return f"group {job.group} is full: {running:,} of {most:,} run"
    takers = [worker for worker in live if takes(worker, job)]
    if not takers:
        return no_worker(job, live)
    if held := paused(job, live):
        return held
    free = [worker for worker in takers if worker.id not in busy]
    if free:
        return "a worker is starting" if all(w.status == "starting" for w in free) else "a worker is about to take it"
    return "the worker is busy" if len(takers) == 1 else f"all {len(takers)} workers are busy"


def _awaited_end(job: Job, parent: Job) -> str:
    when = job.after_when.get(parent.id, When.SUCCESS)
    return "" if when is When.SUCCESS else f"{when.value}; "
