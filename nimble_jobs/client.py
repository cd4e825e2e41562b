"""The commands as Python functions: submit, wait, cancel, start and stop workers. Never loads torch."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nimble_jobs import spec as specs
from nimble_jobs.errors import NimbleError, NotFinishedInTime, UsageError
from nimble_jobs.job import After, Job, JobState
from nimble_jobs.settings import Settings, check_targets
from nimble_jobs.spec import JobSpec, code
from nimble_jobs.store import NewJob, Store, WorkerInfo, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.tracing import submitter_traceparent

Home = Path | str | None  # state folder; None: chosen as the commands do

_LOG_TAIL_LINES = 20


def submit(
    spec: JobSpec | Path | str,
    *,
    store: Store | None = None,
    home: Home = None,
    overrides: Sequence[str] = (),
    priority: int | None = None,
    after: Sequence[After | str] = (),
    delay_s: float = 0.0,
    key: str | None = None,
    allow_python: Sequence[Path | str] = (),
    foreground: bool = False,
    now: float | None = None,
) -> Job:
    """Queue a spec, or a file with one. The job is durable once this returns.

    `priority`, `after` and `key` override the spec. `overrides` are `KEY=VALUE` texts for a file. `python:` models and
    losses may be in folders of `allow_python` and of the settings. If TRACEPARENT is set, the job's traces are part of
    that trace. Raises SpecError; UsageError for a `python:` file
    outside these folders, and if another spec has the same `key`; NotFound for an unknown job in `after`.
    """
    if not isinstance(spec, JobSpec):
        spec = specs.load(Path(spec), overrides, once=True)
    elif overrides:
        raise UsageError("overrides need a spec file; a JobSpec is final")
    if spec.cron is not None:
        raise UsageError(
            f"{spec.name} has a cron part; add it as a timer with nimble_jobs.cron.add, or remove that part"
        )
    now = time.time() if now is None else now
    with opened(store, home) as store:
        settings = store.settings.now()
        folders = permitted(spec, allow_python, settings=settings)
        check_targets(spec.notify, settings, f"job {spec.name}")
        specs.check_home(spec, store.home)
        new = NewJob.of(spec, allow_python=tuple(map(str, folders)))
        return store.jobs.queue(
            replace(
                new,
                priority=new.priority if priority is None else priority,
                key=key or new.key,
                after=(*new.after, *after),
                not_before=now + delay_s if delay_s else 0.0,
                foreground=foreground,
                traceparent=submitter_traceparent(),
            ),
            now,
        )


def permitted(spec: JobSpec, named: Sequence[Path | str] = (), *, settings: Settings) -> tuple[Path, ...]:
    """The folders of `allowed_python`. Raises UsageError if a `python:` file of the spec is outside them."""
    folders = allowed_python(named, settings=settings)
    code.check(spec, folders)
    return folders


def allowed_python(named: Sequence[Path | str] = (), *, settings: Settings) -> tuple[Path, ...]:
    """The resolved folders whose `python:` models may run: the named ones and the settings' folders. Raises UsageError
    for one that is not a folder.
    """
    listed = f"allow_python ({settings.origin('allow_python')})"
    origins = {Path(folder).expanduser().resolve(): "--allow-python" for folder in named if folder}
    origins |= {Path(folder).resolve(): listed for folder in settings.allow_python}
    for folder, origin in origins.items():
        if not folder.is_dir():
            raise UsageError(f"{origin}: {folder} is not a folder")
    return tuple(origins)


def wait(
    ids: str | Sequence[str],
    *,
    store: Store | None = None,
    home: Home = None,
    timeout_s: float | None = None,
    poll_s: float = 0.1,
) -> list[Job]:
    """Wait until every job has ended in any way. Returns the jobs in the given order, with arrays in their own order.

    Raises NotFound, and NotFinishedInTime with the unfinished jobs.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with opened(store, home) as store:
        jobs = {job.id: job for job in store.jobs.chosen([ids] if isinstance(ids, str) else ids)}
        while open_jobs := {name: job for name, job in jobs.items() if not job.state.final}:
            if deadline is not None and time.monotonic() >= deadline:
                raise NotFinishedInTime(
                    f"not finished after {timeout_s:g} s: "
                    + ", ".join(f"{j.id} ({j.state})" for j in open_jobs.values())
                )
            time.sleep(poll_s)
            found = {job.id: job for job in store.jobs.of(ids=open_jobs)}
            jobs |= {name: found[name] if name in found else store.jobs.get(name) for name in open_jobs}
        return list(jobs.values())


def cancel(ids: str | Sequence[str], *, store: Store | None = None, home: Home = None, now: bool = False) -> list[Job]:
    """Cancel jobs or arrays: queued jobs at once, running ones at their next batch, or 20 s later with their process.

    With `now` the worker kills the process of a running job at once and starts another. A job that has ended stays as
    it is. Raises NotFound.
    """
    with opened(store, home) as store:
        at = time.time()
        chosen = store.jobs.chosen([ids] if isinstance(ids, str) else ids)
        for job in chosen:
            state = store.jobs.cancel(job.id, now=at)
            if state is JobState.RUNNING and now:
                store.jobs.cancelled(job.id, store.jobs.get(job.id).attempt, now=at)
            elif state is JobState.CANCELLED and job.state is JobState.QUEUED and job.attempt:
                _tidy(store, job.id)  # the worker tidies up a running one
        return [store.jobs.get(job.id) for job in chosen]


def recover(store: Store) -> None:
    """End attempts whose process died. Without a worker, nothing else would notice."""
    for job in store.recover(time.time()):
        _tidy(store, job.id)


def _tidy(store: Store, job_id: str) -> None:
    from nimble_jobs.data import hidden  # imported here, because it loads numpy, which few commands need

    job = store.jobs.get(job_id)
    event = hidden.tidy(job, store.home)
    if event is not None:
        store.jobs.event_soon(*event, job.id, job.attempt, {}, now=time.time())


def list_jobs(
    *,
    store: Store | None = None,
    home: Home = None,
    states: Collection[JobState] | None = None,
    name: str | None = None,
    limit: int | None = None,
) -> list[Job]:
    """All jobs, newest first."""
    with opened(store, home) as store:
        return store.jobs.list(states=states, name=name, limit=limit)


def live_workers(*, store: Store | None = None, home: Home = None, here: bool = False) -> list[WorkerInfo]:
    """The running workers: those that hold their lock or lease. A `run` command does not count.

    `here`: only those of this state folder, if several share a database.
    """
    with opened(store, home) as store:
        return [info for info in store.workers.live("worker") if not here or store.workers.here(info)]


def start_worker(
    home: Home = None,
    *,
    store: Store | None = None,
    device: str | None = None,
    devices: str | None = None,
    max_idle_s: float | None = None,
    max_time_s: float | None = None,
    gpu_memory_bytes: int | None = None,
    timeout_s: float = 120.0,
) -> list[WorkerInfo]:
    """Start a worker that outlives this process, and return once all of its devices can run jobs.

    `devices` is `all`, or a list such as `cuda:0,cuda:2`: one entry is returned for each. Without it there is one
    `device`, which like `gpu_memory_bytes` defaults to the settings. It ends after `max_idle_s` without work, and
    `max_time_s` after its start as on SIGTERM. Its log is `logs/worker-….log` in the state folder. Raises
    SettingsError, UsageError if there is no such device, NimbleError with the end of the log if the worker is not ready
    within `timeout_s`.
    """
    with opened(store, home) as store:
        settings = store.settings.now()
        device = device or settings.device
        gpu_memory_bytes = settings.gpu_memory if gpu_memory_bytes is None else gpu_memory_bytes
        log_path = worker_log(store.home)
        command = worker_command(
            store.home,
            device=device if devices is None else None,
            devices=devices,
            max_idle_s=max_idle_s,
            max_time_s=max_time_s,
            gpu_memory_bytes=gpu_memory_bytes,
        )
        with log_path.open("ab") as log:
            pid = os.posix_spawn(
                command[0],
                command,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
                setsid=True,  # so that neither closing the terminal nor Ctrl-C reaches the worker
            )
        return _await_ready(store, pid, log_path, time.monotonic() + timeout_s)


def worker_command(home: Path, **options: str | float | None) -> list[str]:
    """The command of a worker's process, with these options of `python -m nimble_jobs.worker`; None leaves one out."""
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items() if value is not None]
    return [sys.executable, "-P", "-m", "nimble_jobs.worker", "--home", str(home), *itertools.chain(*given)]


def worker_log(home: Path) -> Path:
    """A new name for the log of a worker's process."""
    return home / "logs" / f"worker-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}.log"


def worker_error(log_path: Path) -> str:
    """The last line of a worker's log without its time: why a worker ended that could not be used."""
    return _tail(log_path).splitlines()[-1].rpartition(" ERROR ")[2]


def stop_workers(
    ids: Sequence[str] | None = None,
    *,
    store: Store | None = None,
    home: Home = None,
    timeout_s: float = 90.0,
) -> list[WorkerInfo]:
    """Send SIGTERM to workers (None: to all of this state folder) and wait until they are gone. Running jobs finish
    their shard first.

    All devices of a worker stop together. Raises NotFound for a worker that does not run, UsageError for one of another
    state folder, NotFinishedInTime with the workers left after `timeout_s`.
    """
    with opened(store, home) as store:
        live = live_workers(store=store, here=True)
        named = live if ids is None else store.workers.chosen(ids)
        for info in named:
            if not store.workers.here(info):
                raise UsageError(
                    f"worker {info.id} belongs to another state folder, on {info.info.get('host')}; stop it there, or "
                    f"ask it to leave with: nimble-jobs worker drain {info.id}"
                )
        chosen = with_siblings(named, live)
        for info in {info.pid: info for info in chosen}.values():
            _terminate(store, info)
        if left := still_there(store, chosen, timeout_s):
            raise NotFinishedInTime(f"still running after {timeout_s:g} s: {', '.join(left)}")
        return chosen


def with_siblings(chosen: Sequence[WorkerInfo], live: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    """These and the other devices of their processes."""
    pids = {info.pid for info in chosen}
    return [info for info in live if info.pid in pids]


def still_there(store: Store, asked: Sequence[WorkerInfo], limit_s: float | None) -> list[str]:
    """Wait until these workers are gone. Returns the ids of those still running when the time is over."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while left := {info.id for info in store.workers.live()} & {info.id for info in asked}:
        if deadline is not None and time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.05)
    return []


@contextmanager
def opened(store: Store | None, home: Home) -> Iterator[Store]:
    if store is not None:  # the opener closes it
        yield store
        return
    store = open_store(resolve(str(home) if home is not None else None))
    try:
        yield store
    finally:
        store.close()


def _await_ready(store: Store, pid: int, log_path: Path, deadline: float) -> list[WorkerInfo]:
    while time.monotonic() < deadline:
        live = live_workers(store=store, here=True)
        ready = [info for info in live if info.pid == pid and info.status == "ready"]
        if ready and len(ready) == ready[0].info["devices"]:
            return ready
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            if os.waitstatus_to_exitcode(status) == UsageError.exit_code:
                raise UsageError(worker_error(log_path))
            raise NimbleError(f"the worker did not start:\n{_tail(log_path)}")
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    raise NimbleError(f"the worker was not ready in time and was stopped:\n{_tail(log_path)}")


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:]) or f"{path} is empty"


def _terminate(store: Store, info: WorkerInfo) -> None:
    """Send SIGTERM to the lock's holder only, since another program may have its process id meanwhile."""
    try:
        process = os.pidfd_open(info.pid)
    except ProcessLookupError:
        return
    try:
        if any(now.id == info.id for now in store.workers.live()):  # still held, so the opened process is the holder
            signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        return
    finally:
        os.close(process)
