#!/usr/bin/env python3
"""Time the start of a fresh process up to its first checked replay: without a stored schedule, and with one.

    python scripts/bench_start.py [--models resnet18,...] [--device cpu] [--dtype fp32] [--rounds 3] [--json FILE]

The clock starts once torch is imported and the device answers; it stops after the first batch. Models: names of
torchvision's, or zoo:NAME for the networks of nimble_jobs.models.zoo. Each model has a schedule store of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ZOO = """\
from nimble_jobs.models import zoo


def make():
    return zoo.create("{name}")
"""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="resnet18,resnet50", help="commas between (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--dtype", default="fp32", help="fp32, fp16 or bf16 (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="records a batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="processes that find the schedule (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "HOME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        model, home = options.child
        print(json.dumps(start(model, home, options)))
        return 0
    rows = [measured(model, options) for model in options.models.split(",")]
    if options.json:
        environment = rows[0].pop("environment")
        for row in rows[1:]:
            row.pop("environment")
        options.json.write_text(json.dumps({"environment": environment, "results": rows}, indent=1) + "\n")
    return 0 if all(row["hits"] == ["miss", *["stored"] * options.rounds] for row in rows) else 1


def measured(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """One process that builds the schedule, and several that find it."""
    with tempfile.TemporaryDirectory(prefix="nimble-jobs-") as home:
        settings = ["--device", options.device, "--dtype", options.dtype, "--batch", str(options.batch)]
        command = [sys.executable, __file__, *settings, "--child", model, home]
        found = []
        for _ in range(1 + options.rounds):
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    miss, stored = found[0], found[1:]
    row = {
        "model": model,
        "dtype": options.dtype,
        "batch": options.batch,
        "hits": [f["hit"] for f in found],
        "miss_s": miss["start_s"],
        "stored_s": statistics.median(f["start_s"] for f in stored),
        "stored_model_s": statistics.median(f["model_s"] for f in stored),
        "import_s": statistics.median(f["import_s"] for f in stored),
        "modules": stored[0]["modules"],
        "environment": miss["environment"],
    }
    print(
        f"{model} {options.dtype} batch {options.batch}: miss {row['miss_s']:.2f} s, stored {row['stored_s']:.2f} s "
        f"(of which the model {row['stored_model_s']:.2f} s), {row['miss_s'] / row['stored_s']:.1f}x less; "
        f"imports before {row['import_s']:.2f} s",
        flush=True,
    )
    return row


def start(model: str, home: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: the seconds up to the first batch."""
    begin = time.perf_counter()
    import torch

    from nimble_jobs import planner
    from nimble_jobs.bench.environment import environment
    from nimble_jobs.engine import device as devices
    from nimble_jobs.models import zoo
    from nimble_jobs.spec import ModelSpec
    from nimble_jobs.store import open_store
    from nimble_jobs.store.home import resolve
    from nimble_jobs.worker.residency import Residents, default_budget_bytes

    device = devices.resolve(options.device)
    torch.zeros(1, device=device)
    ready = time.perf_counter()
    source = f"torchvision:{model}"
    shape: tuple[int, ...] = (3, 224, 224)
    if model.startswith("zoo:"):
        file = Path(home) / "model.py"
        file.write_text(ZOO.format(name=model.removeprefix("zoo:")))
        source, shape = f"python:{file}:make", zoo.ZOO[model.removeprefix("zoo:")].input_shape
    request = planner.Request(
        model=ModelSpec(source=source, dtype=options.dtype),
        shape=shape,
        dtype="float32",
        batch_size=options.batch,
        allowed_python=(Path(home),),
    )
    with open_store(resolve(str(Path(home) / "home"))) as store:
        residents = Residents(default_budget_bytes(str(device)))
        prepared = planner.prepare(request, device=device, store=store, residents=residents)
        batch = torch.zeros(request.input_shape, dtype=request.input_dtype)
        for _ in prepared.loaded.run([(batch, None)]):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        end = time.perf_counter()
        found = {
            "hit": prepared.hit.value,
            "fallback": prepared.loaded.fallback,
            "start_s": end - ready,
            "model_s": prepared.load_s,
            "import_s": ready - begin,
            "modules": [m for m in ("torch._dynamo", "torch._inductor.compile_fx", "triton") if m in sys.modules],
            "environment": environment(device),
        }
        residents.clear()
    return found


if __name__ == "__main__":
    sys.exit(main())
