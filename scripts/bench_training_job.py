#!/usr/bin/env python3
"""Compare whole training jobs with a bare loop over their training step.

    python scripts/bench_training_job.py [MODEL[:SIZE[:STEPS]] ...] [--batch 32] [--fuse auto] [--json FILE]
    python scripts/bench_training_job.py resnet50:224:1200 --batch 64 --dtype bf16 --fuse auto --jpegs 8192

A job reads random images of SIZE x SIZE bytes from a file, crops and flips them, validates after each epoch of at
most 200 steps and keeps a checkpoint every 100 steps. With --jpegs, it reads a folder of so many JPEGs of 500x375
pixels in 1,000 folders of classes, decodes them in each of the ways that --decode names, takes random parts of them,
resized to SIZE x SIZE, and flips those; each way uses the schedule that the first one stored.

When a loop is over, the same process runs the step that the job ran over one batch that lies on the device, and the
forward pass that it validated with. A line for each job says which share of the bare speed it reached: `whole` counts
as bare time the steps and the validations, `steps` the steps alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nimble_jobs import client
from nimble_jobs import spec as specs
from nimble_jobs.bench.scoring import photos
from nimble_jobs.engine.device import describe, synchronize
from nimble_jobs.job import JobState
from nimble_jobs.store import home, open_store
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.workloads.context import Stop
from nimble_jobs.workloads.training import attempt as training_attempt
from nimble_jobs.workloads.training.batches.epochs import Epochs
from nimble_jobs.workloads.training.loop import Loop
from nimble_jobs.workloads.training.step.setup import evaluating

TRANSFORM = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
BAR = 0.95
BAR_JPEGS = 0.93
CLASSES = 10
FOLDERS = 1000  # classes of JPEGs
JPEG = {"width": 500, "height": 375}
BATCHES = 200  # of an epoch, at most
HELD_OUT = 20  # training batches for each batch of a validation
ROUND = 20  # bare steps between two looks at the clock
RATE = 1e-4


class Timed(Loop):
    """A training's loop that also measures its own time and, afterwards, the time of what it launched."""

    seconds = 2.0  # of each bare loop
    figures: dict[str, Any]

    def run(self) -> Stop:
        step, validation, epochs = self.stages.step, self.stages.validation, self.plan.epochs
        assert validation is not None
        assert isinstance(epochs, Epochs)
        assert epochs.data.held_out is not None
        x, y = step.inputs.values()
        synchronize(x.device)
        start = time.perf_counter()
        stop = super().run()
        synchronize(x.device)
        run_s = time.perf_counter() - start
        step_s = self._bare(lambda: step.run(x, y, RATE), x.device)
        with evaluating(validation.setup.module):
            forward_s = self._bare(lambda: validation.forward(x), x.device)
        validated = -(-epochs.data.held_out.total // epochs.sampler.batch_size) * len(self.progress.epochs)
        steps_s = self.progress.step * step_s
        Timed.figures = {
            "device": describe(x.device),
            "steps": self.progress.step,
            "run_s": run_s,
            "step_ms": step_s * 1e3,
            "forward_ms": forward_s * 1e3,
            "validation_batches": validated,
            "whole": (steps_s + validated * forward_s) / run_s,
            "share_of_steps": steps_s / run_s,
        }
        return stop

    def _bare(self, launch: Callable[[], Any], device: torch.device) -> float:
        """Seconds of one call: the median of rounds, over the seconds that are to be spent."""
        rounds: list[float] = []
        for warm_up in (True, False):
            end = time.perf_counter() + (0.1 if warm_up else 1.0) * self.seconds
            rounds.clear()
            while not rounds or time.perf_counter() < end:
                start = time.perf_counter()
                for _ in range(ROUND):
                    launch()
                synchronize(device)
                rounds.append((time.perf_counter() - start) / ROUND)
        return statistics.median(rounds)


def write(path: Path, records: int, size: int, seed: int) -> None:
    """Random images and labels."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (records, 3, size, size), dtype=np.uint8)
    np.savez(path, x=images, y=rng.integers(0, CLASSES, records))


def arrays(folder: Path, size: int, steps: int, batch: int) -> dict[str, Any]:
    """The sections of a spec that trains on arrays, which are written."""
    epochs = -(-steps // BATCHES)
    records = max(2, steps // epochs) * batch
    write(folder / "train.npz", records, size, 0)
    write(folder / "held-out.npz", -(-records // HELD_OUT), size, 1)
    return {
        "model": {"args": {"num_classes": CLASSES}},
        "input": {
            "source": str(folder / "train.npz"),
            "format": "npz",
            "fields": {"x": "x", "label": "y"},
            "transform": TRANSFORM,
        },
        "train": {
            "epochs": epochs,
            "augment": {"crop_padding": 4, "flip": "horizontal"},
            "validation": {"source": str(folder / "held-out.npz")},
        },
    }


def jpegs(folder: Path, size: int, steps: int, batch: int, count: int) -> dict[str, Any]:
    """The sections of a spec that trains on JPEGs in folders of classes, which are made."""
    made = photos.provide(
        folder / "photos",
        photos.Recipe(count=count, **JPEG, photos=tuple(p.name for p in photos.sources())),
        photos.sources(),
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    held_out = len(made) // HELD_OUT
    for number, path in enumerate(made):
        kept = folder / ("held-out" if number < held_out else "train") / f"{number % FOLDERS:04d}"
        kept.mkdir(parents=True, exist_ok=True)
        (kept / path.name).hardlink_to(path)
    return {
        "model": {"args": {"num_classes": FOLDERS}},
        "input": {
            "source": str(folder / "train"),
            "format": "images",
            "fields": {"label": "parent"},
            "transform": {"resize": size * 8 // 7, "center_crop": size, **TRANSFORM},
        },
        "train": {
            "epochs": -(-steps * batch // (len(made) - held_out)),
            "augment": {"random_resized_crop": True, "flip": "horizontal"},
            "validation": {"source": str(folder / "held-out")},
        },
    }


def measure(folder: Path, model: str, size: int, steps: int, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the jobs of one model, and what they are compared with. Raises RuntimeError where one fails."""
    if given.jpegs:
        sections = jpegs(folder, size, steps, given.batch, given.jpegs)
    else:
        sections = arrays(folder, size, steps, given.batch)
    sections["model"] |= {"source": f"torchvision:{model}", "dtype": given.dtype}
    sections["input"]["batch_size"] = given.batch
    sections["train"] |= {
        "optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.9},
        "last_batch": "drop",
        "checkpoint": {"every_steps": given.every_steps},
    }
    spec = {
        "version": 1,
        "name": "bench",
        "kind": "finetune",
        "output": {"path": str(folder / "out"), "if_exists": "replace"},
        "schedule": {"fuse": given.fuse, "progressive": False},
        **sections,
    }
    Timed.seconds = given.seconds
    for decode in given.decode if given.jpegs else [None]:
        if decode is not None:
            spec["input"]["decode"] = decode
        start = time.perf_counter()
        with closing(open_store(home.resolve(str(folder / "home")))) as store:
            job = client.submit(specs.restore(spec), store=store, foreground=True)
            ended = run_inline(store, job.id)
            events = store.jobs.events(job.id)
        if ended.state is not JobState.SUCCEEDED:
            raise RuntimeError(f"{model}: {ended.error}")
        timings, schedule = ended.timings, ended.schedule
        found = {"model": model, "size": size, "batch": given.batch, "dtype": given.dtype, "decode": decode}
        found |= Timed.figures
        found |= {name: timings[name] for name in ("build_s", "checkpoints", "checkpoint_wait_s", "stages")}
        names = ("key", "hit", "runs", "validation", "kernels", "layout", "streams", "fallback")
        found |= {name: schedule.get(name) for name in names}
        found |= {"bar": BAR_JPEGS if given.jpegs else BAR, "jpegs": given.jpegs, "cores": len(os.sched_getaffinity(0))}
        found |= {"events": [f"{event.kind}: {event.message}" for event in events if event.kind != "epoch"]}
        yield found | {"all_s": time.perf_counter() - start, "torch": torch.__version__}


def line(found: dict[str, Any]) -> str:
    """What is printed of one model."""
    name = f"{found['model']} {found['size']}x{found['size']} batch {found['batch']} {found['dtype']}"
    if found["decode"] is not None:
        name += f", {found['jpegs']} JPEGs, decode {found['decode']}, {found['cores']} cores"
    told = "reaches" if found["whole"] >= found["bar"] else "misses"
    stages = ", ".join(f"{stage['name']} {stage['busy']:.0%}" for stage in found["stages"])
    return (
        f"{name}: {found['whole']:.3f} whole, {found['share_of_steps']:.3f} steps ({found['steps']} in "
        f"{found['run_s']:.2f} s, {found['step_ms']:.2f} ms bare, {found['runs']}), {told} {found['bar']}; {stages}; "
        f"{found['device']}"
    )


def asked(text: str) -> tuple[str, int, int]:
    """Model, size of its images, number of steps. Raises ArgumentTypeError."""
    model, *numbers = text.split(":")
    if len(numbers) > 2 or not all(n.isdecimal() and int(n) for n in numbers):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected MODEL, MODEL:SIZE or MODEL:SIZE:STEPS")
    size, steps = (*map(int, numbers), *(32, 600)[len(numbers) :])
    return model, size, steps


def main() -> int:
    """Print a line for each model. 1 where one misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", default=[asked("mobilenet_v2")], type=asked, metavar="MODEL[:SIZE[:STEPS]]"
    )
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--jpegs", type=int, default=0, help="train on so many JPEGs, a twentieth of them held out")
    parser.add_argument("--decode", nargs="+", choices=["cpu", "gpu", "auto"], default=["gpu", "cpu"])
    parser.add_argument("--every-steps", type=int, default=100)
    parser.add_argument("--fuse", default="off", help="auto also tries fused kernels, which takes a minute to compile")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each bare loop")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    training_attempt.Loop = Timed  # type: ignore[attr-defined]
    results = []
    for model, size, steps in given.models:
        with tempfile.TemporaryDirectory() as folder:
            for found in measure(Path(folder), model, size, steps, given):
                results.append(found)
                print(line(found), flush=True)
                if given.json:
                    given.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(found["whole"] >= found["bar"] for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
