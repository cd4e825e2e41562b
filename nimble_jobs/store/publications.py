"""Folders that this store's jobs published. A manifest in a folder is trusted only if it is recorded here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Table, exists, insert, select
from sqlalchemy.orm import Session

from nimble_jobs.errors import FencedOut
from nimble_jobs.job import JobState, Publication
from nimble_jobs.store.changes import run
from nimble_jobs.store.database import Database
from nimble_jobs.store.records import load_object
from nimble_jobs.store.tables import JobRow, PublicationRow
from nimble_jobs.store.transitions import owns

_NOTED = insert(cast(Table, PublicationRow.__table__))


class Publications:
    """The table of publications. Rows outlive their jobs, as the published folders do."""

    def __init__(self, database: Database, home: Path) -> None:
        self._db = database
        self.home = home

    def note(self, publication: Publication, attempt: int) -> None:
        """Record it durably before its folder takes its place. Raises FencedOut if another attempt owns the job."""

        def work(session: Session) -> None:
            if not owns(session, publication.job_id, attempt):
                raise FencedOut
            run(
                session,
                _NOTED,
                token=publication.token,
                job=publication.job_id,
                path=publication.path,
                folder=publication.folder,
                manifest_sha256=publication.manifest_sha256,
                at=time.time(),
            )

        self._db.write(work, beside=True)

    def find(self, token: str) -> Publication | None:
        """The publication whose manifest carries this token."""
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
