"""The unpublished shards of one member of a job that several devices work on.

Each member writes into folders of its own. Whoever publishes takes the shards over, as from an earlier attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from nimble_jobs.data import writers
from nimble_jobs.data.files import reported
from nimble_jobs.data.hidden import staging_root
from nimble_jobs.data.records import BadRecord
from nimble_jobs.data.shard_files import ShardFiles
from nimble_jobs.data.shards import Shard
from nimble_jobs.errors import ModelError
from nimble_jobs.spec.model import OutputSpec

Finish = Callable[[Shard, str], Any]  # gets a written shard, and the SHA-256 of its sheet


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
        self._finish = finish
        self.done: dict[int, Shard] = {}  # none, because which shards are to be done is decided elsewhere
        with reported(self._files.folder):
            root.mkdir(exist_ok=True)
            self._files.make()

    def write_shard(
        self,
        index: int,
        columns: writers.Columns,
        bad: Sequence[BadRecord] = (),
        *,
        carries: str | None = None,
        last: bool = False,  # as `Staging` has it, where no later shard follows
    ) -> Shard:
        """Write one shard durably, and tell `finish`. Raises ModelError if the model carries state to the next shard,
        which another member may have; DataError if it cannot be written, FencedOut if a newer attempt took over.
        """
        return finish_member(lambda: self._files.write(index, columns, bad), self._finish, carries)


def finish_member(write: Callable[[], Shard], finish: Finish, carries: str | None) -> Shard:
    """Write a shard and tell `finish`. Raises ModelError if the model carries state to the next shard."""
    if carries is not None:
        raise ModelError(
            f"the model carries {carries!r} from batch to batch, so one device must score all records: run.gpus: 1"
        )
    shard = write()
    finish(shard, hashlib.sha256(shard.to_bytes()).hexdigest())
    return shard
