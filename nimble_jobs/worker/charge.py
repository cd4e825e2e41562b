"""The attempt for which a worker is responsible: claims it, watches the child work on it, and ends it in the store."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import isdir
from pathlib import Path
from typing import Any

from nimble_jobs.data.hidden import output_of, staging_root
from nimble_jobs.errors import NotFound
from nimble_jobs.job import Job
from nimble_jobs.settings import Settings
from nimble_jobs.settings.model import DEFAULT
from nimble_jobs.store import Store
from nimble_jobs.worker import endings, parting
from nimble_jobs.worker.leftovers import tidy
from nimble_jobs.worker.logs import job_log
from nimble_jobs.worker.owed import Owed
from nimble_jobs.worker.process import Child
from nimble_jobs.worker.running import Running, Verdict

log = logging.getLogger(__name__)


class Charge:
    """The attempt that the child works on, if any, and results that the store lacks. Times are of the monotonic clock.

    The store may be unusable when an attempt ends. So its result is kept in `owed` until `owed.pay` can write it.
    """

    def __init__(self, store: Store, worker: str, on_over: Callable[[Job], None] = lambda _job: None) -> None:
        """`on_over` gets each job whose attempt has ended. Its end may be recorded later, when `owed` is paid."""
        self._store = store
        self._on_over = on_over
        self._worker = worker
        self._busy = False  # the last look gave a job, so another one is likely
        self.running: Running | None = None
        self.owed = Owed()
        self._told: set[tuple[str, int]] = set()  # attempts of jobs with an event about why this worker stays apart
        self.apart: dict[str, str] = {}  # by job, why this worker does not join it

    @property
    def job(self) -> Job | None:
        """The current job."""
        return self.running.job if self.running else None

    def take(self, child: Child, now: float) -> bool:
        """Claim a job and hand it to the child. False if there is none for it."""
        assert child.device is not None
        # A job that runs already and wants more devices comes first: it was claimed before whatever waits.
        self.apart = {}
        mine = child.software
        job = self._store.shards.join(self._worker, child.device, time.time(), software=mine, may=self._may)
        if job is None:
            job = self._store.jobs.claim(
                self._worker, device=child.device, most_ranks=child.most_ranks, now=time.time(), expected=self._busy
            )
        self._busy = job is not None
        if job is None:
            return False
        log.info("%s: attempt %d of %s starts", job.id, job.attempt, job.name)
        settings = self._store.settings.usable()
        self.running = Running.begin(job, now, stall_s=settings.limits.stall)
        self._note_settings(job, settings)
        child.moved()  # drop what an earlier job left in the pipe
        child.run(job)
        return True

    def _may(self, job: Job, misfit: str | None) -> bool:
        """Whether this worker can work on a job beside others. If not, an event says why, and so does `apart`.

        It needs what they run on, and the folder in which they stage the output. `misfit`: what it runs on instead.
        """
        path = output_of(job) if self._store.is_shared else None
        if misfit is not None:
            why = f"{misfit}, as on the job's other devices"
        # `is_dir` would raise if the system refuses to look.
        elif path is not None and not isdir(staging_root(path, job.id) / f"attempt-{job.attempt}"):  # noqa: PTH112
            why = (
                f"{path.parent} is not the folder there that the job's other devices write to; expected an output.path "
                "that all machines share"
            )
        else:
            return True
        self.apart[job.id] = why
        if (job.id, job.attempt) not in self._told:
            self._told.add((job.id, job.attempt))
            text = f"worker {self._worker} on {socket.gethostname()} does not join: {why}"
            self._store.jobs.event_soon("member", text, job.id, job.attempt, {}, now=time.time())
        return False

    def _note_settings(self, job: Job, settings: Settings) -> None:
        """Record the values that the attempt takes from the configuration, which may change later."""
        values = _taken(job.spec, job.allow_python, settings)
        if values:
            text = ", ".join(f"{field} from {each['origin']}" for field, each in values.items())
            self._store.jobs.event_soon("settings", text, job.id, job.attempt, values, now=time.time())

    def done(self, job_id: str, attempt: int) -> bool:
        """The child reports that an attempt is over and recorded. False if it was another attempt."""
        if self.running is None or (self.running.job.id, self.running.job.attempt) != (job_id, attempt):
            return False
        self._leave()
        return True

    def watch(self, child: Child, now: float) -> None:
        """Kill the child if its job must stop and does not stop by itself. Raises StoreError."""
        running = self.running
        if running is None:
            return
        running.glance(child.moved(), now)
        verdict = running.verdict(now)  # verdicts that need no store come first
        if verdict is None:
            try:
                running.look(self._store.jobs.get(running.job.id), now)
            except NotFound:
                log.warning("%s: the job is no longer in the database; its results are dropped", running.job.id)
                child.kill()
                return
            verdict = running.verdict(now)
        if verdict is not None:
            self._end(running, verdict, child)

    def lost(self, how: str) -> None:
        """The child died; `how` says how."""
        running = self._leave()
        if running:
            self.owed.add(partial(self._lose, running.job, f"the job's process died ({how})"))

    def give_back(self, child: Child, reason: str) -> None:
        """Kill the child; its job, if it has one, goes back to the queue."""
        child.kill()
        running = self._leave()
        if running:
            self.owed.add(partial(parting.requeued, self._store, running.job, reason))

    def _leave(self) -> Running | None:
        """The attempt is over; returns it."""
        running, self.running = self.running, None
        if running:
            self._on_over(running.job)
        return running

    def _end(self, running: Running, verdict: Verdict, child: Child) -> None:
        log.warning("%s: %s; its process is killed", running.job.id, verdict)
        jobs, job = self._store.jobs, running.job
        if verdict is Verdict.RESTARTED:
            self.give_back(child, "its process was restarted")
            return
        self._leave()
        if verdict is Verdict.STALLED:
            reason = running.stalled(stopped=not child.end())
            self.owed.add(partial(self._stall, job, reason))
        else:
            child.kill()
            ending = endings.timed_out if verdict is Verdict.OVERTIME else endings.cancelled
            self.owed.add(partial(ending, jobs, job))
        self.owed.add(partial(tidy, self._store, job.id))

    def _stall(self, job: Job, reason: str) -> None:
        with job_log(self._store.home, job.id):  # the child has just written its stacks there
            parting.stalled(self._store, job, reason)

    def _lose(self, job: Job, reason: str) -> None:
        parting.lost(self._store, job, reason)
        tidy(self._store, job.id)


def _taken(spec: Mapping[str, Any], allow_python: Sequence[str], settings: Settings) -> dict[str, dict[str, Any]]:
    """Value and origin of each field of a job that came from the file, the environment or a command line.

    `allow_python`: the folders whose code the job may run.
    """
    values: dict[str, dict[str, Any]] = {}
    origin = settings.origin("limits.stall")
    if origin != DEFAULT and spec.get("run", {}).get("stall") is None:
        values["run.stall"] = {"value": settings.limits.stall, "origin": origin}
    ours = {str(Path(folder).resolve()) for folder in settings.allow_python}
    folders = [folder for folder in allow_python if folder in ours]
    if folders and "python:" in str(spec.get("model", {}).get("source", "")) + str(spec.get("train")):
        values["allow_python"] = {"value": folders, "origin": settings.origin("allow_python")}
    return values
