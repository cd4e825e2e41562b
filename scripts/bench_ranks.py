"""Fine-tuning on several devices beside one, with the same global batch: records a second, and how far losses differ.

    python scripts/bench_ranks.py [--gpus 2] [--models resnet50,mobilenet_v2] [--size 224] [--batch 256] [--steps 64]
                                  [--dtype bf16] [--device auto] [--lr 0.01] [--on-miss eager,build] [--fuse auto]

Records are random pictures in one array, so that decoding is no part of it. Prints a line of JSON for each job once it
has ended, and one that compares both. Trainings in eager, which need no build, come first, and of each pair that on
several devices, so that the first figures come early. Phases go to standard error as they begin.

With --shares, the one device accumulates as many smaller batches a step as there are devices. Then batch normalisation
sees the same records together on both sides, and losses differ by rounding and dropout alone. For MobileNetV2
--args '{"dropout": 0}' leaves dropout out. Records a second of the two do not compare then.

`steady_records_per_s` counts from a fifth of the records on, so without the start; `ratio` compares these.
`loss_differences` has the relative one of each step, and `worst_loss_difference` is the largest. Needs so many free
GPUs; with `--device cpu` the ranks share the cores, so there is no ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import product
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
name: {name}
kind: finetune
model: {{source: "torchvision:{model}", args: {args}, dtype: {dtype}}}
input: {{source: records.npz, format: npz, fields: {{x: images, label: labels}}, batch_size: {batch}}}
output: {{path: out/{name}, if_exists: replace}}
schedule: {{on_miss: {on_miss}, fuse: "{fuse}", progressive: false}}
train:
  epochs: {epochs}
  optimizer: {{name: sgd, lr: {lr}, momentum: 0.9}}
  accumulate: {accumulate}
  checkpoint: null
run: {{device: {device}, gpus: {gpus}}}
"""


def main() -> int:
    """Measure each model on one device and on several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", default="resnet50,mobilenet_v2")
    parser.add_argument("--size", type=int, default=224, help="height and width of pictures, pixels")
    parser.add_argument("--batch", type=int, default=256, help="records of a batch, on all devices together")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--on-miss", default="eager,build", help="one or both, in this order")
    parser.add_argument("--fuse", choices=("auto", "off", "max"), default="auto", help="off builds in seconds")
    parser.add_argument("--shares", action="store_true", help="one device accumulates the shares of several")
    parser.add_argument("--args", type=json.loads, default={}, help="of the models, beside num_classes; as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        count = _BATCHES * options.batch
        images = rng.integers(0, 256, (count, options.size, options.size, 3), dtype=np.uint8)
        np.savez(folder / "records.npz", images=images, labels=rng.integers(0, 10, count))
        bench = _Bench(folder, options)
        with open_store(resolve(str(folder / "home"))) as store:
            for on_miss, model in product(options.on_miss.split(","), options.models.split(",")):
                bench.compare(store, model, on_miss)
    return 0


class _Watch:
    """Sees the progress of one job."""

    def __init__(self, name: str) -> None:
        self._name, self._began = name, time.perf_counter()
        self._phase: object = None
        self._step = 0
        self._points: list[tuple[float, int]] = []  # seconds, records done

    def __call__(self, report: dict[str, Any]) -> None:
        now, phase = time.perf_counter() - self._began, report.get("phase")
        if phase not in (None, self._phase):
            self._phase = phase
            print(f"{self._name}: {phase} after {now:.1f} s", file=sys.stderr, flush=True)
        step = (report.get("timings") or {}).get("step", 0)
        if step > self._step:  # later reports come after the other processes have ended
            self._step = step
            self._points.append((now, report["done"]))

    @property
    def steady_records_per_s(self) -> float | None:
        """Records a second from a fifth of them on; None if too few reports came."""
        from_here = [point for point in self._points if 5 * point[1] >= self._points[-1][1]]
        if len(from_here) < 2 or from_here[0] == from_here[-1]:
            return None
        (start, before), (end, after) = from_here[0], from_here[-1]
        return (after - before) / (end - start)


class _Bench:
    """Trains models in one folder."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._on_cpu = devices.resolve(options.device).type == "cpu"

    def compare(self, store: Store, model: str, on_miss: str) -> None:
        """Print a line for the job on several devices, one for that on one, and one for both."""
        counts = (self._options.gpus, 1)
        trained = [self._trained(store, model, gpus, on_miss) for gpus in counts]
        if any(job.state is not JobState.SUCCEEDED for job, _ in trained):
            return
        several, one = (self._losses(model, gpus, on_miss) for gpus in counts)
        fast, slow = (watch.steady_records_per_s for _, watch in trained)
        far = np.abs(several / one - 1)
        self._say(
            model=model,
            on_miss=on_miss,
            size=self._options.size,
            batch=self._options.batch,
            dtype=self._options.dtype,
            device=devices.describe(devices.resolve(self._options.device)),
            torch=torch.__version__,
            shares=self._options.shares,
            ratio=None if self._on_cpu or self._options.shares or not fast or not slow else round(fast / slow, 3),
            runs=[job.schedule["runs"] for job, _ in trained],
            steps=len(one),
            first_loss_difference=float(far[0]),
            loss_differences=[float(f"{one:.1e}") for one in far],
            worst_loss_difference=float(far.max()),
            last_losses=[float(several[-1]), float(one[-1])],
        )

    def _trained(self, store: Store, model: str, gpus: int, on_miss: str) -> tuple[Job, _Watch]:
        name = f"{model}-{on_miss}-{gpus}"
        spec = self._folder / f"{name}.yaml"
        given = {key: getattr(self._options, key) for key in ("dtype", "lr", "device", "fuse")}
        pieces = self._options.gpus if self._options.shares and gpus == 1 else 1
        given |= {"batch": self._options.batch // pieces, "accumulate": pieces}
        given["args"] = json.dumps({"num_classes": 10} | self._options.args)
        epochs = -(-self._options.steps // _BATCHES)
        spec.write_text(SPEC.format(name=name, model=model, gpus=gpus, epochs=epochs, on_miss=on_miss, **given))
        queued = client.submit(spec, store=store, foreground=True)
        watch = _Watch(name)
        done = run_inline(store, queued.id, on_report=watch)
        steady = watch.steady_records_per_s
        figures = {key: done.timings.get(key) for key in ("build_s", "run_s", "records_per_s")}
        figures["steady_records_per_s"] = None if steady is None else round(steady, 1)
        self._say(model=model, gpus=gpus, on_miss=on_miss, state=done.state.value, error=done.error, **figures)
        return done, watch

    def _losses(self, model: str, gpus: int, on_miss: str) -> np.ndarray:
        path = self._folder / "out" / f"{model}-{on_miss}-{gpus}" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return np.array([line["loss"] for line in lines if line["kind"] == "step"])

    def _say(self, **line: Any) -> None:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
