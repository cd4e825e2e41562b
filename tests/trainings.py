"""Small trainings for tests: data, specs, and a run of the workload without a store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from nimble_jobs import spec as specs
from nimble_jobs.patience import NONE
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads import Outcome, Stop, training
from tests.ledger import Book

_DRAW = "nimble_jobs.workloads.training.gauge.curves.draw"

MODEL = '''
import torch
from torch import nn


def net(dropout=0.2):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(4),
        nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, 4),
    )


def line():
    return nn.Linear(3, 1)


def absolute(outputs, y):
    return (outputs[:, 0] - y).abs().mean()


def breaks(outputs, y):
    """NaN once a batch holds the label 4."""
    broken = torch.where((y == 4).any(), float("nan"), 0.0)
    return nn.functional.cross_entropy(outputs, y.clamp(max=3)) + broken


def steep(outputs, y):
    """Finite, with a gradient that no weight survives."""
    return outputs.sum() * 1e30
'''
RECORDS = 52  # batches of 8: six whole ones and a short one
HELD_OUT = 20


def lay_out(folder: Path) -> None:
    """A model file, images that can be learnt, and held-out ones."""
    (folder / "model.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    for name, count in (("train", RECORDS), ("held-out", HELD_OUT)):
        labels = rng.integers(0, 4, count)
        images = rng.integers(0, 60, (count, 8, 8), dtype=np.uint8)
        for i, label in enumerate(labels):
            row, column = 4 * (label // 2), 4 * (label % 2)
            images[i, row : row + 4, column : column + 4] += 150
        np.savez(folder / f"{name}.npz", images=images, labels=labels)


def spec_of(folder: Path, *, output: str = "out/net", **changes: Any) -> specs.JobSpec:
    """A training of two epochs with dropout, augmentation, validation and momentum; `changes` by dotted path."""
    found: dict[str, Any] = {
        "version": 1,
        "name": "net",
        "kind": "finetune",
        "model": {"source": f"python:{folder}/model.py:net"},
        "input": {
            "source": str(folder / "train.npz"),
            "format": "npz",
            "fields": {"x": "images", "label": "labels"},
            "batch_size": 8,
        },
        "schedule": {"progressive": False},  # so short a training pays for no build
        "output": {"path": str(folder / output), "if_exists": "replace"},
        "train": {
            "epochs": 2,
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
            "lr_schedule": {"name": "cosine", "warmup_steps": 2},
            "augment": {"crop_padding": 1},
            "validation": {"source": str(folder / "held-out.npz")},
            "checkpoint": {"every_steps": 2},
        },
    }
    return changed(found, changes)


def changed(found: dict[str, Any], changes: Mapping[str, Any]) -> specs.JobSpec:
    """The spec of these entries after `changes` by dotted path, with `__` for a dot. `found` is changed itself."""
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = found
        for part in parents:
            target = target.setdefault(part, {})
        target[last] = value
    return specs.restore(found)


def _written_down(path: Path, loss: np.ndarray, epochs: Sequence[dict[str, Any]], *, title: str) -> None:
    """Stands for a drawing: other curves are other bytes."""
    path.write_bytes(repr((title, loss.tobytes(), epochs)).encode())


class Attempt:
    """One attempt at a job in this process, with its events and reports."""

    def __init__(
        self,
        spec: specs.JobSpec,
        *,
        job: str = "job",
        number: int = 1,
        device: str = "cpu",
        stop: Callable[[int], Stop] = lambda _: Stop.GO,
        home: Path | None = None,
        decoders: Any = None,
        drawn: bool = False,
    ) -> None:
        """`home` is the state folder with the schedules; by default, each folder of outputs has its own. Only with
        `drawn` are the curves drawn: matplotlib takes longer than these trainings.
        """
        self._drawn = drawn
        self.spec = spec
        self.asked = 0  # whether to go on, once it ran: after each step and epoch, before each batch of a validation
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.reports: list[dict[str, Any]] = []
        self._stop = stop
        output = Path(spec.output.path)
        folder = output.parents[1]
        self._home = home or folder / "homes" / output.parent.name
        self._context: Any = SimpleNamespace(
            job=SimpleNamespace(id=job, attempt=number),
            spec=spec,
            device=device,
            stop=self._asked,
            report=lambda **given: self.reports.append(given),
            event=lambda *event: self.events.append(event),
            allowed_python=(folder,),
            patience=NONE,
            decoders=decoders,
            origins={},
        )

    def run(self) -> Outcome:
        with open_store(resolve(str(self._home))) as store:
            job, output = self._context.job, Path(self.spec.output.path)
            ledger: Any = Book(output.parent).claim(job.id, job.attempt, output)  # this job is not in the store
            store.publications = ledger
            self._context.store = store
            with nullcontext() if self._drawn else mock.patch(_DRAW, _written_down):
                return training.run(self._context)

    def said(self, kind: str) -> list[str]:
        """Messages of the events of one kind."""
        return [message for found, message, _ in self.events if found == kind]

    def _asked(self) -> Stop:
        self.asked += any(report.get("phase") == "run" for report in self.reports)
        return self._stop(self.asked)


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of each file that a training published, without its manifest."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir() if p.name != "manifest.json"}


def metrics(path: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one kind."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
