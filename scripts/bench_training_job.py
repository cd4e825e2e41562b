#!/usr/bin/env python3
"""Compare a whole training job (data, augmentation, validation, checkpoints) with a bare loop over its training step.

    python scripts/bench_training_job.py [--model mobilenet_v2] [--batch 32] [--every-steps 100] [--json FILE]

The job reads images of CIFAR's size from a file, crops and flips them, validates after each epoch, and keeps a
checkpoint every so many steps. The loop runs the same step, with the kernels and layout that the job chose, over one
batch that lies on the device. Reported is the share of the loop's steps a second that the job reaches: with
everything, and without the time of validations.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nimble_jobs import spec as specs
from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.planner.source import Source
from nimble_jobs.planner.training import prepare_step
from nimble_jobs.workloads.training.setup import prepare

SPEC = """\
version: 1
name: bench
kind: finetune
model: {{source: "torchvision:{model}", args: {{num_classes: 10}}, dtype: {dtype}}}
input:
  source: train.npz
  format: npz
  fields: {{x: x, label: y}}
  batch_size: {batch}
  transform: {{mean: [0.5], std: [0.25]}}
output: {{path: out, if_exists: replace}}
train:
  epochs: {epochs}
  optimizer: {{name: sgd, lr: 0.01, momentum: 0.9}}
  augment: {{crop_padding: 4, flip: horizontal}}
  last_batch: drop
  checkpoint: {{every_steps: {every_steps}}}
"""
VALIDATION = "  validation: {source: held-out.npz}\n"


def write(path: Path, records: int, seed: int) -> None:
    """Random images of 32x32 and labels of ten classes."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (records, 3, 32, 32), dtype=np.uint8)
    np.savez(path, x=images, y=rng.integers(0, 10, records))


def run(spec: Path) -> dict[str, Any]:
    """Run a job in a process of its own; what `show` says of it."""
    home = ["--home", str(spec.parent / "home")]
    command = [sys.executable, "-m", "nimble_jobs.cli.main", *home]
    subprocess.run([*command, "run", str(spec), "-q"], check=True, stdout=subprocess.DEVNULL)
    shown = subprocess.run([*command, "show", "bench", "--json"], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def bare_steps_per_s(spec: specs.JobSpec, schedule: dict[str, Any], seconds: float) -> float:
    """Steps a second of the same step over one batch that does not change."""
    device = devices.resolve("auto")
    with open_reader(spec.input) as reader:
        ready = prepare(spec, reader, device, ())
    only = Source(kernels=schedule["kernels"], layout=schedule["layout"])
    torch.backends.cudnn.deterministic = True  # as in the job
    step = prepare_step(replace(ready.request, only=only), device=device)
    x, y = step.inputs.values()
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(50):
            step.run(x, y, 0.01)
        devices.synchronize(device)
        steps += 50
    return steps / (time.perf_counter() - start)


def main() -> int:
    """Print the comparison as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mobilenet_v2")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every-steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the bare loop")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        write(folder / "train.npz", given.records, 0)
        write(folder / "held-out.npz", given.records // 5, 1)
        text = SPEC.format(**vars(given))
        path = folder / "bench.yaml"
        path.write_text(text)
        without = run(path)
        path.write_text(text + VALIDATION)
        whole = run(path)
        bare = bare_steps_per_s(specs.load(path), whole["schedule"], given.seconds)
    result = {
        "device": whole["schedule"]["device"],
        "torch": torch.__version__,
        **{k: v for k, v in vars(given).items() if k != "json"},
        "bare_steps_per_s": round(bare, 1),
        "job_steps_per_s": round(whole["timings"]["steps_per_s"], 1),
        "job_share": round(whole["timings"]["steps_per_s"] / bare, 4),
        "without_validation_steps_per_s": round(without["timings"]["steps_per_s"], 1),
        "without_validation_share": round(without["timings"]["steps_per_s"] / bare, 4),
        "checkpoints": whole["timings"]["checkpoints"],
        "checkpoint_wait_s": round(whole["timings"]["checkpoint_wait_s"], 4),
        "validation": whole["schedule"]["validation"],
        "kernels": whole["schedule"]["kernels"],
        "layout": whole["schedule"]["layout"],
    }
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
