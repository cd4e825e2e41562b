"""The files of finished shards in one attempt's folder, and beside them a sheet for each that says what it holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimble_jobs.data import writers
from nimble_jobs.data.files import reported, write_file
from nimble_jobs.data.publish import FileEntry
from nimble_jobs.data.records import NO_COUNTS, BadRecord, ShardCounts
from nimble_jobs.data.shards import Shard
from nimble_jobs.data.shared_listing import LISTING, to_bytes
from nimble_jobs.data.stamps import Stamps
from nimble_jobs.errors import DataError, FencedOut
from nimble_jobs.regular import read_regular
from nimble_jobs.whole import sync_path

NOTE = "note"  # beside the sheets


@dataclass(frozen=True, kw_only=True)
class Note:
    """What an attempt has noted for other processes."""

    basis: str
    value: Any


def read_note(sheets: Path) -> Note | None:
    """The note in a folder of sheets; None if there is none, or if a power failure damaged it."""
    try:
        found = json.loads(read_regular(sheets / NOTE))
        return Note(basis=found["basis"], value=found["value"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def encoded(format_: str, index: int, columns: writers.Columns) -> Iterator[tuple[FileEntry, bytes | memoryview]]:
    """The files of a shard, as the manifest names them, with their bytes; none without records. Raises DataError."""
    count = writers.records(columns)
    for suffix, data in (writers.encode(format_, columns) if count else {}).items():
        digest = hashlib.sha256(data).hexdigest()
        yield FileEntry(name=f"part-{index:05d}{suffix}", sha256=digest, bytes=len(data), records=count), data


class ShardFiles:
    """Writes shards below `root`: their files into `attempt-NAME`, their sheets into `shards-NAME`."""

    def __init__(self, root: Path, name: str, *, format_: str, basis: str, decoded_by: str | None = None) -> None:
        self.folder = root / f"attempt-{name}"
        self.sheets = root / f"shards-{name}"
        self._root = root
        self._format, self._basis, self._decoded_by = format_, basis, decoded_by
        self._root_synced = False

    def make(self) -> None:
        """Create the folders."""
        self.folder.mkdir(exist_ok=True)
        self.sheets.mkdir(exist_ok=True)

    def write(
        self,
        index: int,
        columns: writers.Columns,
        bad: Sequence[BadRecord] = (),
        *,
        carries: str | None = None,
        counts: ShardCounts = NO_COUNTS,
        sync: bool = True,
    ) -> Shard:
        """Write one shard, durably if `sync`; without columns, only its bad records. `carries` names state that the
        model carries to the next shard.

        Raises DataError if it cannot be written, FencedOut if a newer attempt took over.
        """
        entries = []
        with self.writing():
            for entry, data in encoded(self._format, index, columns):
                write_file(self.folder / entry.name, data, sync=sync)
                entries.append(entry)
            if sync:
                sync_path(self.folder)
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
            self.write_sheet(shard, sync=sync)
        return shard

    def note(self, value: Any) -> None:
        """Keep a JSON-able value beside the sheets. Raises DataError, FencedOut."""
        with self.writing():
            write_file(self.sheets / NOTE, json.dumps({"basis": self._basis, "value": value}).encode())

    def share(self, listing: Stamps) -> None:
        """Leave a listing for other members. They list anew if it is lost. Raises DataError, FencedOut."""
        with self.writing():
            write_file(self.sheets / LISTING, to_bytes(listing), sync=False)

    def write_sheet(self, shard: Shard, *, sync: bool = True) -> None:
        """Say that the shard is finished."""
        write_file(self.sheets / f"{shard.index:05d}.json", shard.to_bytes(), sync=sync)
        if sync:
            sync_path(self.sheets)
            if not self._root_synced:
                sync_path(self._root)
                sync_path(self._root.parent)
                self._root_synced = True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Distinguishes a removed folder, most likely removed by a newer attempt, from other errors."""
        try:
            with reported(self.folder):
                yield
        except DataError as e:
            if isinstance(e.__cause__, FileNotFoundError) and not self.folder.exists():
                raise FencedOut(f"{self.folder} was removed while this attempt wrote to it") from e
            raise
