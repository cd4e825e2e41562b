"""Folders that this store's jobs published, and the secrets with which attempts seal the manifests of such folders.

A manifest is trusted only if it is recorded here, or if one of these secrets made its token.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Table, exists, select
from sqlalchemy.orm import Session

from nimble_jobs.errors import FencedOut
from nimble_jobs.job import JobState, Publication, Sealer
from nimble_jobs.store.changes import run
from nimble_jobs.store.database import Database
from nimble_jobs.store.records import load_object
from nimble_jobs.store.tables import JobRow, PublicationRow
from nimble_jobs.store.transitions import ATTEMPT_CHANGED, ATTEMPTS, JOBS, MINE
from nimble_jobs.store.upsert import Upsert

_TABLE = cast(Table, PublicationRow.__table__)
_BOTH = JOBS.join(ATTEMPTS, (ATTEMPTS.c.job == JOBS.c.id) & (ATTEMPTS.c.number == JOBS.c.attempt))
_KEY = select(ATTEMPTS.c.seal).select_from(_BOTH).where(*MINE)
_LATE_KEY = ATTEMPT_CHANGED.where(ATTEMPTS.c.seal.is_(None))


class Publications:
    """The table of publications. Rows outlive their jobs, as the published folders do."""

    def __init__(self, database: Database, home: Path) -> None:
        self._db = database
        self.home = home

    def key(self, job_id: str, attempt: int) -> str:
        """The secret with which this attempt seals its manifest. Raises FencedOut if another attempt owns the job.

        It is only a look, which waits for no disk: the claim has committed the secret.
        """
        mine = {"of_job": job_id, "of_attempt": attempt}
        row = self._db.look(lambda connection: connection.execute(_KEY, mine).one_or_none())
        if row is None:
            raise FencedOut
        if row.seal is None:  # a process of an earlier version claimed the job
            late = secrets.token_hex(16)
            self._db.write(lambda session: run(session, _LATE_KEY, **mine, seal=late), beside=True)
            return self.key(job_id, attempt)
        return str(row.seal)

    def sealer(self, job_id: str, attempt: int) -> Sealer | None:
        """What an attempt seals manifests with, also after its end; None if it is unknown or has no secret."""
        query = select(ATTEMPTS.c.seal, JOBS.c.output).join(JOBS, ATTEMPTS.c.job == JOBS.c.id)
        query = query.where(ATTEMPTS.c.job == job_id, ATTEMPTS.c.number == attempt)
        row = self._db.read(lambda session: session.execute(query).one_or_none())
        if row is None or row.seal is None or row.output is None:
            return None
        return Sealer(key=row.seal, output=row.output)

    def keep(self, publication: Publication) -> None:
        """Record a publication durably, unless that was done before. For jobs that do not record it with their end."""
        if self.find(publication.token) is None:
            self._db.write(lambda session: record_publication(session, publication, now=time.time()), beside=True)

    def find(self, token: str) -> Publication | None:
        """The recorded publication whose manifest carries this token."""
        row = self._db.read(lambda session: session.get(PublicationRow, token))
        if row is None:
            return None
        return Publication(
            token=row.token, job_id=row.job, path=row.path, folder=row.folder, manifest_sha256=row.manifest_sha256
        )

    def outputs(self, job_id: str) -> dict[str, Any] | None:
        """The output facts of a succeeded job without a recorded publication, as earlier versions left them."""
        noted = exists().where(PublicationRow.job == JobRow.id)
        query = select(JobRow.outputs).where(JobRow.id == job_id, JobRow.state == JobState.SUCCEEDED.value, ~noted)
        stored = self._db.read(lambda session: session.scalar(query))
        return None if stored is None else load_object(stored)


def record_publication(session: Session, publication: Publication, *, now: float) -> None:
    """Add a publication to the transaction, unless it is recorded: with `if_exists: resume`, jobs share a folder."""
    run(
        session,
        _ADD.of(session),
        token=publication.token,
        job=publication.job_id,
        path=publication.path,
        folder=publication.folder,
        manifest_sha256=publication.manifest_sha256,
        at=now,
    )


def _added(insert: Callable[..., Any]) -> Any:
    return insert(_TABLE).on_conflict_do_nothing(index_elements=["token"])


_ADD = Upsert(_added)
