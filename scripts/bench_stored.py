#!/usr/bin/env python3
"""Measure what it brings that records cross to the device as they are stored.

    python scripts/bench_stored.py [--model torchvision:resnet50] [--batch 128] [--records 2048] [--json FILE]

First the reader alone: records a second of images of 224x224 in a file of arrays, as stored and with the arithmetic on
the host; the file is cached. Then, on a GPU, the schedule of the model in fp16 over stored bytes (NHWC, NCHW) and over
images that are ready: microseconds of a replay, tasks, and the bytes of a batch that cross.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import environment, save

from nimble_jobs.data import Wanted, open_reader
from nimble_jobs.data.transform import bind
from nimble_jobs.engine.device import describe
from nimble_jobs.planner import Request, prepare
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.spec.model import InputSpec
from nimble_jobs.spec.transform import TransformSpec
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents

ROUNDS = 3
TRANSFORM = TransformSpec(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), scale=1 / 255)
KINDS = {
    "uint8 NHWC": ("uint8", (224, 224, 3)),
    "uint8 NCHW": ("uint8", (3, 224, 224)),
    "float16 NCHW": ("float16", (3, 224, 224)),
    "float32 NCHW": ("float32", (3, 224, 224)),
}


def read(kind: str, records: int, batch: int, folder: Path) -> dict[str, Any]:
    """Records a second, the best of a few rounds."""
    dtype, shape = KINDS[kind]
    path = folder / "x.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, (records, *shape), dtype=np.uint8).astype(dtype))
    spec = InputSpec(source=str(path), format="npy", batch_size=batch, transform=TRANSFORM)
    row: dict[str, Any] = {"records": kind}
    for name, stored in (("host", False), ("stored", True)):
        rates = []
        for _ in range(ROUNDS):
            with open_reader(spec) as reader:
                start = time.perf_counter()
                seen = sum(len(b) for b in reader.batches(batch_size=batch, wanted=Wanted(stored=stored)))
                rates.append(seen / (time.perf_counter() - start))
        row[f"{name}_per_s"] = round(max(rates))
    path.unlink()
    return row


def replay(model: str, batch: int, kind: str | None, folder: Path) -> dict[str, Any]:
    """The schedule over stored records, or, for None, over images that are ready."""
    dtype, shape = KINDS[kind or "float32 NCHW"]
    bound = bind(TRANSFORM, shape, np.dtype(dtype), "x")
    request = Request(
        model=ModelSpec(source=model, dtype="fp16"),
        shape=bound.signature.shape,
        dtype=bound.signature.dtype,
        batch_size=batch,
        preprocess=bound.preprocess if kind else None,
        schedule=ScheduleSpec(in_flight=1),
    )
    device = torch.device("cuda", 0)
    with open_store(resolve(str(folder / "home"))) as store:
        made = prepare(request, device=device, store=store, residents=Residents(2**36))
        schedule = made.loaded.schedule
        row = {
            "input": kind or "ready fp16 NCHW",
            "replay_us": schedule.replay_us if schedule else None,
            "tasks": schedule.facts.tasks if schedule else None,
            "kernels": schedule.kernels if schedule else None,
            "batch_bytes": math.prod(request.input_shape) * request.input_dtype.itemsize,
            "fallback": made.loaded.fallback,
        }
        made.loaded.close()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Stored records against records that the host makes ready.")
    parser.add_argument("--model", default="torchvision:resnet50")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--records", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else None
    found: dict[str, Any] = {
        "environment": environment(device=device and describe(device)),
        "reading": [],
        "replays": [],
    }
    with tempfile.TemporaryDirectory() as name:
        for kind in KINDS:
            found["reading"].append(read(kind, given.records, given.batch, Path(name)))
            print(found["reading"][-1])
        if device is not None:
            for stored in (None, "uint8 NHWC", "uint8 NCHW"):
                found["replays"].append(replay(given.model, given.batch, stored, Path(name)))
                print(found["replays"][-1])
    save(given.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
