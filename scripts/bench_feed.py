#!/usr/bin/env python3
"""Measure how fast the JPEGs of a folder become rows on the GPU: decoded, resized to 224x224, nothing else.

    python scripts/bench_feed.py FOLDER [--batch 64] [--threads 1 2] [--seconds 5] [--limit 4096] [--json FILE]

Files are read into pinned memory first, so neither the disk nor the readers are measured. Pictures that the device does
not take are counted, with the reasons. `available_s` is what a job pays once before its first batch: nvJPEG, our kernel
and a test picture. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from bench_decoders import SIZE, cut, rate, write
from PIL import Image

from nimble_jobs.engine.pictures import PictureDecoder, available, decoder_name


def jpegs(folder: Path, limit: int) -> list[bytes]:
    """The first files of a folder, by name, that Pillow takes for JPEGs."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))[:limit]:
        try:
            with Image.open(path) as image:
                image.size  # noqa: B018 - reads the header
        except OSError as e:
            print(f"{path}: {e}", file=sys.stderr)
            continue
        found.append(path.read_bytes())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--limit", type=int, default=4096, help="files")
    parser.add_argument("--json", type=Path, help="also write the object here")
    given = parser.parse_args()
    device = torch.device("cuda", 0)
    began = time.perf_counter()
    torch.zeros(1, device=device if torch.cuda.is_available() else "cpu")
    context_s, began = time.perf_counter() - began, time.perf_counter()
    if (reason := available(device)) is not None:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 1
    available_s = time.perf_counter() - began
    encoded = jpegs(given.folder, given.limit)
    if not encoded:
        print(f"{given.folder}: no JPEGs", file=sys.stderr)
        return 2
    batches = cut(encoded, given.batch)
    refusals: Counter[str] = Counter()

    def make() -> PictureDecoder:
        decoder = PictureDecoder(device, *SIZE, 3, SIZE)
        decoder.refusals = refusals
        return decoder

    results = []
    for threads in given.threads:
        refusals.clear()
        row = {
            "threads": threads,
            "batch": given.batch,
            "sizes": len({tuple(s) for b in batches for s in b.sizes.tolist()}),
        }
        row |= rate(batches, make, threads=threads, seconds=given.seconds, failures=True)
        results.append(row | {"refused": dict(refusals)})
    found = {
        "decoder": decoder_name(),
        "context_s": round(context_s, 3),
        "available_s": round(available_s, 3),
        "images": len(encoded),
        "bytes": sum(map(len, encoded)),
        "sizes": len({tuple(size) for batch in batches for size in batch.sizes.tolist()}),
        "results": results,
    }
    write(found, device, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
