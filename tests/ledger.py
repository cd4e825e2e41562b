"""What stands for the store's table of publications, in files, so that killed processes leave it behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from nimble_jobs.data import Staging
from nimble_jobs.job import Publication
from nimble_jobs.spec.model import OutputSpec


class Book:
    """One ledger for all outputs beside each other; it lies beside their folder, at all of which tests look."""

    def __init__(self, beside: Path) -> None:
        self.home = beside.with_name(f"{beside.name}.ledger")
        self.before: dict[str, dict[str, Any]] = {}  # outputs of jobs that an earlier version ran

    def note(self, publication: Publication, attempt: int) -> None:
        assert attempt > 0
        self.home.mkdir(exist_ok=True)
        (self.home / publication.token).write_text(json.dumps(dataclasses.asdict(publication)))

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
    book = ledger or Book(output.path.parent)
    return Staging(output, job_id, attempt, ledger=book, basis=basis, decoded_by=decoded_by)
