"""Records with several inputs from the columns of a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nimble_jobs.data.blocks import Block, Give, Kept, keep_bytes
from nimble_jobs.data.columns import choose, is_binary, is_encoded, is_list, stored_as
from nimble_jobs.data.picture_paths import PicturePaths, names_pictures
from nimble_jobs.data.several import Column, Member, SeveralSource, parts_of
from nimble_jobs.data.source import Source
from nimble_jobs.data.stamps import Stamp, Stamps, WithNamed
from nimble_jobs.data.table import OpenTable, TableSource, is_plain_text
from nimble_jobs.data.text.fixed import AsTokens, FixedRows
from nimble_jobs.data.text.table_texts import TableTexts
from nimble_jobs.data.text.values import Text
from nimble_jobs.errors import DataError
from nimble_jobs.packing import Part
from nimble_jobs.spec.model import InputSpec

IDS, MASK = "input_ids", "attention_mask"  # the arguments of a text's tokens


class SeveralColumns(SeveralSource):
    """Several inputs from the columns of one table, which is read once for all of them."""

    def __init__(self, spec: InputSpec, stamp: Stamp, table: OpenTable, tokens: AsTokens | None = None) -> None:
        members: list[Column] = []
        self._tables: list[TableSource | TableTexts | None] = []  # None: it has no blocks
        named: list[Stamps] = []
        for argument, part in parts_of(spec).items():
            names = choose(Path(stamp.path), part.fields.name, table.schema.names, part.fields.which)
            own = replace(table, names=names)
            if tokens is not None and argument == IDS and _is_text(part.fields.name, table):
                if MASK in (spec.fields.arguments or {}):
                    problem = f"{MASK} is made of the text of {IDS}; expected no {MASK}"
                    raise DataError(f"{stamp.path}: input.fields.x: {problem}")
                texts = TableTexts(part, stamp, own)
                self._tables.append(texts)
                members.append(TextMember(source=texts, rows=tokens()))
                continue
            if names_pictures(part.fields.name, table):
                pictures = PicturePaths(part, stamp, own)
                self._tables.append(None)
                members.append(Member.of(argument, pictures))
                named.append(pictures.named)
                continue
            source = TableSource(part, stamp, own)
            self._tables.append(source)
            members.append(Member.of(argument, source, scalar=_is_number(part.fields.name, table)))
        super().__init__(spec, members)
        self._read = next((source for source in self._tables if source is not None), None)
        if named:
            self.stamps = WithNamed(stamp, named)
        self.layout = table.layout if self._read is not None else None
        self._bad = table.bad
        self._kept = Kept(self.block, keep_bytes)

    def block(self, number: int) -> Block:
        """The blocks of all members."""
        assert self._read is not None
        table = self._read.table(number)
        blocks = [None if source is None else source.block_of(number, table) for source in self._tables]
        held = [block for block in blocks if block is not None]
        return Block(values=blocks, place=held[0].place, bad={}, nbytes=sum(block.nbytes for block in held))

    def _give(self, number: int, give: Give | None) -> Give | None:
        if self._tables[number] is None:
            return None

        def one(block: int) -> Block:
            found: Block = (give or self._kept)(block).values[number]
            return found

        return one

    def _odd(self, indexes: np.ndarray) -> dict[int, str]:
        if not self._bad:
            return {}
        return {row: self._bad[index] for row, index in enumerate(indexes.tolist()) if index in self._bad}


@dataclass(frozen=True, kw_only=True, eq=False)
class TextMember:
    """A column of text, which makes two inputs: the tokens, and the mask of those that are padding."""

    source: TableTexts
    rows: FixedRows
    is_image = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """As `Column` says."""
        return self.rows.parts

    def fill(self, fields: np.ndarray, indexes: np.ndarray, give: Give | None, *, allow_nan: bool) -> dict[int, str]:
        """As `Column` says."""
        assert self.source.layout is not None
        assert give is not None
        starts = self.source.layout.starts
        texts: list[Text | None] = []
        bad: dict[int, str] = {}
        numbers = np.searchsorted(starts, indexes, side="right") - 1
        for row, (index, number) in enumerate(zip(indexes.tolist(), numbers.tolist(), strict=True)):
            block, at = give(number), index - int(starts[number])
            texts.append(None if block.place[at] < 0 else block.values[at])
            if block.place[at] < 0:
                bad[row] = f"{IDS}: {block.bad[at]}"
        for row, why in self.rows.fill(fields, texts).items():
            bad.setdefault(row, f"{IDS}: {why}")
        return bad


def source_of(spec: InputSpec, stamp: Stamp, table: OpenTable, tokens: AsTokens | None = None) -> Source:
    """The records of a table: of one input, or of several. Raises DataError, and what `tokens` raises."""
    if spec.fields.arguments is None:
        one = PicturePaths if names_pictures(spec.fields.name, table) else TableSource
        return one(spec, stamp, table)
    return SeveralColumns(spec, stamp, table, tokens)


def _is_text(name: str, table: OpenTable) -> bool:
    if name not in table.schema.names:
        return False
    kind = table.schema.field(name).type
    return is_plain_text(kind) or (table.line is not None and is_binary(kind))


def _is_number(name: str, table: OpenTable) -> bool:
    """Whether a name is that of one column of plain numbers, so that a record is one number."""
    if name not in table.schema.names:
        return False
    kind = stored_as(table.schema.field(name).type)
    return not is_list(kind) and not is_encoded(kind)
