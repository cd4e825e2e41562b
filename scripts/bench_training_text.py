"""Steps a second of a text classifier over bucketed batches: ours, eager, and torch.compile in its best mode.

    scripts/bench_training_text.py [--model FOLDER] [--dtype bf16] [--batch 32] [--tokens 4096] [--json FILE]

All train the same model from the same weights on the same batches, with AdamW (fused) and dropout. Batches have
`--batch` texts, or fewer in long buckets, so that none has more than `--tokens` tokens. Without --model, a BERT-base
with random weights is made. Each system is a process of its own. Its clock starts when it has run a batch of every
bucket twice, because compilers compile for each shape.

With --losses the model has no dropout, and the losses of all steps are compared with those of `eager`, which comes
first then: dropout draws other numbers in each system.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn

from nimble_jobs import spec as specs
from nimble_jobs.bench.environment import environment
from nimble_jobs.bench.text import Recipe, corpus, models
from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.models.build import DTYPES, build
from nimble_jobs.models.classifier import as_classifier
from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads.training.batches.bucketed import TextEpochs
from nimble_jobs.workloads.training.step import prepare, texts
from nimble_jobs.workloads.training.step.prepare import Means
from nimble_jobs.workloads.training.step.texts import TrainTexts

SYSTEMS = ("ours", "eager", "compile-default", "compile-max-autotune-no-cudagraphs", "compile-reduce-overhead")
RATE = 2e-5
Run = Callable[[int, dict[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]


def spec_of(asked: argparse.Namespace, folder: Path) -> specs.JobSpec:
    """The training that all systems run."""
    found: dict[str, Any] = {
        "version": 1,
        "name": "bench",
        "kind": "finetune",
        "model": {"source": f"transformers:{asked.model}", "dtype": asked.dtype},
        "input": {
            "source": str(folder / "texts.parquet"),
            "format": "text",
            "fields": {"x": "text", "label": "label"},
            "batch_size": asked.batch,
            "text": {"max_length": 512, "buckets": asked.buckets, "tokens_per_batch": asked.tokens},
        },
        "output": {"path": str(folder / "out")},
        "train": {"epochs": 1000, "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": 0.01}},
        "run": {"device": asked.device},
    }
    return specs.restore(found)


def write_texts(folder: Path, count: int) -> None:
    """Real English with log-normal lengths, and labels by chance: only speed is measured."""
    table = pq.read_table(
        corpus.provide(folder, Recipe(count=count, packages=("numpy", "networkx", "sqlalchemy")), print)
    )
    labels = np.random.default_rng(0).integers(0, 2, count)
    pq.write_table(table.append_column("label", [labels]), folder / "texts.parquet")


def ours(spec: specs.JobSpec, read: TrainTexts, device: torch.device, home: Path) -> Run:
    """Our steps, stored or built now."""
    with open_store(resolve(str(home))) as store:
        ready = texts.prepare(spec, read, device, ())
        means = Means(
            store=store, on_miss="build", report=lambda **_: None, trying=lambda _: None, waiting=lambda _: None
        )
        step = prepare.as_one(prepare.prepare_steps(ready, means, began_with=[]))

    def run(number: int, named: dict[str, torch.Tensor], rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        step.run(rows, y, RATE)
        return step.loss

    return run


def by_hand(spec: specs.JobSpec, device: torch.device, mode: str | None) -> Run:
    """A loop as users write it, in eager or with torch.compile."""
    model = as_classifier(spec.model.model_copy(update={"dtype": "fp32"}), 2)
    module: nn.Module = build(model, device=str(device), new_head=True).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    dtype = DTYPES[spec.model.dtype]

    def forward(named: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            return nn.functional.cross_entropy(module(**named)["logits"].float(), y)

    called = forward if mode is None else torch.compile(forward, mode=mode, dynamic=False)

    def run(number: int, named: dict[str, torch.Tensor], rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = called(named, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def batches_of(epochs: TextEpochs, count: int, device: torch.device) -> list[tuple[Any, ...]]:
    """Whole batches on the device: the bucket, arguments by name, rows, labels."""
    found: list[tuple[Any, ...]] = []
    epoch = 1
    while len(found) < count:
        for group in epochs.groups(epoch):
            bucket = epochs.buckets[group.bucket]
            if len(group.records) < bucket.rows or len(found) == count:
                continue
            rows = epochs.tokens.rows(group.records, bucket.layout, bucket.tokens)
            parts = bucket.layout.unpack(rows)
            mask = np.arange(bucket.tokens) < parts["attention_mask"][:, None]
            named = {"input_ids": parts["input_ids"].astype(np.int64), "attention_mask": mask.astype(np.int64)}
            on_device = {name: torch.from_numpy(value).to(device) for name, value in named.items()}
            y = torch.from_numpy(epochs.tokens.labels[group.records]).to(device)
            found.append((group.bucket, on_device, torch.from_numpy(rows).to(device), y))
        epoch += 1
    return found


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One system in this process."""
    device = devices.resolve(asked.device, "--device")
    spec, begin = spec_of(asked, folder), time.perf_counter()
    with open_reader(spec.input) as reader:
        read = TrainTexts.read(spec, reader, None)
    torch.set_float32_matmul_precision("high")
    batches = batches_of(read.epochs, asked.batches, device)
    mode = asked.system.partition("-")[2] or None
    with as_in_training(device):
        run = ours(spec, read, device, folder / "home") if asked.system == "ours" else by_hand(spec, device, mode)
        warm = {batch[0]: batch for batch in batches}.values()
        for _ in range(2):
            for number, (_, *given) in enumerate(warm):
                run(number, *given)
        devices.synchronize(device)
        prepare_s, start = time.perf_counter() - begin, time.perf_counter()
        losses: list[torch.Tensor] = []
        for number, (_, *given) in enumerate(batches):
            loss = run(number, *given)
            if asked.losses:
                losses.append(loss.clone())
        devices.synchronize(device)
    seconds = time.perf_counter() - start
    texts_ = sum(len(batch[-1]) for batch in batches)
    return {
        "system": asked.system,
        "steps_per_s": len(batches) / seconds,
        "texts_per_s": texts_ / seconds,
        "prepare_s": prepare_s,
        "loss": float(loss),
        "losses": [float(each) for each in losses],
        "buckets": [[bucket.tokens, bucket.rows] for bucket in read.epochs.buckets],
        "environment": environment(device),
    }


def without_dropout(model: Path, folder: Path) -> Path:
    """A copy of a model's folder whose config.json turns dropout off, by the names of BERT and all that it has."""
    copy = Path(shutil.copytree(model, folder / "without-dropout"))
    config = json.loads((copy / "config.json").read_text())
    names = {"hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"}
    off = dict.fromkeys(names | {name for name in config if "dropout" in name}, 0.0)
    (copy / "config.json").write_text(json.dumps(config | off))
    return copy


def beside_eager(found: dict[str, Any], eager: dict[str, Any]) -> str:
    """How far the losses are from eager's."""
    mine, theirs = np.array(found["losses"]), np.array(eager["losses"])
    apart = np.abs(mine - theirs) / np.abs(theirs).mean()
    return f"  losses differ from eager's by {apart.mean():.1e} of their mean on average, {apart.max():.1e} at most"


def main() -> int:
    """Run every system in a process of its own, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--buckets", type=json.loads, default=[64, 128, 256, 512])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.system:
        print(json.dumps(measure(asked, asked.folder)))
        return 0
    with tempfile.TemporaryDirectory() as place:
        folder, found = Path(place), list[dict[str, Any]]()
        write_texts(folder, asked.texts)
        model = asked.model or folder / models.BERT
        if asked.model is None:
            models.make_bert(model)
        systems = asked.systems.split(",")
        if asked.losses:
            model = without_dropout(model, folder)
            systems = ["eager", *(system for system in systems if system != "eager")]
        for system in systems:
            more = ["--system", system, "--folder", str(folder), "--model", str(model)]
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:], *more], stdout=subprocess.PIPE, text=True)
            row: dict[str, Any] = {"system": system, "error": f"exit code {done.returncode}"}
            said = row["error"]
            if done.returncode == 0:
                row = json.loads(done.stdout.splitlines()[-1])
                said = f"{row['steps_per_s']:8.2f} steps/s  {row['texts_per_s']:8.1f} texts/s"
                if found and found[0].get("losses"):
                    said += beside_eager(row, found[0])
            found.append(row)
            print(f"{system:<36} {said}", flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
