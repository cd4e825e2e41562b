"""Small trainings on texts for tests: sentences that can be told apart, and their specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nimble_jobs import spec as specs
from tests.text_models import write_bert
from tests.trainings import changed

RECORDS, HELD_OUT = 45, 17
ANIMALS = ("cat", "dog")  # the labels: which of them the text is about
FILLERS = ["the", "a", "on", "mat", "hill", "big", "small", "red", "blue", "house"]


def write_texts(path: Path, count: int, *, seed: int, names: tuple[str, ...] = ANIMALS) -> None:
    """Texts of 3 to 28 words that name one animal, with its name as label, and ids."""
    draw = np.random.default_rng(seed)
    texts, labels = [], []
    for _ in range(count):
        label = int(draw.integers(0, len(names)))
        words = [FILLERS[i] for i in draw.integers(0, len(FILLERS), int(draw.integers(2, 28)))]
        words.insert(int(draw.integers(0, len(words) + 1)), (*ANIMALS, "ran")[label])
        texts.append(" ".join(words))
        labels.append(names[label])
    pq.write_table(pa.table({"id": [f"t-{i}" for i in range(count)], "text": texts, "animal": labels}), path)


def lay_out(folder: Path) -> None:
    """A model, texts to train on, and texts that are held out."""
    write_bert(folder / "bert", initializer_range=0.1)
    write_texts(folder / "train.parquet", RECORDS, seed=0)
    write_texts(folder / "held-out.parquet", HELD_OUT, seed=1)


def spec_of(folder: Path, *, output: str = "out/net", **changes: Any) -> specs.JobSpec:
    """A training of two epochs over two buckets, with dropout and decay groups; `changes` by dotted path."""
    found: dict[str, Any] = {
        "version": 1,
        "name": "animals",
        "kind": "finetune",
        "model": {"source": f"transformers:{folder}/bert"},
        "input": {
            "source": str(folder / "train.parquet"),
            "format": "text",
            "fields": {"x": "text", "label": "animal", "id": "id"},
            "batch_size": 8,
            "text": {"max_length": 32, "buckets": [16, 32]},
        },
        "schedule": {"progressive": False},  # so short a training pays for no build
        "output": {"path": str(folder / output), "if_exists": "replace"},
        "train": {
            "epochs": 2,
            "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "no_decay_on_norms": True},
            "lr_schedule": {"name": "linear", "warmup_steps": 3},
            "validation": {"source": str(folder / "held-out.parquet")},
            "checkpoint": {"every_steps": 2},
        },
    }
    return changed(found, changes)
