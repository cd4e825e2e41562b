"""The unpublished shards of one member of a job that several devices work on.

Each member writes into folders of its own. Whoever publishes takes the shards over, as from an earlier attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nimble_jobs.data import writers
from nimble_jobs.data.files import reported
from nimble_jobs.data.hidden import staging_root
from nimble_jobs.data.records import NO_COUNTS, BadRecord, ShardCounts
from nimble_jobs.data.shard_files import Note, ShardFiles, read_note
from nimble_jobs.data.shards import Shard
from nimble_jobs.data.shared_listing import read_listing
from nimble_jobs.data.stamps import Stamps
from nimble_jobs.errors import ModelError, OutOfStep
from nimble_jobs.spec.model import OutputSpec

Finish = Callable[[Shard], Any]  # gets a written shard


class MemberStaging:
    """Writes shards and tells `finish` about each."""

    troubles = 0  # requests that an object store did not answer

    def __init__(
        self,
        output: OutputSpec,
        job_id: str,
        attempt: int,
        worker: str,
        *,
        finish: Finish,
        basis: str,
        decoded_by: str | None = None,
    ) -> None:
        """Raises DataError if its folders cannot be made."""
        root = staging_root(output.folder, job_id)
        name = f"{attempt}.{worker}"
        self._files = ShardFiles(root, name, format_=output.format, basis=basis, decoded_by=decoded_by)
        self._attempt, self._basis, self._finish = attempt, basis, finish
        self.done: dict[int, Shard] = {}  # none, because which shards are to be done is decided elsewhere
        with reported(self._files.folder):
            root.mkdir(exist_ok=True)
            self._files.make()

    def noted(self) -> Any:
        """What the member that claimed the job has noted. Raises OutOfStep if that is gone, or if it read another input
        than this member, or another model.
        """
        note = read_note(self._files.sheets.parent / f"shards-{self._attempt}")
        return value_of(note, self._basis, where=str(self._files.sheets.parent))

    def write_shard(
        self,
        index: int,
        columns: writers.Columns,
        bad: Sequence[BadRecord] = (),
        *,
        carries: str | None = None,
        counts: ShardCounts = NO_COUNTS,
        last: bool = False,  # as `Staging` has it, where no later shard follows
    ) -> Shard:
        """Write one shard durably, and tell `finish`. Raises ModelError if the model carries state to the next shard,
        which another member may have; DataError if it cannot be written, FencedOut if a newer attempt took over.
        """
        return finish_member(
            lambda: self._files.write(index, columns, bad, counts=counts),
            self._finish,
            carries,
        )


def finish_member(write: Callable[[], Shard], finish: Finish, carries: str | None) -> Shard:
    """Write a shard and tell `finish`. Raises ModelError if the model carries state to the next shard."""
    if carries is not None:
        raise ModelError(
            f"the model carries {carries!r} from batch to batch, so one device must score all records: run.gpus: 1"
        )
    shard = write()
    finish(shard)
    return shard


def value_of(note: Note | None, basis: str, *, where: str) -> Any:
    """What the member that claimed the job has noted. `basis` is that of the member that asks. Raises OutOfStep."""
    if note is None:
        raise OutOfStep(f"{where}: the files of the job's other devices are gone")
    if note.basis != basis:
        raise OutOfStep("the input or the model has changed since the job's other devices began")
    return note.value


def listing_for_member(output: OutputSpec, job_id: str, attempt: int) -> Stamps | None:
    """The pictures as the member that claimed the job listed them; None if it left no listing, or saw other files than
    this machine does, as a mount of its own may show them.
    """
    if output.address is not None:
        return None
    found = read_listing(staging_root(output.folder, job_id) / f"shards-{attempt}")
    return found if found is not None and len(found) and found[0].trouble() is None else None
