"""Records with several inputs from the columns of a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from nimble_jobs.data.blocks import Block, Give, Kept, keep_bytes
from nimble_jobs.data.columns import choose, is_encoded, is_list, stored_as
from nimble_jobs.data.several import Member, SeveralSource, parts_of
from nimble_jobs.data.source import Source
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.table import OpenTable, TableSource
from nimble_jobs.spec.model import InputSpec


class SeveralColumns(SeveralSource):
    """Several inputs from the columns of one table, which is read once for all of them."""

    def __init__(self, spec: InputSpec, stamp: Stamp, table: OpenTable) -> None:
        members = []
        self._tables: list[TableSource] = []
        for argument, part in parts_of(spec).items():
            names = choose(Path(stamp.path), part.fields.name, table.schema.names, part.fields.which)
            source = TableSource(part, stamp, replace(table, names=names, bad={}))
            self._tables.append(source)
            members.append(Member.of(argument, source, scalar=_is_number(part.fields.name, table)))
        super().__init__(spec, members)
        self.layout = table.layout
        self._bad = table.bad
        self._kept = Kept(self.block, keep_bytes)

    def block(self, number: int) -> Block:
        """The blocks of all members."""
        table = self._tables[0].table(number)
        blocks = [source.block_of(number, table) for source in self._tables]
        return Block(values=blocks, place=blocks[0].place, bad={}, nbytes=sum(block.nbytes for block in blocks))

    def _give(self, number: int, give: Give | None) -> Give | None:
        def one(block: int) -> Block:
            found: Block = (give or self._kept)(block).values[number]
            return found

        return one

    def _odd(self, indexes: np.ndarray) -> dict[int, str]:
        if not self._bad:
            return {}
        return {row: self._bad[index] for row, index in enumerate(indexes.tolist()) if index in self._bad}


def source_of(spec: InputSpec, stamp: Stamp, table: OpenTable) -> Source:
    """The records of a table: of one input, or of several. Raises DataError."""
    return TableSource(spec, stamp, table) if spec.fields.arguments is None else SeveralColumns(spec, stamp, table)


def _is_number(name: str, table: OpenTable) -> bool:
    """Whether a name is that of one column of plain numbers, so that a record is one number."""
    if name not in table.schema.names:
        return False
    kind = stored_as(table.schema.field(name).type)
    return not is_list(kind) and not is_encoded(kind)
