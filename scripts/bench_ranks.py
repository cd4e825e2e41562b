"""Fine-tuning on several devices beside one, with the same global batch: records a second, and how far losses differ.

    python scripts/bench_ranks.py [--gpus 2] [--models resnet50,mobilenet_v2] [--size 224] [--batch 256] [--steps 60]
                                  [--dtype bf16] [--device auto] [--lr 0.01] [--on-miss build] [--fuse auto]

Records are random pictures in one array, so that decoding is no part of it. Prints a line of JSON for each job, and one
that compares both. `worst_loss_difference` is the largest relative one over all steps. Needs so many free GPUs; with
`--device cpu` the ranks share the cores, which measures the losses but not the speed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nimble_jobs import client
from nimble_jobs.engine import device as devices
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.foreground import run_inline

_BATCHES = 8  # in the array: an epoch
SPEC = """\
version: 1
name: {model}-{gpus}
kind: finetune
model: {{source: "torchvision:{model}", args: {{num_classes: 10}}, dtype: {dtype}}}
input: {{source: records.npz, format: npz, fields: {{x: images, label: labels}}, batch_size: {batch}}}
output: {{path: out/{model}-{gpus}, if_exists: replace}}
schedule: {{on_miss: {on_miss}, fuse: "{fuse}"}}
train: {{epochs: {epochs}, optimizer: {{name: sgd, lr: {lr}, momentum: 0.9}}, checkpoint: null}}
run: {{device: {device}, gpus: {gpus}}}
"""


def main() -> int:
    """Measure each model on one device and on several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", default="resnet50,mobilenet_v2")
    parser.add_argument("--size", type=int, default=224, help="height and width of pictures, pixels")
    parser.add_argument("--batch", type=int, default=256, help="records of a batch, on all devices together")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--on-miss", default="build")
    parser.add_argument("--fuse", choices=("auto", "off", "max"), default="auto", help="off builds in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        count = _BATCHES * options.batch
        images = rng.integers(0, 256, (count, options.size, options.size, 3), dtype=np.uint8)
        np.savez(folder / "records.npz", images=images, labels=rng.integers(0, 10, count))
        with open_store(resolve(str(folder / "home"))) as store:
            for model in options.models.split(","):
                print(json.dumps(_compared(store, folder, model, options)), flush=True)
    return 0


def _compared(store: Store, folder: Path, model: str, options: argparse.Namespace) -> dict[str, Any]:
    one, several = (_trained(store, folder, model, gpus, options) for gpus in (1, options.gpus))
    losses = [_losses(folder / "out" / f"{model}-{gpus}") for gpus in (1, options.gpus)]
    return {
        "model": model,
        "size": options.size,
        "batch": options.batch,
        "dtype": options.dtype,
        "gpus": options.gpus,
        "device": devices.describe(devices.resolve(options.device)),
        "torch": torch.__version__,
        "one_records_per_s": round(one.timings["records_per_s"], 1),
        "several_records_per_s": round(several.timings["records_per_s"], 1),
        "ratio": round(several.timings["records_per_s"] / one.timings["records_per_s"], 3),
        "runs": [job.schedule["runs"] for job in (one, several)],
        "steps": len(losses[0]),
        "first_loss_difference": float(abs(losses[1] / losses[0] - 1)[0]),
        "worst_loss_difference": float(abs(losses[1] / losses[0] - 1).max()),
        "last_losses": [float(column[-1]) for column in losses],
    }


def _trained(store: Store, folder: Path, model: str, gpus: int, options: argparse.Namespace) -> Job:
    spec = folder / f"{model}-{gpus}.yaml"
    given = {name: getattr(options, name) for name in ("batch", "dtype", "lr", "device", "on_miss", "fuse")}
    spec.write_text(SPEC.format(model=model, gpus=gpus, epochs=-(-options.steps // _BATCHES), **given))
    queued = client.submit(spec, store=store, foreground=True)
    done = run_inline(store, queued.id)
    assert done.state is JobState.SUCCEEDED, done.error
    figures = {name: done.timings.get(name) for name in ("build_s", "run_s", "records_per_s")}
    print(json.dumps({"model": model, "gpus": gpus, **figures}), flush=True)
    return done


def _losses(folder: Path) -> np.ndarray:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if line["kind"] == "step"])


if __name__ == "__main__":
    raise SystemExit(main())
