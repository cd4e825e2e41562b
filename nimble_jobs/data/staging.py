"""Where one attempt of a job writes: a folder beside the output path, whose finished shards later attempts take over.

    .NAME.JOB/attempt-2/part-00000.parquet     what will be published, as it will be published
    .NAME.JOB/shards-2/00000.json              one sheet a finished shard: its files with their SHA-256, its bad records

A shard is finished once its sheet is there. Attempts share no file that anybody writes to, so a stale attempt that is
still alive harms nobody; when a newer one has cleared its folder away, its next write raises FencedOut.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nimble_jobs.data import publish as publication
from nimble_jobs.data import writers
from nimble_jobs.data.files import link_or_copy, remove_tree, reported, sha256_of, write_file
from nimble_jobs.data.hidden import probe_of, staging_root
from nimble_jobs.data.publish import MANIFEST, FileEntry, Ledger
from nimble_jobs.data.records import BadRecord
from nimble_jobs.data.shards import Shard
from nimble_jobs.errors import DataError, FencedOut
from nimble_jobs.regular import NotRegular, read_regular
from nimble_jobs.spec.model import OutputSpec
from nimble_jobs.whole import sync_path

ERRORS = "errors.jsonl"
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class Staging:
    """The unpublished output of one attempt.

    `basis` stands for everything that decides the output (spec, input, weights): shards and published folders of
    another basis are not taken over. `finished` holds the outputs when the path already has what this job would
    publish: there is nothing left to do then but to record them. `done` maps finished shards to their sheets. Where
    a model carries something from shard to shard none is taken over: `begun_again` says what it carries. `decoded_by`
    names what decodes pictures, `decoded_before` what else decoded those of shards that were not taken over.
    """

    def __init__(
        self,
        output: OutputSpec,
        job_id: str,
        attempt: int,
        *,
        ledger: Ledger,
        basis: str = "",
        decoded_by: str | None = None,
    ) -> None:
        if not _PLAIN.fullmatch(job_id):
            raise DataError(f"job id {job_id!r} cannot be part of a folder name")
        self._output = output
        self._job_id = job_id
        self._attempt = attempt
        self._basis = basis
        self._decoded_by = decoded_by
        self._ledger = ledger
        self._root = staging_root(output.path, job_id)
        self._folder = self._root / f"attempt-{attempt}"
        self._sheets = self._root / f"shards-{attempt}"
        self._extra: list[str] = []
        self._unsynced: set[str] = set()  # files that may not be on the disk yet
        self._root_synced = False
        self.done: dict[int, Shard] = {}
        self.begun_again: str | None = None
        self.decoded_before: str | None = None
        self.finished = publication.adoptable(output, job_id, basis, ledger)
        if self.finished is not None:
            return
        check_path(output, ledger, job_id)
        with reported(output.path.parent):
            fresh = _made(self._root)
        with reported(self._folder):
            self._folder.mkdir(exist_ok=True)
            self._sheets.mkdir(exist_ok=True)
            if not fresh:
                self._adopt()

    @property
    def bad(self) -> list[BadRecord]:
        """Bad records of all finished shards, in input order."""
        return sorted((b for s in self.done.values() for b in s.bad), key=lambda b: b.index)

    @property
    def records(self) -> int:
        """Good records of all finished shards."""
        return sum(s.records for s in self.done.values())

    def write_shard(
        self,
        index: int,
        columns: writers.Columns,
        bad: Sequence[BadRecord] = (),
        *,
        carries: str | None = None,
        last: bool = False,
    ) -> Shard:
        """Writes one shard durably; without columns, only its bad records. `carries` names what the model carries from
        it to the next one.

        The `last` one before publication is left for that to sync, which saves a small job half of its syncs: a killed
        process loses nothing, and after a power failure digests tell whether the shard must be written again.
        Raises DataError when it cannot be written, FencedOut when a newer attempt took over.
        """
        entries = []
        count = writers.records(columns)
        encoded = writers.encode(self._output.format, columns) if count else {}
        with self._writing():
            for suffix, data in encoded.items():
                name = f"part-{index:05d}{suffix}"
                write_file(self._folder / name, data, sync=not last)
                if last:
                    self._unsynced.add(name)
                digest = hashlib.sha256(data).hexdigest()
                entries.append(FileEntry(name=name, sha256=digest, bytes=len(data), records=count))
            if not last:
                sync_path(self._folder)
            shard = Shard(
                index=index,
                basis=self._basis,
                records=count,
                files=tuple(entries),
                bad=tuple(bad),
                carries=carries,
                decoded_by=self._decoded_by,
            )
            self._write_sheet(shard, sync=not last)
        self.done[index] = shard
        return shard

    def file(self, name: str) -> Path:
        """A path to write a file to that is published with the rest."""
        if not _PLAIN.fullmatch(name) or name.startswith("part-") or name in (MANIFEST, ERRORS):
            raise DataError(f"output: {name!r} cannot be published; expected a plain file name not used otherwise")
        if name not in self._extra:
            self._extra.append(name)
        return self._folder / name

    def publish(self, summary: dict[str, Any], *, shards: int | None = None) -> dict[str, Any]:
        """Puts the whole folder at the output path in one step and returns {path, files, records, bad, bytes}.

        May be called again, also by another attempt, after a crash at any point. `shards` is how many there must be.
        Raises OutputExists as `if_exists` says, FencedOut when a newer attempt took over, DataError when a shard is
        missing or nothing can be written.
        """
        self.finished = self.finished or publication.adoptable(self._output, self._job_id, self._basis, self._ledger)
        if self.finished is None:
            wanted = max(self.done, default=-1) + 1 if shards is None else shards
            if sorted(self.done) != list(range(wanted)):
                held = f"{len(self.done)} shards were written"
                raise DataError(f"{self._output.path}: {held}; expected {wanted}, numbered from 0")
            with self._writing():
                manifest = self._complete(summary)
                self.finished = publication.publish(self._output, self._folder, manifest, self._ledger)
        self._clear()
        return self.finished

    def discard(self) -> None:
        """Removes what this attempt and earlier ones staged."""
        with reported(self._root):
            publication.restore(self._output.path, self._root)
        self._clear()

    def _complete(self, summary: dict[str, Any]) -> dict[str, Any]:
        entries = [f for _, shard in sorted(self.done.items()) for f in shard.files]
        for name in sorted(self._unsynced):
            sync_path(self._folder / name)
        bad = self.bad
        if bad:
            shown = (dataclasses.replace(b, id=writers.valid(b.id), reason=writers.valid(b.reason)) for b in bad)
            data = "".join(json.dumps(dataclasses.asdict(b), ensure_ascii=False) + "\n" for b in shown).encode()
            write_file(self._folder / ERRORS, data)
            digest = hashlib.sha256(data).hexdigest()
            entries.append(FileEntry(name=ERRORS, sha256=digest, bytes=len(data), records=len(bad)))
        for name in self._extra:
            path = self._folder / name
            sync_path(path)
            entries.append(FileEntry(name=name, sha256=sha256_of(path), bytes=path.stat().st_size, records=None))
        manifest = publication.manifest(
            job_id=self._job_id,
            attempt=self._attempt,
            basis=self._basis,
            entries=entries,
            records=self.records,
            bad=len(bad),
            summary=summary,
        )
        raw = json.dumps(manifest, indent=1, sort_keys=True).encode()
        write_file(self._folder / MANIFEST, raw)
        known = {e.name for e in entries} | {MANIFEST}
        for stray in self._folder.iterdir():
            if stray.name not in known:
                remove_tree(stray)
        sync_path(self._folder)
        self._ledger.note(publication.publication(self._output, self._folder, manifest, raw), self._attempt)
        return manifest

    def _adopt(self) -> None:
        """Takes over finished shards, the newest attempt's first. One that is damaged, or of another basis, is left to
        be redone; so is every one where the model carries something from one to the next.
        """
        found = list(self._sheets_found())
        self.begun_again = next((shard.carries for shard, _ in found if shard.carries is not None), None)
        for shard, source in found if self.begun_again is None else ():
            if shard.index not in self.done:
                try:
                    self._take(shard, source)
                except (ValueError, FileNotFoundError, NotRegular):
                    continue  # damaged, or cleared away by the attempt that it belongs to: written again

    def _sheets_found(self) -> Iterator[tuple[Shard, Path]]:
        """Sheets of finished shards of this basis, the newest attempt's first, and where their files are."""
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
                    yield shard, self._root / sheets.name.replace("shards", "attempt")

    def _take(self, shard: Shard, source: Path) -> None:
        for entry in shard.files:
            own = self._folder / entry.name
            if source != self._folder:
                link_or_copy(source / entry.name, own)
            if sha256_of(own) != entry.sha256:  # of the linked file: its owner may replace, but never change it
                own.unlink()
                raise ValueError("not what was written")
            self._unsynced.add(entry.name)  # it may have been the last one of an attempt that was killed
        if source != self._folder:
            sync_path(self._folder)
            self._write_sheet(shard)
        self.done[shard.index] = shard

    def _write_sheet(self, shard: Shard, *, sync: bool = True) -> None:
        write_file(self._sheets / f"{shard.index:05d}.json", shard.to_bytes(), sync=sync)
        if sync:
            sync_path(self._sheets)
            if not self._root_synced:
                sync_path(self._root)
                sync_path(self._root.parent)
                self._root_synced = True

    def _attempts(self, kind: str) -> list[tuple[int, Path]]:
        """Folders of this attempt and earlier ones. Those of newer attempts are not ours to touch."""
        found = []
        for path in self._root.glob(f"{kind}-*"):
            number = path.name.partition("-")[2]
            if number.isdigit() and int(number) <= self._attempt:
                found.append((int(number), path))
        return found

    def _clear(self) -> None:
        with reported(self._root):
            if self._cleared_at_once():
                return
            for kind in ("attempt", "shards", "old"):
                for _, path in self._attempts(kind):
                    publication.remove(path, self._job_id)
            try:
                self._root.rmdir()
            except OSError:  # gone already, or a newer attempt is at work
                return

    def _cleared_at_once(self) -> bool:
        """After a publication nothing is left, mostly, but this attempt's own sheets. False where there is more."""
        try:
            for index in self.done:
                (self._sheets / f"{index:05d}.json").unlink()
            self._sheets.rmdir()
            self._root.rmdir()
        except OSError:
            return False
        return True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Tells a folder that somebody removed, a newer attempt most likely, from any other trouble."""
        try:
            with reported(self._folder):
                yield
        except DataError as e:
            if isinstance(e.__cause__, FileNotFoundError) and not self._folder.exists():
                raise FencedOut(f"{self._folder}: was removed while this attempt wrote to it") from e
            raise


def check_writable(output: OutputSpec, ledger: Ledger, job_id: str = "") -> None:
    """As `check_path`; and raises DataError when nothing can be written beside the output path."""
    check_path(output, ledger, job_id)
    with reported(output.path.parent):
        probe = probe_of(output.path, job_id)
        probe.touch()
        probe.unlink(missing_ok=True)


def check_path(output: OutputSpec, ledger: Ledger, job_id: str = "") -> None:
    """Raises OutputExists when the output path is taken, DataError when it cannot be one. Makes the parent folder."""
    with reported(output.path.parent):
        publication.check_apart(output, ledger)
        publication.check_free(output, job_id, ledger)
        output.path.parent.mkdir(parents=True, exist_ok=True)


def _made(folder: Path) -> bool:
    """Makes a folder; False where it was there."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
