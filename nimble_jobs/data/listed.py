"""Joins files that were listed earlier. A file that cannot be used counts as a single bad record in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from nimble_jobs.data.blocks import Block, Give, Layout
from nimble_jobs.data.ids import Ids, JoinedIds, Numbered
from nimble_jobs.data.joined import Joined
from nimble_jobs.data.records import Signature
from nimble_jobs.data.source import READY, Loaded, Source, Unblocked, Wanted, form_of, packing_of, stamp_of
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.decoding.work import BAD, Answer, Row
from nimble_jobs.errors import DataError, NoRecords
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.seen import FileList


class Unread(Unblocked):
    """One bad record in place of a file's records. It takes its signature and form from `like`."""

    total = 1
    lines = False
    piece: int | None = None

    def __init__(self, stamp: Stamp, name: str, reason: str, like: Source) -> None:
        self._reason = reason
        self.signature: Signature = like.signature
        self.preprocess: Preprocess | None = like.preprocess
        self.packing = packing_of(like)
        self.ids: Ids | None = None if like.ids is None else Ids([name], made_up=[0])
        self.labels: np.ndarray | None = None if like.labels is None else like.labels[:1]
        if like.signature.dtype == "text":  # which is read in blocks
            self.layout = Layout(starts=np.array([0, 1]), chains=np.array([0]), block_bytes=1)
        # Differs from the fingerprint of the readable file, so that shards of attempts that read it are not reused.
        self.stamps = (Stamp(path=stamp.path, size=-1, mtime_ns=0, inode=0),)

    def place(self, index: int) -> str:
        return self.stamps[0].path

    def load(
        self,
        indexes: np.ndarray,
        wanted: Wanted = READY,
        *,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        bad = dict.fromkeys(range(len(indexes)), self._reason)
        if wanted.encoded:
            assert into is not None
            return Loaded(x=into, bad=bad, rows=Answer.of([Row(status=BAD)] * len(indexes), 0.0).rows)
        form = form_of(self, stored=wanted.stored)
        x = np.empty((0, *form.shape), dtype=form.dtype) if into is None else into[:0]
        return Loaded(x=x, bad=bad)

    def block(self, number: int) -> Block:
        """A block without a text."""
        return Block(values=[None], place=np.array([-1]), bad={0: self._reason}, nbytes=0)

    def check(self, indexes: np.ndarray) -> None:
        """Nothing was read."""


class Listed(Joined):
    """The sources of listed files. A record without its own id is named PATH:NUMBER, from 0.

    `left_out` maps unusable files to their reasons; files in `empty` are left out because they hold no records.
    """

    def __init__(
        self, parts: Sequence[Source], names: Sequence[str], left_out: dict[str, str], *, empty: Sequence[str]
    ) -> None:
        super().__init__(parts, next(part for part in parts if not isinstance(part, Unread)), empty=empty)
        self.left_out = left_out
        self._names = names
        if self.ids is None:
            self.ids = JoinedIds([_ids(part, name) for part, name in zip(parts, names, strict=True)])

    def file_of(self, index: int) -> str:
        """The listed file that holds a record."""
        return self._names[self.part_of(index)]


def open_listed(files: FileList, open_one: Callable[[Path], Source]) -> Listed:
    """Opens the listed files with `open_one`. A file that has changed or cannot be read becomes Unread.

    Raises DataError if no file can be read.
    """
    root = Path(files.root)
    stamps = {file.path: stamp_of(root, file) for file in files.files}
    sources: dict[str, Source] = {}
    left_out: dict[str, str] = {}
    empty: dict[str, str] = {}
    for name, stamp in stamps.items():
        try:
            source = open_one(root / name)
            reason = stamp.trouble()  # checked after reading, so that a write in between is noticed too
        except NoRecords as e:
            if (reason := stamp.trouble()) is None:
                empty[name] = str(e)
                continue
        except DataError as e:
            reason = stamp.trouble() or str(e)
        if reason is None:
            sources[name] = source
        else:
            left_out[name] = reason
    if not sources:
        name, reason = next(iter((left_out | empty).items()))
        raise DataError(f"{root}: none of {len(stamps)} new files can be read; the first, {name}: {reason}")
    like = next(iter(sources.values()))
    names = [name for name in stamps if name not in empty]
    parts = [sources.get(name) or Unread(stamps[name], name, left_out[name], like) for name in names]
    return Listed(parts, names, left_out, empty=list(empty))


def _ids(part: Source, name: str) -> Ids:
    return Ids([name]) if isinstance(part, Unread) else Numbered(name, part.total)
