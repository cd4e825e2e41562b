"""What a loop is given, and the two moments that it reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch


@dataclass(kw_only=True)
class Task:
    """One run: embed every text of a Parquet file into another one."""

    texts: str  # Parquet with columns id and text
    model: str  # a folder
    dtype: torch.dtype
    device: str  # cpu | cuda
    batch_size: int
    max_length: int  # tokens; longer texts are cut
    mode: str  # of torch.compile
    out: str
    first_at: float | None = None  # time.time() when the first batch was done
    padded: int = 0  # tokens of all batches, padding included
    _batches: int = field(default=0)

    def read(self) -> pa.Table:
        return pq.read_table(self.texts)

    def note(self, shape: Any) -> None:
        """Call after each batch, with the shape of its tokens: counts them, and takes the time of the first."""
        self.padded += int(shape[0]) * int(shape[1])
        if self._batches == 0:
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.first_at = time.time()
        self._batches += 1

    def write(self, ids: Any, embeddings: Any) -> None:
        """float32 [n, width] beside the ids."""
        rows = pa.FixedSizeListArray.from_arrays(pa.array(embeddings.reshape(-1)), embeddings.shape[1])
        Path(self.out).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": ids, "embedding": rows}), self.out)
