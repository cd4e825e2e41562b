#!/usr/bin/env python3
"""How long it takes to compute the key of a schedule, and what a resident hit costs a job before its first replay.

    python scripts/bench_key.py [--device cpu] [--times 1000] [--json FILE]

A key is made from its request: the model's identity, the facts of the device, the hash; no model is built. The first
one in the process reads versions and files that later ones have in memory. A resident hit is all that a job does
between its request and its first replay, the key included; what it notes is written with the next transaction, which
is not counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import environment, save, summary

from nimble_jobs.engine import device as devices
from nimble_jobs.job import Hit
from nimble_jobs.planner import Request, key_parts, prepare, schedule_key
from nimble_jobs.spec import ModelSpec
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents

NEIGHBOURS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = devices.resolve(given.device)
    with tempfile.TemporaryDirectory() as folder:
        sources = {"torchvision:resnet50": "torchvision:resnet50", f"python, {NEIGHBOURS + 1} files": project(folder)}
        requests = {name: request(source) for name, source in sources.items()}
        results = [
            {"what": f"key, {name}", **measured(partial(key, r, device), given.times)} for name, r in requests.items()
        ]
        results.append(resident_hit(request("torchvision:resnet50"), device, Path(folder) / "home", given.times))
    where = environment(device=devices.describe(device), cuda_initialised=torch.cuda.is_initialized())
    print(json.dumps({"environment": where, "results": results}, indent=1))
    save(given.json, {"environment": where, "results": results})


def project(folder: str) -> str:
    """A Python model that imports modules of two hundred lines each."""
    for i in range(NEIGHBOURS):
        (Path(folder) / f"part{i}.py").write_text("def layer(x):\n    return x + 1\n" * 100)
    text = "".join(f"import part{i}\n" for i in range(NEIGHBOURS))
    (Path(folder) / "net.py").write_text(f"import torch\n{text}\ndef make():\n    return torch.nn.ReLU()\n")
    return f"python:{folder}/net.py:make"


def request(source: str) -> Request:
    return Request(model=ModelSpec(source=source), shape=(3, 224, 224), dtype="float32", batch_size=1)


def key(wanted: Request, device: torch.device) -> str:
    return schedule_key(key_parts(wanted, device))


def resident_hit(wanted: Request, device: torch.device, home: Path, times: int) -> dict[str, Any]:
    """With a store on disk and the model kept by a worker's residency."""
    with open_store(resolve(str(home))) as store:
        residents = Residents(2**40)

        def hit() -> None:
            residents.begin()
            assert prepare(wanted, device=device, store=store, residents=residents).hit is Hit.RESIDENT

        stored = prepare(wanted, device=device, store=store, residents=residents).loaded.key
        found = measured(hit, times, before=lambda: store.schedules.ready(stored))
        residents.clear()
    return {"what": "resident hit, torchvision:resnet50", **found}


def measured(work: Callable[[], object], times: int, before: Callable[[], object] = lambda: None) -> dict[str, float]:
    taken_ms = []
    for _ in range(times):
        before()
        start = time.perf_counter()
        work()
        taken_ms.append((time.perf_counter() - start) * 1e3)
    return {"first_ms": round(taken_ms[0], 3), **summary(taken_ms)}


if __name__ == "__main__":
    main()
