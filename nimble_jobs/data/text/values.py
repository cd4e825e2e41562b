"""Texts of records as values, and what they have in common however they are stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nimble_jobs.data.blocks import Block, Give, Layout
from nimble_jobs.data.ids import Ids
from nimble_jobs.data.records import Signature
from nimble_jobs.data.source import READY, Loaded, Wanted
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.preprocess import Preprocess


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A text whose tokens are known already, special ones included."""

    ids: tuple[int, ...]


Text = str | tuple[str, str] | TokenIds  # of a record: one text, two that make a pair, or tokens
SIGNATURE = Signature(shape=(), dtype="text")

# What the owner of a job can do about texts that are too long. Clients of an API cannot.
HOW_TO_CUT = "; to cut longer texts, set input.text.truncate: end"

_SURROGATE = re.compile("[\ud800-\udfff]")


class Unreadable(ValueError):
    """Why a value is no text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The texts of consecutive records; None for a bad one."""

    texts: list[Text | None]
    bad: dict[int, str]  # by row
    nbytes: int

    def block(self) -> Block:
        """The same as a block of a source."""
        place = np.arange(len(self.texts))
        place[list(self.bad)] = -1
        return Block(values=self.texts, place=place, bad=self.bad, nbytes=self.nbytes)


def paired(columns: Sequence[Sequence[str | None]], bad: dict[int, str]) -> list[Text | None]:
    """The records of one column or two of the same length."""
    if len(columns) == 1:
        made: list[Text | None] = list(columns[0])
    else:
        made = [None if a is None or b is None else (a, b) for a, b in zip(*columns, strict=True)]
    for row in bad:
        made[row] = None
    return made


def decoded(data: bytes) -> str:
    """UTF-8 as text. Raises Unreadable."""
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise Unreadable(f"is not UTF-8: byte {e.start} is 0x{data[e.start]:02x}; expected text in UTF-8") from e


def text_of(value: object) -> str:
    """The value, if it is text. Raises Unreadable."""
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise Unreadable("holds half of a surrogate pair, which is no character; expected text")
        return value
    raise Unreadable(f"{kind_of(value)}; expected text")


def kind_of(value: object) -> str:
    """What a JSON value is, for messages."""
    if value is None:
        return "is null"
    if isinstance(value, bool):
        return f"holds {str(value).lower()}"
    if isinstance(value, int | float):
        return f"holds the number {value}"[:60]
    return "holds a list" if isinstance(value, list) else "holds an object" if isinstance(value, dict) else "holds text"


class TextSource:
    """A source whose records are texts. They are read in blocks only."""

    signature = SIGNATURE
    piece: int | None = None
    preprocess: Preprocess | None = None
    notes: tuple[str, ...] = ()
    lines = True  # a reason names the place of its record, also if that is a row of a Parquet file

    def __init__(self, stamp: Stamp, layout: Layout, *, ids: Ids | None, labels: np.ndarray | None) -> None:
        self.stamps = (stamp,)
        self.layout: Layout | None = layout
        self.total = int(layout.starts[-1])
        self.ids = ids
        self.labels = labels

    def load(
        self,
        indexes: np.ndarray,
        wanted: Wanted = READY,
        *,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        """Texts have no fixed size, so they are never rows of an array."""
        raise AssertionError("texts are read in blocks")

    def place(self, index: int) -> str:
        """FILE:LINE, or FILE: record N."""
        raise NotImplementedError

    def rows(self, number: int) -> Rows:
        """The texts of a block. Raises DataError."""
        raise NotImplementedError

    def block(self, number: int) -> Block:
        """The texts of a block. Raises DataError if the file has changed or cannot be read."""
        self.stamps[0].check()
        rows = self.rows(number)
        self.stamps[0].check()
        return rows.block()

    def check(self, indexes: np.ndarray) -> None:
        """Nothing to do: the file is checked when a block is read."""
