#!/usr/bin/env python3
"""Compare a fine-tuning job, loss by loss, with the same training written out in plain PyTorch.

    python scripts/compare_training.py [SPEC] [--device auto] [--on-miss build] [--home FOLDER] [--json FILE]

SPEC is a classification with SGD, by default jobs/digits-train.yaml, for which scripts/quickstart_data.py writes the
data; what the plain loop below does not know is refused. The plain training has the job's weights to start
from, its records in the same order, its crops, rates and decay, and the switches of torch that trainings run with; its
step is a loop over eager PyTorch. How far apart losses may be expected to lie is shown by a second plain training
that differs in the memory format of its activations alone: rounding errors grow from step to step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs import client
from nimble_jobs import spec as specs
from nimble_jobs.data import Reader, open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.job import JobState
from nimble_jobs.models.build import build
from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.store import home, open_store
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.workloads.training.batches.augment import Augment, Pixels
from nimble_jobs.workloads.training.batches.epochs import Sampler
from nimble_jobs.workloads.training.step.learning_rate import LearningRate
from nimble_jobs.workloads.training.step.setup import evaluating

BAR = 0.98  # accuracy on records held out


@dataclass(frozen=True)
class Curve:
    """Losses of all steps, float64 [steps], and the accuracy on held-out records after each epoch."""

    losses: np.ndarray
    accuracies: list[float]


def of_job(spec: specs.JobSpec, folder: Path) -> tuple[Curve, dict[str, Any]]:
    """Run the job; what its metrics say, and how its steps ran. Raises RuntimeError where it fails."""
    with closing(open_store(home.resolve(str(folder)))) as store:
        job = client.submit(spec, store=store, foreground=True)
        ended = run_inline(store, job.id)
    if ended.state is not JobState.SUCCEEDED:
        raise RuntimeError(f"{spec.name}: {ended.error}")
    lines = [json.loads(line) for line in (spec.output.folder / "metrics.jsonl").read_text().splitlines()]
    losses = np.array([line["loss"] for line in lines if line["kind"] == "step"])
    accuracies = [line["val_accuracy"] for line in lines if line["kind"] == "epoch"]
    return Curve(losses, accuracies), {n: ended.schedule.get(n) for n in ("runs", "kernels", "streams", "fallback")}


def by_hand(spec: specs.JobSpec, device: torch.device, layout: torch.memory_format) -> Curve:
    """The training in plain PyTorch."""
    train = spec.train
    assert train is not None
    assert train.validation is not None
    given = spec.input.model_copy(update={"source": train.validation.source})
    with open_reader(spec.input) as reader, open_reader(given) as held_out, as_in_training(device):
        inputs, labels = _everything(reader)
        held, expected = (torch.from_numpy(array).to(device) for array in _everything(held_out))
        held = held.contiguous(memory_format=layout)
        module = build(spec.model.model_copy(update={"dtype": "fp32"}), device=str(device), allowed_python=())
        module = module.to(memory_format=layout).train()  # type: ignore[call-overload]
        sampler = Sampler(reader.total, spec.input.batch_size, seed=spec.model.seed, last_batch=train.last_batch)
        rate = LearningRate(train.lr_schedule, train.optimizer.lr, sampler.batches * train.epochs)
        augment = Augment(train.augment, reader.signature, seed=spec.model.seed)
        pixels = Pixels(spec.input.transform, padding=augment.padding)
        optimizer = torch.optim.SGD(
            module.parameters(),
            lr=train.optimizer.lr,
            momentum=train.optimizer.momentum,
            nesterov=train.optimizer.nesterov,
            weight_decay=train.optimizer.weight_decay,
        )
        losses, accuracies = list[torch.Tensor](), list[float]()
        for epoch in range(1, train.epochs + 1):
            for batch in np.array_split(
                sampler.order(epoch), range(sampler.batch_size, sampler.records, sampler.batch_size)
            ):
                x = pixels(inputs[batch], augment.places(batch, epoch) if augment else None)
                optimizer.zero_grad()
                logits = module(torch.from_numpy(x).to(device).contiguous(memory_format=layout))
                y = torch.from_numpy(labels[batch]).to(device)
                loss = nn.functional.cross_entropy(logits, y, label_smoothing=train.label_smoothing)
                loss.backward()
                optimizer.param_groups[0]["lr"] = rate(len(losses))
                optimizer.step()
                losses.append(loss.detach())
            with evaluating(module):
                accuracies.append(float((module(held).argmax(1) == expected).double().mean()))
    return Curve(torch.stack(losses).double().cpu().numpy(), accuracies)


def _everything(reader: Reader) -> tuple[np.ndarray, np.ndarray]:
    batch = reader.take(np.arange(reader.total))
    assert batch.labels is not None
    return batch.x, batch.labels


def unknown(spec: specs.JobSpec) -> list[str]:
    """Fields of the spec that the plain training would not follow."""
    train = spec.train
    if train is None:
        return ["kind"]
    asked = {
        "model.dtype": spec.model.dtype != "fp32",
        "train.loss": train.loss != "cross_entropy",
        "train.optimizer.name": train.optimizer.name != "sgd",
        "train.optimizer.no_decay_on_norms": train.optimizer.no_decay_on_norms,
        "train.accumulate": train.accumulate != 1,
        "train.clip_norm": train.clip_norm is not None,
        "train.freeze": bool(train.freeze),
        "train.init_from": train.init_from is not None,
        "train.early_stopping": train.early_stopping is not None,
        "train.validation": train.validation is None or train.validation.every_epochs != 1,
    }
    return [name for name, found in asked.items() if found]


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean absolute difference as a share of the mean."""
    return float(np.abs(found - expected).mean() / np.abs(expected).mean())


def main() -> int:
    """Print the differences and the accuracies. 1 where the job's accuracy misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="?", type=Path, default=Path(__file__).parents[1] / "jobs" / "digits-train.yaml")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--on-miss", default="build", help="how the job runs without a stored schedule: build, eager")
    parser.add_argument("--home", type=Path, help="whose store the job uses; without it, a new one")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = devices.resolve(given.device)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        changes = [f"output.path={output}", f"schedule.on_miss={given.on_miss}", f"run.device={given.device}"]
        changes.append("schedule.progressive=false")  # builds, however short the training is
        spec = specs.load(given.spec, changes)
        if fields := unknown(spec):
            parser.error(f"{given.spec}: {', '.join(fields)}: not what the plain training does")
        job, schedule = of_job(spec, given.home or Path(folder) / "home")
    plain = by_hand(spec, device, torch.contiguous_format)
    other = by_hand(spec, device, torch.channels_last)
    epoch = len(plain.losses) // len(plain.accuracies)
    found: dict[str, Any] = {
        "spec": spec.name,
        "device": devices.describe(device),
        "torch": torch.__version__,
        "steps": len(plain.losses),
        "steps_of_an_epoch": epoch,
        **schedule,
    }
    for name, curve in (("job", job), ("channels_last", other)):
        found[name] = {
            "first_10_steps": apart(curve.losses[:10], plain.losses[:10]),
            "first_epoch": apart(curve.losses[:epoch], plain.losses[:epoch]),
            "all_steps": apart(curve.losses, plain.losses),
            "accuracy": curve.accuracies[-1],
            "best_accuracy": max(curve.accuracies),
        }
    found["plain"] = {"accuracy": plain.accuracies[-1], "best_accuracy": max(plain.accuracies)}
    for name, told in (("job", "the job"), ("channels_last", "plain, channels-last")):
        one = found[name]
        print(
            f"{told}: losses differ by {one['first_10_steps']:.2g} in 10 steps, {one['first_epoch']:.2g} in an epoch, "
            f"{one['all_steps']:.2g} in {found['steps']} steps; accuracy {one['accuracy']:.4f}, "
            f"best {one['best_accuracy']:.4f}"
        )
    print(f"plain: accuracy {plain.accuracies[-1]:.4f}, best {max(plain.accuracies):.4f}")
    print(f"{schedule['runs']}, {schedule['kernels']}, {schedule['streams']} streams; {found['device']}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if job.accuracies[-1] >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
