"""Pictures that a column of a table names by their paths: absolute ones, or ones from the table's folder on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from nimble_jobs.data.blocks import Give
from nimble_jobs.data.decoder import PIECE, ImageDecoder
from nimble_jobs.data.source import READY, Loaded, Unblocked, Wanted, record_of
from nimble_jobs.data.stamps import Names, Stamp, Stamps, WithNamed
from nimble_jobs.data.table import OpenTable, ids_and_labels, is_plain_text
from nimble_jobs.decoding import work
from nimble_jobs.decoding.picture import Undecodable, header_size
from nimble_jobs.errors import DataError
from nimble_jobs.regular import open_regular
from nimble_jobs.spec.formats import SUFFIXES
from nimble_jobs.spec.model import InputSpec


class PicturePaths(Unblocked):
    """Each record is a picture, and a row of the table names its file. The table is not read again."""

    piece = PIECE

    def __init__(self, spec: InputSpec, stamp: Stamp, table: OpenTable) -> None:
        """Raises DataError if none of the pictures can be decoded, or as `ImageDecoder` does."""
        (self._name,) = table.names
        self._table = table
        self._stamp = stamp
        self._column = table.extra.column(self._name)
        self.total = len(self._column)
        self.ids, self.labels = ids_and_labels(spec, stamp, table)
        self.lines = table.line is not None
        self.named = Stamps.of(Path(), Names(_files(self._column, Path(stamp.path).parent)))
        self.stamps = WithNamed(stamp, [self.named])
        where = f"{stamp.path}: input.fields.{spec.fields.which}: {self._name!r}"
        self.decoder = ImageDecoder(spec.transform, where)
        if self.decoder.size is None:
            self.decoder.set_size(self._first_size(where))
        self.notes = self.decoder.notes
        self.signature = self.decoder.signature
        self.preprocess = self.decoder.preprocess

    def place(self, index: int) -> str:
        line = self._table.line
        return line(index) if line is not None else record_of(self._stamp.path, index)

    def load(
        self,
        indexes: np.ndarray,
        wanted: Wanted = READY,
        *,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        def moved(position: int, status: int) -> str:
            stamp = self.named[int(indexes[position])]
            raise stamp.changed() if status == work.CHANGED else stamp.vanished()

        loaded = self.decoder.load(self.named.files(indexes), indexes, wanted, into=into, moved=moved)
        for row, why in loaded.bad.items():
            loaded.bad[row] = self._reason(int(indexes[row]), why)
        return loaded

    def check(self, indexes: np.ndarray) -> None:
        """Nothing to do: each file is checked when it is opened."""

    def _reason(self, index: int, why: str) -> str:
        """Why a record is bad, with the path as the table has it."""
        if index in self._table.bad:
            return self._table.bad[index]
        text = _text(self._column[index])
        if not text:
            return f"column {self._name!r} is empty; expected the path of a picture"
        if "\0" in text:
            return f"column {self._name!r} holds a zero byte; expected the path of a picture"
        if self.named[index].size >= 0:
            return f"column {self._name!r}: {text!r}: {why}"
        return f"column {self._name!r}: {text!r}: there is no such file"

    def _first_size(self, where: str) -> tuple[int, int]:
        """Height and width of the first picture that can be decoded; others of another size are bad records."""
        for stamp in self.named:
            if stamp.size < 0:
                continue
            try:
                with open_regular(stamp.path) as file:
                    return header_size(file)
            except (OSError, Undecodable):
                continue
        first = _text(self._column[0])
        raise DataError(f"{where}: no record can be decoded; expected paths of pictures, found {first!r:.80} first")


def names_pictures(name: str, table: OpenTable) -> bool:
    """Whether a name is that of one column of paths of pictures: of text, whose first value ends like a picture."""
    if name not in table.extra.column_names or name not in table.schema.names:
        return False
    kind = table.schema.field(name).type
    if not is_plain_text(kind) and not (table.line is not None and pa.types.is_binary(kind)):
        return False
    column = table.extra.column(name)
    return any_path(next((text for value in column if (text := _text(value).strip())), ""))


def any_path(text: str) -> bool:
    """Whether a text ends like the name of a picture's file."""
    return os.path.splitext(text)[1].lower() in SUFFIXES["images"]  # noqa: PTH122 - of any text


def _files(column: pa.ChunkedArray, folder: Path) -> Iterator[str]:
    """The path of each row's file; empty if there is none."""
    for value in column:
        text = _text(value)
        yield os.path.join(folder, text) if text and "\0" not in text else ""  # noqa: PTH118 - one of a million


def _text(value: pa.Scalar) -> str:
    held = value.as_py()
    return os.fsdecode(held) if held is not None else ""
