"""Folders that this store's jobs published. A manifest in a folder is trusted only if it is recorded here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Table, bindparam, exists, insert, select
from sqlalchemy.orm import Session

from nimble_jobs.errors import FencedOut
from nimble_jobs.job import JobState, Publication
from nimble_jobs.store.changes import run
from nimble_jobs.store.database import Database
from nimble_jobs.store.records import load_object
from nimble_jobs.store.tables import JobRow, PublicationRow
from nimble_jobs.store.transitions import JOBS, MINE

_TABLE = cast(Table, PublicationRow.__table__)
_VALUES = {column.name: bindparam(f"its_{column.name}", type_=column.type) for column in _TABLE.c}
_NOTED = (
    insert(_TABLE)
    .from_select(list(_VALUES), select(*_VALUES.values()).select_from(JOBS).where(*MINE).with_for_update())
    .returning(_TABLE.c.token)
)


class Publications:
    """The table of publications. Rows outlive their jobs, as the published folders do."""

    def __init__(self, database: Database, home: Path) -> None:
        self._db = database
        self.home = home

    def note(self, publication: Publication, attempt: int) -> None:
        """Record it durably before its folder takes its place. Raises FencedOut if another attempt owns the job."""

        def work(session: Session) -> None:
            noted = run(
                session,
                _NOTED,
                of_job=publication.job_id,
                of_attempt=attempt,
                its_token=publication.token,
                its_job=publication.job_id,
                its_path=publication.path,
                its_folder=publication.folder,
                its_manifest_sha256=publication.manifest_sha256,
                its_at=time.time(),
            )
            if noted.first() is None:
                raise FencedOut

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
