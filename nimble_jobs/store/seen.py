"""The set of scored files. It grows in the transaction in which a job succeeds.

It is no watermark: a file that arrives late, with an old time, is not in the set and therefore new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

from sqlalchemy import Table, delete, func, select
from sqlalchemy.orm import Session

from nimble_jobs.seen import InputFile, Scored, Seen
from nimble_jobs.store.database import Database
from nimble_jobs.store.seen_tables import SeenFileRow, SeenRunRow, SeenSourceRow
from nimble_jobs.store.transitions import changed, record_event
from nimble_jobs.store.upsert import Upsert

T = TypeVar("T")

_Run = tuple[str, str, float]  # model, job, when

_AT_ONCE = 500  # files in one lookup
_INSERTED_AT_ONCE = 5000
_FILES = cast(Table, SeenFileRow.__table__)
_FILE = (_FILES.c.path, _FILES.c.size, _FILES.c.mtime_ns, _FILES.c.run)


@dataclass(frozen=True, kw_only=True)
class SeenSource:
    """Facts about one folder under one job name."""

    name: str
    root: str
    files: int
    runs: int  # jobs that added files
    last_at: float | None  # when the newest of them succeeded, Unix seconds


class SeenFiles:
    """The files that successful jobs have scored, by the jobs' name and the folder."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def newest_run(self, name: str, root: str) -> int:
        """The number of the last run that added files; 0 for none. Numbers grow even if the clock is set back."""
        query = select(func.max(SeenRunRow.id)).join(SeenSourceRow, SeenSourceRow.id == SeenRunRow.source)
        query = query.where(SeenSourceRow.name == name, SeenSourceRow.root == root)
        return self._db.read(lambda session: session.scalar(query)) or 0

    def compare(self, name: str, root: str, files: Iterable[InputFile]) -> Iterator[tuple[InputFile, Seen | None]]:
        """Each file with the seen state of its path. Read in batches, so that neither side is held in memory whole."""
        source = self._db.read(lambda session: _source(session, name, root))
        runs: dict[int, _Run] = {}
        for batch in _batches(files, _AT_ONCE):
            known = {} if source is None else self._known(root, source, [file.path for file in batch], runs)
            for file in batch:
                yield file, known.get(file.path)

    def _known(self, root: str, source: int, paths: list[str], runs: dict[int, _Run]) -> dict[str, Seen]:
        query = select(*_FILE).where(_FILES.c.source == source, _FILES.c.path.in_(paths))

        def work(session: Session) -> list[Seen]:
            return _records(session, root, session.execute(query).all(), runs)

        return {seen.path: seen for seen in self._db.read(work)}

    def sources(self, name: str | None = None) -> list[SeenSource]:
        """The known folders, of one name or of all."""
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
            for page in self._pages(source, root):
                yield from page

    def _pages(self, source: int, root: str) -> Iterator[list[Seen]]:
        query = select(*_FILE).where(_FILES.c.source == source).order_by(_FILES.c.path).limit(_AT_ONCE)
        runs: dict[int, _Run] = {}
        page = self._db.read(lambda session: _records(session, root, session.execute(query).all(), runs))
        while page:
            yield page
            following = query.where(_FILES.c.path > page[-1].path)
            page = self._db.read(lambda session, q=following: _records(session, root, session.execute(q).all(), runs))  # type: ignore[misc]

    def _sources_of(self, name: str) -> list[tuple[int, str]]:
        query = select(SeenSourceRow.id, SeenSourceRow.root).where(SeenSourceRow.name == name)
        query = query.order_by(SeenSourceRow.root)
        return self._db.read(lambda session: [(source, root) for source, root in session.execute(query)])

    def forget(self, name: str, *, now: float, which: Callable[[Seen], bool] | None = None) -> int:
        """Forget the files of a name, or those that `which` selects, so that the next run scores them. Returns their
        number.

        Uses small transactions, so that jobs can go on meanwhile.
        """
        forgotten = 0
        for source, root in self._sources_of(name):
            for page in self._pages(source, root):
                paths = [seen.path for seen in page if which is None or which(seen)]
                if paths:
                    gone = delete(_FILES).where(_FILES.c.source == source, _FILES.c.path.in_(paths))
                    forgotten += self._db.write(partial(changed, statement=gone))
            self._db.write(partial(_sweep, source=source))
        if forgotten:
            text = f"{forgotten:,} seen files of {name} forgotten"
            self._db.write(lambda session: record_event(session, "forgotten", text, now=now))
        return forgotten


def mark(session: Session, name: str, job: str, scored: Scored, now: float) -> int:
    """Add a job's files to the set, in the transaction in which the job succeeds.

    If another job has added the same file since this one listed it, the later state of the file is kept. Returns the
    number of files that both jobs have scored.
    """
    source = _source(session, name, scored.root)
    if source is None:
        row = SeenSourceRow(name=name, root=scored.root)
        session.add(row)
        session.flush()
        source = row.id
    others = select(SeenRunRow.id).where(SeenRunRow.source == source, SeenRunRow.id > scored.after_run)
    newer = list(session.scalars(others))
    run = SeenRunRow(source=source, job=job, model=scored.model, listed_at=scored.listed_at, at=now)
    session.add(run)
    session.flush()
    both = 0
    for batch in _batches(scored.files, _AT_ONCE if newer else _INSERTED_AT_ONCE):
        theirs: dict[str, int] = {}
        if newer:
            query = select(_FILES.c.path, _FILES.c.mtime_ns).where(_FILES.c.source == source, _FILES.c.run.in_(newer))
            query = query.where(_FILES.c.path.in_([file.path for file in batch]))
            theirs = {row.path: row.mtime_ns for row in session.execute(query)}
            both += len(theirs)
        rows = [
            {"source": source, "path": f.path, "size": f.size, "mtime_ns": f.mtime_ns, "run": run.id}
            for f in batch
            if f.path not in theirs or theirs[f.path] < f.mtime_ns
        ]
        if rows:
            session.execute(_UPSERT.of(session), rows)
    return both


def _upsert(insert: Callable[..., Any]) -> Any:
    """An upsert of a row for each file."""
    statement = insert(_FILES)
    new = {name: statement.excluded[name] for name in ("size", "mtime_ns", "run")}
    return statement.on_conflict_do_update(index_elements=["source", "path"], set_=new)


_UPSERT = Upsert(_upsert)


def _source(session: Session, name: str, root: str) -> int | None:
    return session.scalar(select(SeenSourceRow.id).where(SeenSourceRow.name == name, SeenSourceRow.root == root))


def _records(session: Session, root: str, rows: Sequence[Any], runs: dict[int, _Run]) -> list[Seen]:
    """Rows as values. `runs` caches runs: there are few, so they are not joined to each file."""
    missing = {row[3] for row in rows} - runs.keys()
    if missing:
        query = select(SeenRunRow.id, SeenRunRow.model, SeenRunRow.job, SeenRunRow.at)
        for run, model, job, at in session.execute(query.where(SeenRunRow.id.in_(missing))):
            runs[run] = (model, job, at)
    records = []
    for path, size, mtime_ns, run in rows:
        model, job, at = runs[run]
        records.append(Seen(root=root, path=path, size=size, mtime_ns=mtime_ns, model=model, job=job, at=at))
    return records


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


def _sweep(session: Session, *, source: int) -> None:
    """Remove runs, and the folder, if no file of them is left."""
    used = select(_FILES.c.run).where(_FILES.c.source == source)
    changed(session, delete(SeenRunRow).where(SeenRunRow.source == source, SeenRunRow.id.not_in(used)))
    left = select(SeenRunRow.id).where(SeenRunRow.source == SeenSourceRow.id).exists()
    changed(session, delete(SeenSourceRow).where(SeenSourceRow.id == source, ~left))
