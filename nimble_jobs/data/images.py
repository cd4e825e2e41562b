"""The images format: each file is a record."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from nimble_jobs.data.arriving import Arriving
from nimble_jobs.data.blocks import Give
from nimble_jobs.data.decoder import PIECE, ImageDecoder
from nimble_jobs.data.ids import Ids
from nimble_jobs.data.listing import list_images
from nimble_jobs.data.source import READY, Loaded, Unblocked, Wanted
from nimble_jobs.data.stamps import Names, Stamps
from nimble_jobs.decoding import work
from nimble_jobs.decoding.picture import Undecodable, header_size
from nimble_jobs.errors import DataError
from nimble_jobs.pipeline import mapped, usable_cores
from nimble_jobs.plural import by
from nimble_jobs.regular import open_regular
from nimble_jobs.seen import CHANGED, VANISHED, FileList
from nimble_jobs.spec.formats import SUFFIXES
from nimble_jobs.spec.model import InputSpec

HEADERS = 10_000  # images whose sizes are compared before the first one is read


class ImageSource(Unblocked):
    """Image files. Their ids are paths below the folder, or below the part of a glob without wildcards.

    With `listed` they are those of an earlier listing: a file that has changed since is a bad record instead of an
    error. With `arriving` they are still being fetched, and reading one waits for it.
    """

    piece = PIECE
    unlabelled = "lies beside the folders of the classes; expected it in one of them"

    def __init__(
        self, spec: InputSpec, stamps: Stamps, *, listed: bool = False, arriving: Arriving | None = None
    ) -> None:
        self._root = root = stamps.root
        self.total = len(stamps)
        self._listed = listed
        self._arriving = arriving
        self.stamps = stamps
        self.ids: Ids | None = stamps.names
        self.labels: np.ndarray | None = None
        if spec.fields.label is not None:
            if spec.fields.label != "parent":
                raise DataError(
                    f"{root}: input.fields.label: found {spec.fields.label!r}; expected 'parent', because "
                    "an image's label is the name of its folder"
                )
            self.labels = self.stamps.folders()
        self.decoder = ImageDecoder(spec.transform, str(root))
        self.notes = self.decoder.notes
        if self.decoder.size is None:
            self.decoder.set_size(self._common_size())
        self.signature = self.decoder.signature
        self.preprocess = self.decoder.preprocess

    lines = False

    def place(self, index: int) -> str:
        return self.stamps[index].path

    def file_of(self, index: int) -> str:
        """The listed file that holds a record."""
        assert self.ids is not None
        return self.ids[index]

    def load(
        self,
        indexes: np.ndarray,
        wanted: Wanted = READY,
        *,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        def moved(position: int, status: int) -> str:
            if self._listed:
                return CHANGED if status == work.CHANGED else VANISHED
            stamp = self.stamps[int(indexes[position])]
            raise stamp.changed() if status == work.CHANGED else stamp.vanished()

        if self._arriving is None:
            return self.decoder.load(self.stamps.files(indexes), indexes, wanted, into=into, moved=moved)
        self._arriving.wait(indexes)
        try:
            return self.decoder.load(self.stamps.files(indexes), indexes, wanted, into=into, moved=moved)
        except BaseException as e:
            self._arriving.end(e)  # or other threads would wait for records that nobody needs any more
            raise

    def check(self, indexes: np.ndarray) -> None:
        """Nothing to do: each file is checked when it is opened."""

    def _common_size(self) -> tuple[int, int]:
        first: tuple[str, tuple[int, int]] | None = None
        reason = ""

        def size(path: str) -> tuple[int, int] | str:
            try:
                with _opened(path) as file:
                    return header_size(file)
            except Undecodable as e:
                return str(e)

        sizes = mapped(size, (s.path for s in self.stamps), threads=usable_cores(), depth=64)
        for i, (name, this) in enumerate(zip(self.stamps.names, sizes, strict=True)):
            if first is not None and i >= HEADERS:  # later ones are checked when they are read
                sizes.close()
                break
            if isinstance(this, str):
                reason = reason or f"{name}: {this}"
            elif first is None:
                first = (name, this)
            elif this != first[1]:
                raise DataError(
                    f"{self._root}: {first[0]} is {by(first[1])} and {name} is {by(this)} pixels (height x width); "
                    "expected one size, or input.transform.resize"
                )
        if first is None:
            raise DataError(f"{self._root}: none of {self.total} images can be decoded; the first: {reason}")
        return first[1]


def _opened(path: str) -> BinaryIO:
    """Open a file. Raises Undecodable unless it is a regular file."""
    try:
        return open_regular(path)
    except FileNotFoundError as e:
        raise Undecodable("cannot be decoded: it is a broken link") from e
    except OSError as e:
        raise Undecodable(f"cannot be decoded: {e.strerror}") from e


def open_images(
    spec: InputSpec,
    files: FileList | None = None,
    arriving: Arriving | None = None,
    listing: Stamps | None = None,
) -> ImageSource:
    """All image files below a folder, or matched by a glob, sorted by path; with `files` or `arriving` only these. With
    a `listing` of them nothing is looked at.

    Hidden files and files with other suffixes are skipped. Broken links, pipes and the like are bad records.
    """
    if spec.fields.id not in (None, "path"):
        raise DataError(
            f"{spec.source}: input.fields.id: found {spec.fields.id!r}; expected none: an image's id is its path"
        )
    if files is not None:
        return ImageSource(spec, Stamps.listed(Path(files.root), files.files), listed=True)
    if arriving is not None:
        return ImageSource(spec, arriving.stamps, arriving=arriving)
    if listing is not None:
        return ImageSource(spec, listing)
    suffixes = SUFFIXES["images"]
    root, ids, others = list_images(spec.source, suffixes)
    if not ids:
        raise DataError(f"{spec.source}: no images among {others} files; expected {', '.join(sorted(suffixes))}")
    return ImageSource(spec, Stamps.of(root, Names(ids)))
