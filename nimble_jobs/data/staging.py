"""The staging folder of one attempt, beside the output path. Later attempts take over its finished shards.

    .NAME.JOB/attempt-2/part-00000.parquet     the files to publish, in their final form
    .NAME.JOB/shards-2/00000.json              a sheet per finished shard: its files with their SHA-256, its bad records
    .NAME.JOB/shards-2/note                    what a later attempt must do as this one did
    .NAME.JOB/shards-2/listing                 the folder of pictures as this attempt found it, for other members
    .NAME.JOB/attempt-2.1-x8fkw2pa/…           the same of a member, if several devices work on the job
    .NAME.JOB/attempt-2.1-x8fkw2pa.lead/…      the files to publish, of a member that took the lead from another one

A shard is finished once its sheet exists. Attempts share no writable file, so a stale attempt that still runs does no
harm, nor does a member that lost the lead. Once another one has removed its folder, its next write raises FencedOut.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nimble_jobs.data import publish as publication
from nimble_jobs.data import writers
from nimble_jobs.data.files import link_or_copy, remove_tree, reported, sha256_of, sync_all, write_file
from nimble_jobs.data.hidden import probe_of, staging_root
from nimble_jobs.data.publish import MANIFEST, FileEntry, Found
from nimble_jobs.data.records import NO_COUNTS, BadRecord, ShardCounts
from nimble_jobs.data.seals import Ledger, resolved
from nimble_jobs.data.shard_files import NOTE, ShardFiles, read_note
from nimble_jobs.data.shards import Shard
from nimble_jobs.data.shared_listing import LISTING
from nimble_jobs.data.stamps import Stamps
from nimble_jobs.data.unpublished import ERRORS, Unpublished
from nimble_jobs.errors import DataError
from nimble_jobs.regular import NotRegular, read_regular
from nimble_jobs.spec.model import OutputSpec
from nimble_jobs.whole import sync_path

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class Staging(Unpublished):
    """The unpublished output of one attempt in a folder of its own, which becomes the output by a rename."""

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
        successor: str | None = None,
    ) -> None:
        """`successor`: the member that took the lead of this attempt from another one, which may still write."""
        super().__init__(output, job_id, attempt, ledger=ledger, basis=basis, decoded_by=decoded_by, error=error)
        if not _PLAIN.fullmatch(job_id):
            raise DataError(f"job id {job_id!r} cannot be part of a folder name")
        self._root = staging_root(output.folder, job_id)
        name = str(attempt) if successor is None else f"{attempt}.{successor}.lead"
        self._files = ShardFiles(self._root, name, format_=output.format, basis=basis, decoded_by=decoded_by)
        self._folder, self._sheets = self._files.folder, self._files.sheets
        self._extra: list[str] = []
        self._unsynced: set[str] = set()  # files that may not be durable yet
        if self._adopted():
            return
        check_path(output, ledger, job_id)
        with reported(output.folder.parent):
            fresh = _made(self._root)
        with reported(self._folder):
            self._files.make()
            if not fresh:
                self.adopt()

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
        """Write one shard durably; without columns, only its bad records. `carries` names state that the model carries
        to the next shard.

        The `last` shard becomes durable only when `publish` syncs the folder, which saves a small job half of its
        syncs. A killed process loses nothing, and after a power failure digests tell whether the shard must be
        written again. Threads that synced its files meanwhile would take Python's lock too often to save time.
        Raises DataError if it cannot be written, FencedOut if a newer attempt took over.
        """
        shard = self._files.write(index, columns, bad, carries=carries, counts=counts, sync=not last)
        if last:
            self._unsynced.update(entry.name for entry in shard.files)
        self.done[index] = shard
        return shard

    def file(self, name: str) -> Path:
        """The path for an additional file that is published with the rest."""
        if not _PLAIN.fullmatch(name) or name.startswith("part-") or name in (MANIFEST, ERRORS):
            raise DataError(f"output: {name!r} cannot be published; expected a plain file name that is not in use")
        if name not in self._extra:
            self._extra.append(name)
        return self._folder / name

    def publish(self, summary: dict[str, Any], *, shards: int | None = None) -> dict[str, Any]:
        """Publish the whole folder at the output path in one step; return {path, files, records, bad, bytes}.

        After a crash at any point it may be called again, also by another attempt. `shards` is the required number.
        Raises OutputExists as `if_exists` says, FencedOut if a newer attempt took over, DataError if a shard is missing
        or nothing can be written.
        """
        if self.finished is None and not self._adopted():
            self.check_complete(shards)
            with self._files.writing():
                complete = self._complete(summary)
                self.take(self._output.folder, publication.publish(self._output, self._folder, complete, self._ledger))
        self._clear()
        assert self.finished is not None
        return self.finished

    def note(self, value: Any) -> None:
        """Keep a JSON-able value that later attempts of the same basis are to find by `noted`. Raises DataError."""
        self._files.note(value)

    def noted(self) -> Any:
        """What the newest attempt of the same basis has noted; None if none has."""
        for _, sheets in sorted(self._attempts("shards"), reverse=True):
            found = read_note(sheets)
            if found is not None and found.basis == self._basis:
                return found.value
        return None

    def share(self, listing: Stamps) -> None:
        """Leave a listing of pictures for the job's other members, which find it by `listing_for_member`. Raises
        DataError, FencedOut.
        """
        self._files.share(listing)

    def discard(self) -> None:
        """Remove the staging folders of this attempt and earlier ones."""
        with reported(self._root):
            publication.restore(self._output.folder, self._root)
        self._clear()

    def _adopted(self) -> bool:
        """Whether the path has what this job would publish; if so, it is taken as finished."""
        there = publication.adoptable(self._output, self._job_id, self._basis, self._ledger)
        if there is not None:
            self.take(self._output.folder, there)
        return there is not None

    def _complete(self, summary: dict[str, Any]) -> Found:
        entries = [f for _, shard in sorted(self.done.items()) for f in shard.files]
        if (lines := self.error_lines()) is not None:
            write_file(self._folder / ERRORS, lines[1])
            entries.append(lines[0])
        for name in self._extra:
            path = self._folder / name
            sync_path(path)
            entries.append(FileEntry(name=name, sha256=sha256_of(path), bytes=path.stat().st_size, records=None))
        place, folder = resolved(self._output.folder), publication.folder_id(self._folder)
        complete, raw = self.sealed(place, entries, summary, folder=folder)
        write_file(self._folder / MANIFEST, raw, sync=False)
        known = {e.name for e in entries} | {MANIFEST}
        for stray in self._folder.iterdir():
            if stray.name not in known:
                remove_tree(stray)
        sync_all([*(self._folder / name for name in (*sorted(self._unsynced), MANIFEST)), self._folder])
        return complete

    def adopt(self, *, last: bool = False) -> None:
        """Take over finished shards, the newest attempt's first. Damaged shards and shards of another basis are redone,
        and so are all shards if the model carries state between them. If publication follows, this is the `last` time:
        the shards need no sheets here then, since a later attempt finds them where they are now.
        """
        sheets = list(self._sheets_found())
        self.begun_again = next((shard.carries for shard, _ in sheets if shard.carries is not None), None)
        for shard, source in sheets if self.begun_again is None else ():
            if shard.index not in self.done:
                try:
                    self._take(shard, source, lasting=not last)
                except (ValueError, FileNotFoundError, NotRegular):
                    continue  # damaged, or removed by its attempt, so it is written again

    def _sheets_found(self) -> Iterator[tuple[Shard, Path]]:
        """Sheets of finished shards of this basis, the newest attempt's first, with the folders of their files."""
        for _, sheets in sorted(self._attempts("shards"), reverse=True):
            for sheet in sorted(sheets.glob("*.json")):
                try:
                    shard = Shard.from_bytes(read_regular(sheet))
                except (ValueError, TypeError, KeyError, FileNotFoundError, NotRegular):
                    continue  # unreadable
                if shard.basis != self._basis:
                    if shard.decoded_by not in (None, self._decoded_by):
                        self.decoded_before = shard.decoded_by
                else:
                    yield shard, self._root / sheets.name.replace("shards", "attempt", 1)

    def _take(self, shard: Shard, source: Path, *, lasting: bool) -> None:
        for entry in shard.files:
            own = self._folder / entry.name
            if source != self._folder:
                link_or_copy(source / entry.name, own)
            if sha256_of(own) != entry.sha256:  # hash of the linked file, which its owner may replace but never change
                own.unlink()
                raise ValueError("its bytes differ from what was written")
            self._unsynced.add(entry.name)  # it may have been the unsynced last shard of a killed attempt
        if source != self._folder and lasting:
            sync_path(self._folder)
            self._files.write_sheet(shard)
        self.done[shard.index] = shard

    def _attempts(self, kind: str) -> list[tuple[int, Path]]:
        """Folders of this attempt and earlier ones. Folders of newer attempts must not be touched."""
        attempts = []
        for path in self._root.glob(f"{kind}-*"):
            number = path.name.partition("-")[2].partition(".")[0]
            if number.isdigit() and int(number) <= self._attempt:
                attempts.append((int(number), path))
        return attempts

    def _clear(self) -> None:
        with reported(self._root):
            if self._cleared_at_once():
                return
            for kind in ("attempt", "shards", "old"):
                for _, path in self._attempts(kind):
                    publication.remove(path, self._job_id)
            try:
                self._root.rmdir()
            except OSError:  # gone already, or a newer attempt is using it
                return

    def _cleared_at_once(self) -> bool:
        """Remove the folder quickly if only this attempt's sheets are left, as is usual. False if there is more."""
        try:
            for index in self.done:
                (self._sheets / f"{index:05d}.json").unlink()
            for name in (NOTE, LISTING):
                (self._sheets / name).unlink(missing_ok=True)
            self._sheets.rmdir()
            self._root.rmdir()
        except OSError:
            return False
        return True


def check_writable(output: OutputSpec, ledger: Ledger, job_id: str = "") -> None:
    """As `check_path`; also raises DataError if nothing can be written beside the output path."""
    check_path(output, ledger, job_id)
    with reported(output.folder.parent):
        probe = probe_of(output.folder, job_id)
        probe.touch()
        probe.unlink(missing_ok=True)


def check_path(output: OutputSpec, ledger: Ledger, job_id: str = "") -> None:
    """Raises OutputExists if the output path is taken, DataError if it is unusable. Makes the parent folder."""
    with reported(output.folder.parent):
        publication.check_apart(output, ledger)
        publication.check_free(output, job_id, ledger)
        output.folder.parent.mkdir(parents=True, exist_ok=True)


def _made(folder: Path) -> bool:
    """Make a folder; False if it existed."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
