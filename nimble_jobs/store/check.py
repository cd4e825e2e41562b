"""What is wrong with a store. Looks at everything, changes nothing."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from nimble_jobs.errors import NotFound, StoreError
from nimble_jobs.job import JobState
from nimble_jobs.store.records import ScheduleState, sha256
from nimble_jobs.store.tables import JobRow

if TYPE_CHECKING:
    from nimble_jobs.store.database import Database
    from nimble_jobs.store.store import Store

_JSON = ("after", "allow_python", "spec", "schedule", "timings", "outputs")


def problems_of(store: Store, database: Database) -> list[str]:
    """One line for each thing that is wrong."""
    return list(dict.fromkeys(_problems(store, database)))  # two looks may find the same


def _problems(store: Store, database: Database) -> Iterator[str]:
    for look in (_database, _jobs, _timers, _schedules):
        try:
            yield from look(store, database)
        except StoreError as e:
            yield str(e)
    yield from _artifacts(store)
    yield from _permissions(store)


def _database(_store: Store, database: Database) -> Iterator[str]:
    if not database.is_sqlite:
        return

    def work(session: Session) -> list[str]:
        found = [str(line) for line in session.scalars(text("PRAGMA integrity_check"))]
        orphans = session.execute(text("PRAGMA foreign_key_check")).all()
        return [line for line in found if line != "ok"] + [
            f"table {o[0]}, row {o[1]}: its {o[2]} is gone" for o in orphans
        ]

    yield from (f"{database.name}: {line}" for line in database.read(work))


def _jobs(store: Store, database: Database) -> Iterator[str]:
    query = select(JobRow).order_by(JobRow.seq)
    for row in database.read(lambda session: session.scalars(query).all()):
        if sha256(row.spec) != row.spec_digest:
            yield f"job {row.id}: its stored spec is not what was submitted"
        yield from (f"job {row.id}: column {name} is damaged" for name in _JSON if not _is_json(getattr(row, name)))
        if row.state not in list(JobState):
            yield f"job {row.id}: state {row.state!r} is none of {', '.join(JobState)}"
        elif row.state == JobState.RUNNING.value and not store.workers.alive(row.worker or ""):
            yield f"job {row.id}: runs on worker {row.worker}, which is gone; the next worker that starts takes it back"


def _timers(store: Store, _database: Database) -> Iterator[str]:
    for timer in store.timers.list():
        if timer.damaged:
            yield f"timer {timer.name}: its spec is not what was stored; add it again"


def _schedules(store: Store, _database: Database) -> Iterator[str]:
    for entry in store.schedules.list():
        if entry.state != ScheduleState.READY:
            continue  # whoever needs it will build it again
        try:
            stored = store.schedules.verified(entry.key)
            stored.load()
        except (StoreError, NotFound) as e:
            yield str(e)
            continue
        missing = [ref.name for ref in stored.artifacts if not store.artifacts.has(ref.name)]
        yield from (f"schedule {entry.key}: its artifact {name} is missing" for name in missing)


def _artifacts(store: Store) -> Iterator[str]:
    yield from store.artifacts.strange()
    for name in store.artifacts.names():
        try:
            store.artifacts.get(name)
        except (StoreError, NotFound) as e:
            yield str(e)


def _permissions(store: Store) -> Iterator[str]:
    for folder, folders, files in os.walk(store.home):
        if "logs" in folders:
            folders.remove("logs")  # nobody runs what is in them
        for path in (folder, *(os.path.join(folder, file) for file in files)):  # noqa: PTH118  # os.walk gives texts
            try:
                info = os.lstat(path)
            except FileNotFoundError:
                continue  # a temporary file of a process that works right now
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
