"""The parquet format: one row group at a time, through a memory map."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nimble_jobs.data.source import Stamp
from nimble_jobs.data.table import TableSource, check_columns
from nimble_jobs.errors import DataError
from nimble_jobs.regular import name_of, open_regular
from nimble_jobs.spec.model import InputSpec


def open_parquet(spec: InputSpec, path: Path) -> TableSource:
    """Rows of one Parquet file. Raises DataError when it, or a column, is not there or not readable."""
    stamp = Stamp.of(path)
    try:
        with open_regular(path) as opened:
            file = pq.ParquetFile(name_of(opened), memory_map=True)  # stays mapped
        names, extra = check_columns(spec, path, file.schema_arrow.names)

        def read(group: int) -> pa.Table:
            try:
                return file.read_row_group(group, columns=names)
            except (pa.ArrowException, OSError) as e:
                raise DataError(f"{path}: row group {group} cannot be read ({e})") from e

        rows = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
        held = file.read(columns=extra) if extra else pa.table({})
        return TableSource(spec, stamp, names=names, group_rows=rows, read=read, extra=held)
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: cannot be read ({e}); expected a complete .parquet file") from e
