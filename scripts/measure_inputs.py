"""Measure inputs that are large: time to the first batch, records a second, and peak memory, each in its own process.

    python scripts/measure_inputs.py [--folder /dev/shm] [CASE ...]

Files are made in FOLDER and removed again; at most 2 GiB are there at a time. What is read was just written, so it is
in the page cache. Batches of 64 go into eight shared buffers, as in a job.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from nimble_jobs.data import Wanted, open_reader
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.transform import TransformSpec

SHAPE = (224, 224, 3)
BATCH = 64
SECONDS = 8.0  # that a case is read for at most


@dataclass(frozen=True, kw_only=True)
class Case:
    """An input, and how it is read."""

    make: Callable[[Path], None]
    format: str
    fields: FieldsSpec = FieldsSpec()  # noqa: RUF009 - frozen
    transform: TransformSpec = TransformSpec()  # noqa: RUF009 - frozen
    cores: int = 2
    shuffled: bool = False


def _images(count: int) -> np.ndarray:
    some = np.random.default_rng(0).integers(0, 256, (250, *SHAPE), dtype=np.uint8)
    return np.concatenate([some] * (count // 250))


def _npy(path: Path) -> None:
    np.save(path, _images(6000))


def _npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, x=_images(6000))


def _sparse(path: Path) -> None:
    total = 20 * 1000**3 // 150528
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"shape": (total, *SHAPE), "fortran_order": False, "descr": "|u1"})
        file.truncate(file.tell() + total * 150528)


def _fortran(path: Path) -> None:
    np.save(path, np.asfortranarray(np.random.default_rng(0).normal(size=(1_000_000, 100)).astype(np.float32)))


def _parquet(path: Path, *, group: int) -> None:
    flat = pa.array(_images(3000).reshape(-1))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(flat, 150528)})
    pq.write_table(table, path, row_group_size=group, compression="none", use_dictionary=False)


def _wide(rows: int) -> pa.Table:
    values = np.random.default_rng(0).normal(size=(rows, 20)).astype(np.float32).round(4)
    return pa.table({"id": [f"record-{i:09}" for i in range(rows)], **{f"f{j}": values[:, j] for j in range(20)}})


def _many_ids(path: Path) -> None:
    with pq.ParquetWriter(path, pa.schema([("id", pa.string()), ("x", pa.float32())])) as writer:
        for first in range(0, 10_000_000, 500_000):
            ids = [f"record-{i:09}" for i in range(first, first + 500_000)]
            writer.write_table(pa.table({"id": ids, "x": np.zeros(500_000, np.float32)}))


def _csv(path: Path, *, rows: int) -> None:
    pyarrow.csv.write_csv(_wide(rows), path)


def _million(path: Path) -> None:
    """Names of 100 pictures in 100 folders: links, since a million files would fill the memory."""
    from PIL import Image

    for d in range(100):
        folder = path / f"{d:03}"
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8), (d, d, d)).save(folder / ".picture", "PNG")
        descriptor = os.open(folder, os.O_RDONLY)
        for i in range(10_000):
            os.link(".picture", f"{i:05}.png", src_dir_fd=descriptor, dst_dir_fd=descriptor)
        os.close(descriptor)


def _jpegs(path: Path) -> None:
    """Names of one picture in one folder."""
    from PIL import Image

    path.mkdir()
    Image.new("RGB", (8, 8), (9, 9, 9)).save(path / ".picture", "JPEG")
    descriptor = os.open(path, os.O_RDONLY)
    for i in range(131_072):
        os.link(".picture", f"{i * 65_537 % 131_072:07}.jpg", src_dir_fd=descriptor, dst_dir_fd=descriptor)
    os.close(descriptor)


WIDE = FieldsSpec(x="f*", id="id")
CASES = {
    "npy, uint8 224x224x3, 1 core": Case(make=_npy, format="npy", cores=1),
    "npy, uint8 224x224x3": Case(make=_npy, format="npy"),
    "npy, uint8 224x224x3, shuffled": Case(make=_npy, format="npy", shuffled=True),
    "npy of 20 GB, sparse": Case(make=_sparse, format="npy"),
    "npy in Fortran order, 100 float32": Case(make=_fortran, format="npy"),
    "npz, stored, uint8 224x224x3": Case(make=_npz, format="npz"),
    "parquet, row groups of 100 images": Case(make=lambda p: _parquet(p, group=100), format="parquet"),
    "parquet, one row group of 3,000 images": Case(make=lambda p: _parquet(p, group=3000), format="parquet"),
    "parquet, 10,000,000 ids": Case(make=_many_ids, format="parquet", fields=FieldsSpec(id="id")),
    "csv of 60 MB, 20 columns": Case(make=lambda p: _csv(p, rows=370_000), format="csv", fields=WIDE),
    "csv of 800 MB, 20 columns": Case(make=lambda p: _csv(p, rows=5_000_000), format="csv", fields=WIDE),
    "131,072 JPEGs in one folder": Case(make=_jpegs, format="images", transform=TransformSpec(resize=(8, 8))),
    "1,000,000 images of 8x8": Case(
        make=_million, format="images", fields=FieldsSpec(label="parent"), transform=TransformSpec(resize=(8, 8))
    ),
}


def peak_mb() -> float:
    """The most memory that this process has had, in MB."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) / 1000


def measure(case: Case, path: Path) -> dict[str, float]:
    """Read one input in this process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case.cores])
    spec: Any = InputSpec(source=str(path), format=case.format, fields=case.fields, transform=case.transform)  # type: ignore[arg-type]
    if case.format == "images":
        import nimble_jobs.data.images  # noqa: F401 - Pillow takes longer to load than many files to list
    before = peak_mb()
    began = time.perf_counter()
    reader = open_reader(spec)
    digest_began = time.perf_counter()
    assert reader.fingerprint
    opened = time.perf_counter()
    order = np.random.default_rng(0).permutation(reader.total) if case.shuffled else None
    given = reader.preprocess or reader.signature
    buffers = Buffers(8, BATCH * int(np.prod(given.shape)) * np.dtype(given.dtype).itemsize)
    buffers.memory[:] = 0  # as pinned memory is there from the beginning
    records = nbytes = 0
    first = end = 0.0
    started = time.perf_counter()
    asked = time.perf_counter()
    wanted = Wanted(stored=reader.preprocess is not None)
    batches = reader.batches(batch_size=BATCH, order=order, wanted=wanted, buffers=buffers)
    for batch in batches:
        end = time.perf_counter()
        if not first:
            first, started = end, end
        else:
            records, nbytes = records + len(batch), nbytes + batch.x.nbytes
        if batch.buffer is not None:
            batch.buffer.release()
        if end - started > SECONDS:
            break
    batches.close()
    return {
        "records": reader.total,
        "open_s": opened - began,
        "fingerprint_s": opened - digest_began,
        "first_s": opened - began + first - asked,
        "records_per_s": records / max(1e-9, end - started),
        "MB_per_s": nbytes / 1e6 / max(1e-9, end - started),
        "peak_MB": peak_mb() - before,
        "buffers_MB": buffers.memory.nbytes / 1e6,
    }


def main() -> None:
    """Measure the cases that are named, or all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--one", nargs=2, metavar=("CASE", "PATH"), help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", help="parts of the names of cases; all if none is given")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(CASES[asked.one[0]], Path(asked.one[1]))))
        return
    print("| input | records | open, s | first batch after, s | records/s | MB/s | peak, MB | of these buffers, MB |")
    print("|---|---|---|---|---|---|---|---|")
    made: tuple[Callable[[Path], None], Path] | None = None
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="measure-inputs-") as folder:
        for name, case in CASES.items():
            if asked.cases and not any(part in name for part in asked.cases):
                continue
            if made is None or made[0] is not case.make:
                if made is not None:
                    shutil.rmtree(made[1]) if made[1].is_dir() else made[1].unlink()
                made = (case.make, Path(folder) / ("d" if case.format == "images" else f"d.{case.format}"))
                case.make(made[1])
            command = [sys.executable, __file__, "--one", name, str(made[1])]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            f = json.loads(done.stdout)
            print(
                f"| {name} | {f['records']:,} | {f['open_s']:.2f} | {f['first_s']:.2f} | {f['records_per_s']:,.0f} "
                f"| {f['MB_per_s']:,.0f} | {f['peak_MB']:,.0f} | {f['buffers_MB']:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
