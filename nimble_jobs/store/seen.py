"""Which files have been scored: a set that grows with each success, in the transaction that says so.

It is no watermark. A file that arrives late, with an old time, is not in the set and therefore new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Row, Select, delete, func, insert, select
from sqlalchemy.orm import Session

from nimble_jobs.seen import InputFile, Scored, Seen
from nimble_jobs.store.database import Database
from nimble_jobs.store.seen_tables import SeenFileRow, SeenRunRow, SeenSourceRow
from nimble_jobs.store.transitions import changed, record_event

T = TypeVar("T")

_AT_ONCE = 500  # files in one statement


@dataclass(frozen=True, kw_only=True)
class SeenSource:
    """What is known of one folder under one name."""

    name: str
    root: str
    files: int
    runs: int  # jobs that added files
    last_at: float | None  # when the newest of them succeeded, Unix seconds


class SeenFiles:
    """The files that successful jobs have scored, by the jobs' name and the folder."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def compare(self, name: str, root: str, files: Iterable[InputFile]) -> Iterator[tuple[InputFile, Seen | None]]:
        """Each file with what is known of its path. Looked up in batches, so that neither side is held whole."""
        source = self._db.read(lambda session: _source(session, name, root))
        for batch in _batches(files):
            known = {} if source is None else self._known(root, source, [file.path for file in batch])
            for file in batch:
                yield file, known.get(file.path)

    def _known(self, root: str, source: int, paths: list[str]) -> dict[str, Seen]:
        query = _files(source).where(SeenFileRow.path.in_(paths))
        return self._db.read(lambda session: {row.path: _record(root, row) for row in session.execute(query)})

    def sources(self, name: str | None = None) -> list[SeenSource]:
        """The folders that are known, of one name or of all."""
        runs = select(SeenRunRow.source, func.count().label("runs"), func.max(SeenRunRow.at).label("last_at"))
        by_source = runs.group_by(SeenRunRow.source).subquery()
        files = select(func.count()).where(SeenFileRow.source == SeenSourceRow.id).scalar_subquery()
        query = select(SeenSourceRow.name, SeenSourceRow.root, files, by_source.c.runs, by_source.c.last_at)
        query = query.outerjoin(by_source, by_source.c.source == SeenSourceRow.id)
        query = query.order_by(SeenSourceRow.name, SeenSourceRow.root)
        if name is not None:
            query = query.where(SeenSourceRow.name == name)
        return self._db.read(
            lambda session: [
                SeenSource(name=name, root=root, files=n, runs=runs or 0, last_at=last_at)
                for name, root, n, runs, last_at in session.execute(query)
            ]
        )

    def files(self, name: str) -> Iterator[Seen]:
        """The files seen under a name, folder by folder in the database's order of paths; read page by page."""
        for source, root in self._sources_of(name):
            after = None
            while page := self._page(root, source, after):
                yield from page
                after = page[-1].path

    def _page(self, root: str, source: int, after: str | None) -> list[Seen]:
        query = _files(source).order_by(SeenFileRow.path).limit(_AT_ONCE)
        if after is not None:
            query = query.where(SeenFileRow.path > after)
        return self._db.read(lambda session: [_record(root, row) for row in session.execute(query)])

    def _sources_of(self, name: str) -> list[tuple[int, str]]:
        query = select(SeenSourceRow.id, SeenSourceRow.root).where(SeenSourceRow.name == name)
        query = query.order_by(SeenSourceRow.root)
        return self._db.read(lambda session: [(source, root) for source, root in session.execute(query)])

    def forget(self, name: str, *, now: float, which: Callable[[Seen], bool] | None = None) -> int:
        """Forget the files of a name, or those that `which` picks; the next run scores them again. Returns how many.

        In small transactions: jobs go on meanwhile.
        """
        forgotten = 0
        for source, root in self._sources_of(name):
            after = None
            while page := self._page(root, source, after):
                after = page[-1].path
                chosen = [seen for seen in page if which is None or which(seen)]
                if chosen:
                    forgotten += self._db.write(lambda session, s=source, c=chosen: _forget(session, s, c))  # type: ignore[misc]
            self._db.write(lambda session, s=source: _sweep(session, s))  # type: ignore[misc]
        if forgotten:
            text = f"{forgotten:,} seen files of {name} forgotten"
            self._db.write(lambda session: record_event(session, "forgotten", text, now=now))
        return forgotten


def mark(session: Session, name: str, job: str, scored: Scored, now: float) -> int:
    """Add a job's files to the set, in the transaction in which the job succeeds.

    A file that another job, which listed it later, has added meanwhile stays as that job saw it. Returns how many did.
    """
    source = _source(session, name, scored.root)
    if source is None:
        row = SeenSourceRow(name=name, root=scored.root)
        session.add(row)
        session.flush()
        source = row.id
    run = SeenRunRow(source=source, job=job, model=scored.model, listed_at=scored.listed_at, at=now)
    session.add(run)
    session.flush()
    kept = 0
    for batch in _batches(scored.files):
        paths = [file.path for file in batch]
        later = select(SeenFileRow.path).join(SeenRunRow, SeenRunRow.id == SeenFileRow.run)
        later = later.where(
            SeenFileRow.source == source, SeenFileRow.path.in_(paths), SeenRunRow.listed_at > scored.listed_at
        )
        newer = set(session.scalars(later))
        kept += len(newer)
        changed(session, delete(SeenFileRow).where(_among(source, [p for p in paths if p not in newer])))
        rows = [
            {"source": source, "path": f.path, "size": f.size, "mtime_ns": f.mtime_ns, "run": run.id}
            for f in batch
            if f.path not in newer
        ]
        if rows:
            session.execute(insert(SeenFileRow), rows)
    return kept


def _source(session: Session, name: str, root: str) -> int | None:
    return session.scalar(select(SeenSourceRow.id).where(SeenSourceRow.name == name, SeenSourceRow.root == root))


def _among(source: int, paths: list[str]) -> Any:
    return (SeenFileRow.source == source) & SeenFileRow.path.in_(paths)


def _files(source: int) -> Select[str, int, int, str, str, float]:
    query = select(
        SeenFileRow.path, SeenFileRow.size, SeenFileRow.mtime_ns, SeenRunRow.model, SeenRunRow.job, SeenRunRow.at
    )
    return query.join(SeenRunRow, SeenRunRow.id == SeenFileRow.run).where(SeenFileRow.source == source)


def _record(root: str, row: Row[str, int, int, str, str, float]) -> Seen:
    path, size, mtime_ns, model, job, at = row
    return Seen(root=root, path=path, size=size, mtime_ns=mtime_ns, model=model, job=job, at=at)


def _forget(session: Session, source: int, files: Sequence[Seen]) -> int:
    return changed(session, delete(SeenFileRow).where(_among(source, [file.path for file in files])))


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    left = iter(items)
    while batch := list(islice(left, _AT_ONCE)):
        yield batch


def _sweep(session: Session, source: int) -> None:
    """Remove runs, and the folder, of which no file is left."""
    used = select(SeenFileRow.run).where(SeenFileRow.source == source)
    changed(session, delete(SeenRunRow).where(SeenRunRow.source == source, SeenRunRow.id.not_in(used)))
    left = select(SeenRunRow.id).where(SeenRunRow.source == SeenSourceRow.id).exists()
    changed(session, delete(SeenSourceRow).where(SeenSourceRow.id == source, ~left))
