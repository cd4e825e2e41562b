"""Checks a store for damage. Reads everything, changes nothing."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from nimble_jobs.errors import NimbleError, NotFound, StoreError
from nimble_jobs.job import JobState
from nimble_jobs.store.records import ScheduleState, sha256
from nimble_jobs.store.tables import JobRow

if TYPE_CHECKING:
    from nimble_jobs.store.contents import Contents
    from nimble_jobs.store.database import Database

_JSON = ("after", "allow_python", "spec", "schedule", "timings", "outputs")
_EMPTY = ("[]", "{}")
_AT_ONCE = 500


def problems_of(store: Contents, database: Database, *, newest: int | None = None) -> list[str]:
    """One line for each problem.

    With `newest`, only running jobs and this many of the newest are read, and no index is compared with its table.
    """
    return list(dict.fromkeys(_problems(store, database, newest)))  # two checks may report the same problem


def _problems(store: Contents, database: Database, newest: int | None) -> Iterator[str]:
    for look in (_database, _states, _jobs):
        try:
            yield from look(store, database, newest)
        except StoreError as e:
            yield str(e)
    for other in (_timers, _schedules, _task_times):
        try:
            yield from other(store)
        except StoreError as e:
            yield str(e)
    yield from _artifacts(store)
    yield from _permissions(store)


def _database(_store: Contents, database: Database, newest: int | None) -> Iterator[str]:
    if not database.is_sqlite:
        return
    look = "integrity_check" if newest is None else "quick_check"

    def work(session: Session) -> list[str]:
        problems = [str(line) for line in session.scalars(text(f"PRAGMA {look}"))]
        orphans = session.execute(text("PRAGMA foreign_key_check")).all()
        return [line for line in problems if line != "ok"] + [
            f"table {o[0]}, row {o[1]}: its {o[2]} is gone" for o in orphans
        ]

    yield from (f"{database.name}: {line}" for line in database.read(work))


def _states(store: Contents, database: Database, _newest: int | None) -> Iterator[str]:
    known = list(JobState)
    strange = select(JobRow.id, JobRow.state).where(JobRow.state.not_in(known)).order_by(JobRow.seq)
    running = select(JobRow.id, JobRow.worker).where(JobRow.state == JobState.RUNNING.value).order_by(JobRow.seq)
    for job, state in database.read(lambda session: session.execute(strange).all()):
        yield f"job {job}: state {state!r} is not one of {', '.join(known)}"
    for job, worker in database.read(lambda session: session.execute(running).all()):
        if not store.workers.alive(worker or ""):
            yield f"job {job}: runs on worker {worker}, which is gone; the next worker that starts queues it again"


def _jobs(_store: Contents, database: Database, newest: int | None) -> Iterator[str]:
    """Rows of jobs. Many rows are read in several transactions, so that others can write in between."""
    columns = (JobRow.seq, JobRow.id, JobRow.spec_digest, *(getattr(JobRow, name) for name in _JSON))
    below, left = None, newest
    while left is None or left > 0:
        query = select(*columns).order_by(JobRow.seq.desc()).limit(_AT_ONCE if left is None else min(left, _AT_ONCE))
        if below is not None:
            query = query.where(JobRow.seq < below)
        rows = database.read(lambda session, query=query: session.execute(query).all())  # type: ignore[misc]
        for _, job, digest, *texts in rows:
            values = dict(zip(_JSON, texts, strict=True))
            sound = sha256(values["spec"]) == digest
            if not sound:
                yield f"job {job}: its stored spec is damaged"
            yield from (
                f"job {job}: column {name} is damaged"
                for name, value in values.items()
                if value not in _EMPTY and not (sound and name == "spec") and not _is_json(value)
            )
        if not rows:
            return
        below = rows[-1][0]
        left = None if left is None else left - len(rows)


def _timers(store: Contents) -> Iterator[str]:
    for timer in store.timers.list():
        if timer.damaged:
            yield f"timer {timer.name}: its stored spec is damaged; add it again"


def _task_times(store: Contents) -> Iterator[str]:
    for key in store.task_times.damaged():
        yield f"task times {key[:12]}: damaged, so not used; to remove them, run: nimble-jobs cache prune --quarantined"


def _schedules(store: Contents) -> Iterator[str]:
    for entry in store.schedules.list():
        if entry.state != ScheduleState.READY:
            continue  # the next job that needs it builds it again
        try:
            stored = store.schedules.verified(entry.key)
            stored.load()
        except (StoreError, NotFound) as e:
            yield str(e)
            continue
        try:
            missing = [ref.name for ref in stored.artifacts if not store.artifacts.can_have(ref.name)]
        except NimbleError as e:
            yield f"cache.shared: {e}"
            return
        yield from (f"schedule {entry.key}: its artifact {name} is missing" for name in missing)


def _artifacts(store: Contents) -> Iterator[str]:
    yield from store.artifacts.strange()
    for name in store.artifacts.names():
        try:
            store.artifacts.get(name)
        except (StoreError, NotFound) as e:
            yield str(e)


def _permissions(store: Contents) -> Iterator[str]:
    for folder, folders, files in os.walk(store.home):
        if "logs" in folders:
            folders.remove("logs")  # their contents are never executed
        for path in (folder, *(os.path.join(folder, file) for file in files)):  # noqa: PTH118  # os.walk gives texts
            try:
                info = os.lstat(path)
            except FileNotFoundError:
                continue  # a temporary file of a running process
            if info.st_uid != os.geteuid():
                yield f"{path}: belongs to user {info.st_uid}, not to {os.geteuid()}"
            elif not stat.S_ISLNK(info.st_mode) and info.st_mode & 0o022:
                yield f"{path}: others can write to it (mode {stat.S_IMODE(info.st_mode):04o})"


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except (ValueError, TypeError):
        return False
    return True
