#!/usr/bin/env python3
"""How long it takes to compute the key of a schedule, after everything is imported. No model is built.

    python scripts/bench_key.py [--device cpu] [--times 1000] [--json FILE]

Each figure is of one key from its request: the model's identity, the facts of the device, the hash. The first one in
the process reads versions and files that later ones have in memory.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.planner import Request, key_parts, schedule_key
from nimble_jobs.spec import ModelSpec

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
        results = [{"model": name, **measured(source, device, given.times)} for name, source in sources.items()]
    environment = {
        "device": devices.describe(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": dt.date.today().isoformat(),
        "cuda_initialised": torch.cuda.is_initialized(),
    }
    print(json.dumps({"environment": environment, "results": results}, indent=1))
    if given.json:
        given.json.write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n")


def project(folder: str) -> str:
    """A Python model that imports modules of two hundred lines each."""
    for i in range(NEIGHBOURS):
        (Path(folder) / f"part{i}.py").write_text("def layer(x):\n    return x + 1\n" * 100)
    text = "".join(f"import part{i}\n" for i in range(NEIGHBOURS))
    (Path(folder) / "net.py").write_text(f"import torch\n{text}\ndef make():\n    return torch.nn.ReLU()\n")
    return f"python:{folder}/net.py:make"


def measured(source: str, device: torch.device, times: int) -> dict[str, Any]:
    request = Request(model=ModelSpec(source=source), shape=(3, 224, 224), dtype="float32", batch_size=1)
    taken_ms = []
    for _ in range(times):
        start = time.perf_counter()
        schedule_key(key_parts(request, device))
        taken_ms.append((time.perf_counter() - start) * 1e3)
    ordered = sorted(taken_ms)
    return {
        "first_ms": round(taken_ms[0], 3),
        "median_ms": round(statistics.median(ordered), 3),
        "p99_ms": round(ordered[int(0.99 * (times - 1))], 3),
    }


if __name__ == "__main__":
    main()
