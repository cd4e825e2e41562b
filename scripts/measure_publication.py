"""How long one process takes to take over and to publish very many shards that others have written, step by step.

    python scripts/measure_publication.py [--shards 1000,10000,100000] [--bytes 4096] [--folder DIR] [--json FILE]

The shards lie in the folder of another member, as when several devices score a job; each has a file of so many bytes,
and a sheet. The folder should be on a disk. Prints a line for each number of shards.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from measuring import ROOT, environment, save

sys.path.insert(0, str(ROOT))

from nimble_jobs.data import MemberStaging, Staging
from nimble_jobs.spec.model import OutputSpec
from tests.ledger import Book

ID_BYTES = 8  # of an id and what stands around it in a row of logits


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", default="1000,10000,100000")
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for shards in map(int, given.shards.split(",")):
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            rows.append(measure(Path(name), shards, given.bytes))
            print(rows[-1], flush=True)
    save(given.json, {"environment": environment(), "rows": rows})
    return 0


def measure(base: Path, shards: int, nbytes: int) -> dict[str, Any]:
    """Seconds of each step."""
    output = OutputSpec(path=base / "out", format="npy", fields=("logits",))
    ledger = Book(base / "ledger").claim("job", 1, output.folder)
    staging = Staging(output, "job", 1, ledger=ledger, basis="basis")
    written(output, shards, nbytes)
    os.sync()
    took: dict[str, float] = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        took[what] = round(time.perf_counter() - began, 3)

    with timed("take_over_s"):
        staging.adopt(last=True)
    clear = staging._clear

    def clearing() -> None:
        with timed("clear_s"):
            clear()

    staging._clear = clearing  # type: ignore[method-assign]
    with timed("publish_s"):
        staging.publish({}, shards=shards)
    return {
        "shards": shards,
        "file_bytes": nbytes,
        **took,
        "manifest_bytes": (output.folder / "manifest.json").stat().st_size,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def written(output: OutputSpec, shards: int, nbytes: int) -> None:
    """The shards of a member, not synced one by one."""
    member = MemberStaging(output, "job", 1, "w", finish=lambda _shard: None, basis="basis")
    values = np.zeros((1, nbytes // 4), np.float32)
    for index in range(shards):
        values[0, 0] = index
        member._files.write(index, {"logits": values}, sync=False)


if __name__ == "__main__":
    sys.exit(main())
