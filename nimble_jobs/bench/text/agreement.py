"""Whether systems give the same embeddings, read from their Parquet files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nimble_jobs.errors import DataError

Embeddings = tuple[list[str], np.ndarray]  # ids in order, float32 [n, width]


def read(path: Path) -> Embeddings:
    """Ids in order, and their embeddings, of a Parquet file or of those in a folder. Raises DataError."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    try:
        table = pa.concat_tables([pq.read_table(file, columns=["id", "embedding"]) for file in files])
    except (OSError, pa.ArrowException) as e:
        raise DataError(f"{path}: {e}; expected Parquet with id and embedding") from e
    ids = [str(each) for each in table["id"].to_pylist()]
    flat = _numbers(table["embedding"])
    order = np.argsort(np.array(ids), kind="stable")
    return [ids[i] for i in order], flat.reshape(len(ids), -1)[order]


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """All numbers of a column of lists, float32, one after the other."""
    return np.concatenate([np.asarray(chunk.flatten(), dtype=np.float32) for chunk in column.chunks])


def farthest(found: Embeddings, reference: Embeddings) -> float:
    """The largest norm of a difference over the norm of the reference's embedding, of all texts.

    Infinite for other ids, another width, or NaN.
    """
    if found[0] != reference[0] or found[1].shape != reference[1].shape:
        return float("inf")
    off = np.linalg.norm(found[1] - reference[1], axis=1) / np.linalg.norm(reference[1], axis=1)
    return float(np.nan_to_num(off, nan=np.inf).max())
