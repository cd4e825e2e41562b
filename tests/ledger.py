"""What stands for the store's attempts and publications, in files, so that killed processes leave it behind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

from nimble_jobs.data import Staging
from nimble_jobs.job import Publication, Sealer
from nimble_jobs.spec.model import OutputSpec


class Book:
    """One ledger for all outputs beside each other; it lies beside their folder, at all of which tests look."""

    def __init__(self, beside: Path) -> None:
        self.home = beside.with_name(f"{beside.name}.ledger")
        self.before: dict[str, dict[str, Any]] = {}  # outputs of jobs that an earlier version ran

    def claim(self, job_id: str, attempt: int, output: Path | str) -> Self:
        """What a claim commits."""
        self.home.mkdir(parents=True, exist_ok=True)
        key = hashlib.sha256(f"{self.home} {job_id} {attempt}".encode()).hexdigest()[:32]
        self._commit(f"{job_id}-{attempt}", {"key": key, "output": str(output)})
        return self

    def key(self, job_id: str, attempt: int) -> str:
        sealer = self.sealer(job_id, attempt)
        assert sealer is not None
        return sealer.key

    def sealer(self, job_id: str, attempt: int) -> Sealer | None:
        path = self.home / f"{job_id}-{attempt}"
        return Sealer(**json.loads(path.read_text())) if path.is_file() else None

    def record(self, publication: Publication) -> None:
        """What the end of a job does."""
        self.home.mkdir(parents=True, exist_ok=True)
        self._commit(publication.token, dataclasses.asdict(publication))

    def _commit(self, name: str, row: dict[str, Any]) -> None:
        """In one step: a process that is killed leaves the row before or the new one."""
        new = self.home / f"{name}.{os.getpid()}.new"
        new.write_text(json.dumps(row))
        new.replace(self.home / name)

    def find(self, token: str) -> Publication | None:
        path = self.home / token
        return Publication(**json.loads(path.read_text())) if path.is_file() else None

    def outputs(self, job_id: str) -> dict[str, Any] | None:
        return self.before.get(job_id)


def staged(
    output: OutputSpec,
    job_id: str,
    attempt: int,
    *,
    basis: str = "",
    ledger: Book | None = None,
    decoded_by: str | None = None,
) -> Staging:
    """A `Staging` whose ledger is that of its neighbours."""
    book = ledger or Book(output.folder.parent)
    book.claim(job_id, attempt, output.folder)
    return Staging(output, job_id, attempt, ledger=book, basis=basis, decoded_by=decoded_by)
