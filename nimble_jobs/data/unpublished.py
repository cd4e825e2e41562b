"""What the unpublished output of an attempt has in common, wherever it lies."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nimble_jobs.data import publish as publication
from nimble_jobs.data import writers
from nimble_jobs.data.publish import FileEntry, Found
from nimble_jobs.data.records import BadRecord, NotFinite
from nimble_jobs.data.seals import Ledger, sealed
from nimble_jobs.data.shards import Shard, forms_of
from nimble_jobs.errors import DataError
from nimble_jobs.job import Publication
from nimble_jobs.spec.model import OutputSpec

ERRORS = "errors.jsonl"


class Unpublished:
    """The unpublished output of one attempt.

    `basis` stands for everything that decides the output (spec, input, weights): shards and published folders of
    another basis are not taken over. `finished` holds the outputs when the path already has what this job would
    publish; then only recording them is left to do. `done` maps finished shards to their sheets. If a model carries
    state from shard to shard, no shard is taken over, and `begun_again` says what the model carries. `decoded_by`
    names what decodes pictures, `decoded_before` what decoded the shards that were not taken over for that reason.
    """

    def __init__(
        self,
        output: OutputSpec,
        job_id: str,
        attempt: int,
        *,
        ledger: Ledger,
        basis: str,
        decoded_by: str | None,
        error: Callable[[BadRecord], object],
    ) -> None:
        """`error` makes the value of a bad record's line in the file of errors."""
        self._output = output
        self._job_id = job_id
        self._attempt = attempt
        self._basis = basis
        self._decoded_by = decoded_by
        self._ledger = ledger
        self._error = error
        self.done: dict[int, Shard] = {}
        self.begun_again: str | None = None
        self.decoded_before: str | None = None
        self.finished: dict[str, Any] | None = None
        self.publication: Publication | None = None  # what the end of the job records, once `finished` is set
        self.left_behind: str | None = None  # why files that nobody needs could not be removed

    @property
    def troubles(self) -> int:
        """Requests that an object store did not answer."""
        return 0

    @property
    def bad(self) -> list[BadRecord]:
        """Bad records of all finished shards, in input order."""
        return sorted((b for s in self.done.values() for b in s.bad), key=lambda b: b.index)

    @property
    def records(self) -> int:
        """Good records of all finished shards."""
        return sum(s.records for s in self.done.values())

    @property
    def shortened(self) -> int:
        """Texts of all finished shards that lost tokens."""
        return sum(s.shortened for s in self.done.values())

    @property
    def not_finite(self) -> dict[str, NotFinite]:
        """Records of all finished shards whose output has NaN or infinity, by field."""
        found: dict[str, NotFinite] = {}
        for _, shard in sorted(self.done.items()):
            for name, some in shard.not_finite.items():
                before = found.get(name, NotFinite(records=0, first=some.first))
                found[name] = dataclasses.replace(before, records=before.records + some.records)
        return found

    def check_complete(self, shards: int | None) -> None:
        """Raises DataError unless there are as many shards as required, numbered from 0, and ModelError if their values
        differ in type or shape.
        """
        forms_of(self.done)
        wanted = max(self.done, default=-1) + 1 if shards is None else shards
        if sorted(self.done) != list(range(wanted)):
            held = f"{len(self.done)} shards were written"
            raise DataError(f"{self._output.path}: {held}; expected {wanted}, numbered from 0")

    def error_lines(self) -> tuple[FileEntry, bytes] | None:
        """The file of bad records; None if there are none."""
        if not (bad := self.bad):
            return None
        shown = (dataclasses.replace(b, id=writers.valid(b.id), reason=writers.valid(b.reason)) for b in bad)
        data = "".join(json.dumps(self._error(b), ensure_ascii=False) + "\n" for b in shown).encode()
        digest = hashlib.sha256(data).hexdigest()
        return FileEntry(name=ERRORS, sha256=digest, bytes=len(data), records=len(bad)), data

    def take(self, path: Path | str, there: Found) -> None:
        """Take what is at the path as this job's finished output."""
        self.finished, self.publication = publication.outputs(path, there.manifest), there.publication

    def sealed(
        self, path: str, entries: Sequence[FileEntry], summary: dict[str, Any], *, folder: str = ""
    ) -> tuple[Found, bytes]:
        """The manifest and its bytes, with the seal of this attempt. Raises FencedOut if another one owns the job."""
        key = self._ledger.key(self._job_id, self._attempt)
        manifest, raw = sealed(self._manifest(entries, summary, folder), key)
        return publication.complete(path, manifest, raw), raw

    def _manifest(self, entries: Sequence[FileEntry], summary: dict[str, Any], folder: str) -> dict[str, Any]:
        not_finite = {field: vars(some) for field, some in self.not_finite.items()}
        made = publication.manifest(
            job_id=self._job_id,
            attempt=self._attempt,
            basis=self._basis,
            entries=entries,
            records=self.records,
            bad=len(self.bad),
            summary=summary,
            folder=folder,
        )
        return made | ({"not_finite": not_finite} if not_finite else {})
