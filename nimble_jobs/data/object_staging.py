"""The unpublished output of one attempt in an object store, which has no renames. Only its manifest makes it an output.

    FOLDER/manifest.json                         names the files of the output; written last, on a condition
    FOLDER/JOB-2-1f0c77ab/part-00000.parquet     files that one attempt, or one member of it, wrote
    FOLDER/JOB-2-1f0c77ab/.shards/00000.json     a sheet for each of its finished shards

Nobody else writes below a name of one's own, so a stale attempt that still runs does no harm. The manifest may name
files of several attempts: shards are taken over where they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from nimble_jobs.data import publish as publication
from nimble_jobs.data import writers
from nimble_jobs.data.member_staging import Finish, finish_member, value_of
from nimble_jobs.data.object_manifest import Manifests
from nimble_jobs.data.object_runs import NOTE, notes, run_of, unpublished
from nimble_jobs.data.publish import MANIFEST, FileEntry, Found
from nimble_jobs.data.records import NO_COUNTS, BadRecord, ShardCounts
from nimble_jobs.data.seals import Ledger
from nimble_jobs.data.shard_files import encoded
from nimble_jobs.data.shards import Shard
from nimble_jobs.data.unpublished import ERRORS, Unpublished
from nimble_jobs.errors import DataError, FencedOut, NotFound, OutputExists
from nimble_jobs.objects import Objects, Stat, Through, Unmet, once
from nimble_jobs.spec.model import OutputSpec

_SHEETS = ".shards/"
_TRIES = 16  # tries, each after somebody else published there


class ObjectShards:
    """Writes shards below a name of its own: their files, then a sheet for each."""

    def __init__(
        self,
        objects: Objects,
        job_id: str,
        attempt: int,
        *,
        format_: str,
        basis: str,
        decoded_by: str | None = None,
    ) -> None:
        self.run = f"{job_id}-{attempt}-{secrets.token_hex(4)}"
        self._objects = objects
        self._format, self._basis, self._decoded_by = format_, basis, decoded_by

    def write(
        self,
        index: int,
        columns: writers.Columns,
        bad: Sequence[BadRecord] = (),
        *,
        carries: str | None = None,
        counts: ShardCounts = NO_COUNTS,
    ) -> Shard:
        """Write one shard; without columns, only its bad records. Raises DataError, ObjectTrouble."""
        entries = []
        for entry, data in encoded(self._format, index, columns):
            name = f"{self.run}/{entry.name}"
            self._objects.write(name, data)
            entries.append(dataclasses.replace(entry, name=name))
        shard = Shard(
            index=index,
            basis=self._basis,
            records=writers.records(columns),
            files=tuple(entries),
            bad=tuple(bad),
            carries=carries,
            decoded_by=self._decoded_by,
            **vars(counts),
            forms={name: writers.form_of(column) for name, column in columns.items()},
        )
        self._objects.write(f"{self.run}/{_SHEETS}{index:05d}.json", shard.to_bytes())
        return shard


class ObjectStaging(Unpublished):
    """As `Staging`, for an output in an object store."""

    def __init__(
        self,
        output: OutputSpec,
        job_id: str,
        attempt: int,
        *,
        ledger: Ledger,
        basis: str = "",
        decoded_by: str | None = None,
        error: Callable[[BadRecord], object] = dataclasses.asdict,
        through: Through = once,
    ) -> None:
        """`through` makes each request, and may repeat it. Raises OutputExists, DataError, ObjectTrouble."""
        super().__init__(output, job_id, attempt, ledger=ledger, basis=basis, decoded_by=decoded_by, error=error)
        self._objects = Objects(str(output.path), through)
        self._files = ObjectShards(
            self._objects, job_id, attempt, format_=output.format, basis=basis, decoded_by=decoded_by
        )
        self._manifests = Manifests(self._objects, ledger)
        self._replaced = set[str]()  # files of outputs that this one replaces
        existing, _ = self._find()
        if self.finished is None:
            names = self._objects.list()
            self._check_free(existing, names)
            self._objects.write(f"{self._files.run}/{NOTE}", b"{}")  # what cannot be written is known before the work
            self._adopt(names)

    @property
    def troubles(self) -> int:
        """Requests that the store did not answer."""
        return self._objects.troubles

    def write_shard(
        self,
        index: int,
        columns: writers.Columns,
        bad: Sequence[BadRecord] = (),
        *,
        carries: str | None = None,
        counts: ShardCounts = NO_COUNTS,
        last: bool = False,
    ) -> Shard:
        """Write one shard; without columns, only its bad records. Raises DataError, ObjectTrouble."""
        self.done[index] = shard = self._files.write(index, columns, bad, carries=carries, counts=counts)
        return shard

    def publish(self, summary: dict[str, Any], *, shards: int | None = None) -> dict[str, Any]:
        """Write the manifest, which makes the files an output; return {path, files, records, bad, bytes}.

        After a crash or an answer that did not come it may be called again, also by another attempt. Raises
        OutputExists as `if_exists` says, FencedOut, DataError if a shard is missing, ObjectTrouble.
        """
        if self.finished is None:
            self._find()
        if self.finished is None:
            self.check_complete(shards)
            self._publish(summary)
        self._tidy()
        assert self.finished is not None
        return self.finished

    def note(self, value: Any) -> None:
        """Keep a JSON-able value that later attempts of the same basis are to find by `noted`."""
        data = json.dumps({"basis": self._basis, "value": value}).encode()
        self._objects.write(f"{self._files.run}/{NOTE}", data)

    def noted(self) -> Any:
        """What the newest attempt of the same basis has noted; None if none has."""
        found = notes(self._objects, self._runs(self._objects.list()))
        return next((note.value for note in found if note.basis == self._basis), None)

    def adopt(self, *, last: bool = False) -> None:
        """Take over finished shards of this attempt's members and of earlier attempts, the newest first."""
        self._adopt(self._objects.list())

    def discard(self) -> None:
        """Remove what this attempt and earlier ones wrote and did not publish."""
        self._clear()

    def _adopt(self, names: dict[str, Stat]) -> None:
        runs = self._runs(names)
        sheets = []
        for name in sorted((n for n in runs if f"/{_SHEETS}" in n), key=lambda n: (-runs[n], n)):
            try:
                shard = Shard.from_bytes(self._objects.read(name))
            except (ValueError, TypeError, KeyError, NotFound):
                continue  # unreadable
            if shard.basis == self._basis:
                sheets.append(shard)
            elif shard.decoded_by not in (None, self._decoded_by):
                self.decoded_before = shard.decoded_by
        self.begun_again = next((shard.carries for shard in sheets if shard.carries is not None), None)
        for shard in sheets if self.begun_again is None else ():
            if shard.index not in self.done and all(self._sound(entry) for entry in shard.files):
                self.done[shard.index] = shard

    def _sound(self, entry: FileEntry) -> bool:
        try:
            return hashlib.sha256(self._objects.read(entry.name)).hexdigest() == entry.sha256
        except NotFound:
            return False

    def _runs(self, names: dict[str, Stat]) -> dict[str, int]:
        """Objects of this attempt and earlier ones, with the number of their attempt."""
        runs = {}
        for name in names:
            run = run_of(name)
            if run is not None and run[0] == self._job_id and run[1] <= self._attempt:
                runs[name] = run[1]
        return runs

    def _publish(self, summary: dict[str, Any]) -> None:
        entries = [f for _, shard in sorted(self.done.items()) for f in shard.files]
        if (lines := self.error_lines()) is not None:
            entry = dataclasses.replace(lines[0], name=f"{self._files.run}/{ERRORS}")
            self._objects.write(entry.name, lines[1])
            entries.append(entry)
        complete, raw = self.sealed(self._objects.address, entries, summary)
        for _ in range(_TRIES):
            existing, version = self._find()
            if self.finished is not None:  # another attempt of this job was first, or an answer did not arrive
                return
            self._check_free(existing, self._objects.list())
            if existing is not None:
                self._replaced.update(str(file["name"]) for file in existing.manifest["files"])
            try:
                if existing is None:
                    self._objects.create(MANIFEST, raw)
                else:
                    self._objects.replace(MANIFEST, raw, version)
            except Unmet:  # by another one, or by a request of ours whose answer did not come
                continue
            break
        else:
            raise OutputExists(f"{self._objects.address}: others keep publishing to it; choose another output.path")
        if (gone := self._manifests.withdrawn(complete.manifest)) is not None:
            raise FencedOut(f"{self._objects.address}/{gone} was removed while this attempt published")
        self.take(self._objects.address, complete)

    def _find(self) -> tuple[Found | None, str]:
        """The manifest at the address, with its version. If it is this job's output, the job is `finished`."""
        existing, version = self._manifests.find()
        if existing is None or not self._adoptable(existing):
            return existing, version
        if self._manifests.withdrawn(existing.manifest) is not None:
            return self._find()
        self.take(self._objects.address, existing)
        return existing, version

    def _adoptable(self, existing: Found) -> bool:
        """Whether this job wrote the existing manifest, or, under `if_exists: resume`, it is of the same basis."""
        if existing.doubt is not None:
            return False
        same = self._output.if_exists == "resume" and self._basis != "" and existing.manifest["basis"] == self._basis
        return existing.job_id == self._job_id or same

    def _check_free(self, existing: Found | None, names: dict[str, Stat]) -> None:
        """Raises OutputExists if `if_exists` forbids publishing. What unpublished attempts wrote is not in the way."""
        address, how = self._objects.address, self._output.if_exists
        others = [name for name in names if name != MANIFEST and run_of(name) is None]
        if existing is None and not others and MANIFEST not in names:
            return
        if how == "fail":
            raise OutputExists(
                f"{address} exists already; choose another output.path, or set output.if_exists: replace"
            )
        if how == "resume":
            raise OutputExists(f"{address} holds the output of another job; choose another output.path")
        if refusal := publication.why_kept(existing, others):
            raise OutputExists(f"{address}: {refusal}")

    def _tidy(self) -> None:
        """Remove the output that this one replaced, and what this attempt and earlier ones wrote and did not publish.

        The output is there, so a store that refuses fails nothing; `left_behind` says so.
        """
        assert self.finished is not None
        try:
            self._clear()
            self._objects.remove(self._replaced.difference(self.finished["files"]))
        except DataError as e:
            self.left_behind = str(e)

    def _clear(self) -> None:
        names = self._objects.list()
        self._objects.remove(unpublished(self._objects, names, self._job_id, attempt=self._attempt))


class MemberObjects:
    """As `MemberStaging`, for an output in an object store."""

    def __init__(
        self,
        output: OutputSpec,
        job_id: str,
        attempt: int,
        *,
        finish: Finish,
        basis: str,
        decoded_by: str | None = None,
        through: Through = once,
    ) -> None:
        self._objects = Objects(str(output.path), through)
        self._files = ObjectShards(
            self._objects, job_id, attempt, format_=output.format, basis=basis, decoded_by=decoded_by
        )
        self._job_id, self._attempt, self._basis, self._finish = job_id, attempt, basis, finish
        self.done: dict[int, Shard] = {}

    @property
    def troubles(self) -> int:
        """Requests that the store did not answer."""
        return self._objects.troubles

    def noted(self) -> Any:
        """As `MemberStaging.noted`. Raises OutOfStep, DataError, ObjectTrouble."""
        runs = {name: self._attempt for name in self._objects.list() if run_of(name) == (self._job_id, self._attempt)}
        return value_of(next(notes(self._objects, runs), None), self._basis, where=self._objects.address)

    def write_shard(
        self,
        index: int,
        columns: writers.Columns,
        bad: Sequence[BadRecord] = (),
        *,
        carries: str | None = None,
        counts: ShardCounts = NO_COUNTS,
        last: bool = False,
    ) -> Shard:
        """Write one shard, and tell `finish`. Raises ModelError, DataError, ObjectTrouble."""
        return finish_member(
            lambda: self._files.write(index, columns, bad, counts=counts),
            self._finish,
            carries,
        )
