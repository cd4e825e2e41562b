"""Opens columns of text in Parquet and CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nimble_jobs import moves
from nimble_jobs.data.blocks import Layout
from nimble_jobs.data.csv_blocks import Blocks, Found, Lines, extra_of, odd_of
from nimble_jobs.data.csv_cells import parse
from nimble_jobs.data.csv_cuts import Cut, cuts
from nimble_jobs.data.csv_file import header
from nimble_jobs.data.parquet import opened_as
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.table import OpenTable, check_columns
from nimble_jobs.data.text.table_texts import TableTexts
from nimble_jobs.errors import DataError
from nimble_jobs.pipeline import mapped, usable_cores
from nimble_jobs.spec.model import InputSpec


def open_parquet_texts(spec: InputSpec, path: Path) -> TableTexts:
    """Columns of text in one Parquet file. Raises DataError."""
    return opened_as(TableTexts, spec, path)


def open_csv_texts(spec: InputSpec, path: Path) -> TableTexts:
    """Columns of text in one CSV file (UTF-8, comma), read in blocks. Raises DataError."""
    stamp = Stamp.of(path)
    try:
        known = header(path)
        names, extra = check_columns(spec, path, known)
        found = _found(stamp, path, known, names, extra)
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: cannot be read ({e}); expected a .csv file in UTF-8 with a header line") from e
    blocks = Blocks(stamp=stamp, known=known, names=names, found=found)
    starts = np.cumsum([0, *(one.rows for one in found)], dtype=np.int64)
    types = dict.fromkeys(names, pa.binary())
    table = OpenTable(
        names=names,
        schema=pa.schema(list(types.items())),
        layout=Layout(
            starts=starts,
            chains=np.arange(len(found)),
            block_bytes=max((one.cut.nbytes for one in found), default=1),
        ),
        read=lambda number: blocks.parsed(number, names, types)[0],
        extra=extra_of(found, extra),
        bad=odd_of(found, starts),
        line=Lines(blocks, starts),
    )
    return TableTexts(spec, stamp, table)


def _found(stamp: Stamp, path: Path, known: Sequence[str], names: Sequence[str], extra: Sequence[str]) -> list[Found]:
    """The blocks of a CSV file, with ids and labels; several threads parse."""
    types = dict.fromkeys([*names, *extra], pa.binary())

    def first_pass(part: tuple[Cut, bytes]) -> Found:
        cut, data = part
        table, odd = parse(data, known, [*names, *extra], types)
        kinds = tuple(pa.binary() for _ in names)
        return Found(cut=cut, rows=table.num_rows, kinds=kinds, extra=table.select(list(extra)), odd=odd)

    found = []
    with stamp.open() as file:
        threads = usable_cores()
        for one in mapped(first_pass, cuts(file, str(path)), threads=threads, depth=2 * threads, name="nimble-csv"):
            found.append(one)
            moves.made()
    return found
