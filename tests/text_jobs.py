"""Jobs over texts that run in the tests' own process, and what the model says of one text at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nimble_jobs import spec as specs
from nimble_jobs.job import Job
from nimble_jobs.store import Store
from nimble_jobs.worker.executor import real_station
from nimble_jobs.worker.foreground import run_inline
from tests.store_samples import queued
from tests.text_models import WORDS


def sentences(count: int, longest: int, *, seed: int = 0) -> list[str]:
    """Texts of 0 to `longest` words of the tokenizer of `text_models`, most of them short."""
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.lognormal(2.5, 1.2, count).astype(int), longest)
    sizes[:4] = [0, 1, 2, longest]
    return [" ".join(rng.choice(WORDS, n)) for n in sizes.tolist()]


def text_spec(
    folder: Path, bert: Path, source: Path, *, out: str = "out", **sections: dict[str, Any]
) -> dict[str, Any]:
    """The resolved spec of a job; `sections` replace entries of its sections."""
    spec: dict[str, dict[str, Any]] = {
        "model": {"source": f"transformers:{bert}"},
        "input": {"source": str(source), "format": "text", "fields": {"x": "body", "id": "id"}},
        "schedule": {"on_miss": "eager"},
        "output": {"path": str(folder / out), "fields": ["id", "embedding"], "pooling": "mean", "shard_size": 256},
        "run": {"device": "cpu"},
    }
    merged = {name: {**spec.get(name, {}), **sections.get(name, {})} for name in {*spec, *sections}}
    return specs.dump(specs.restore({"version": 1, "name": "texts", "kind": "score", **merged}))


def write_texts(path: Path, texts: Sequence[str], **more: Any) -> Path:
    pq.write_table(pa.table({"id": [f"r{i}" for i in range(len(texts))], "body": texts, **more}), path)
    return path


def run(store: Store, spec: dict[str, Any], station: Any = None, allow_python: tuple[str, ...] = ()) -> Job:
    """Run a job to its end."""
    allowed = {"allow_python": allow_python, "now": time.time()}
    job = queued(store, spec=spec, name="texts", kind="score", foreground=True, **allowed)
    run_inline(store, job.id, station=station or real_station(store, "w", "cpu", None))
    return store.jobs.get(job.id)


def outputs(folder: Path, field: str = "embedding") -> dict[str, np.ndarray]:
    """A column by id, in the order of the files."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("part-*.parquet")):
        table = pq.read_table(path)
        found |= dict(zip(table["id"].to_pylist(), map(np.array, table[field].to_pylist()), strict=True))
    return found


def one_by_one(
    model: Path, texts: Sequence[str], longest: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> np.ndarray:
    """Vectors of a model in eager and `dtype`, mean-pooled in fp32, each text in a batch of its own without padding."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    net = transformers.AutoModel.from_pretrained(model).eval().to(device, dtype)
    found = []
    with torch.no_grad():
        for text in texts:
            given = tokenizer(text, return_tensors="pt", truncation=True, max_length=longest).to(device)
            found.append(net(**given).last_hidden_state[0].float().mean(dim=0).cpu().numpy())
    return np.stack(found)


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest relative norm of a difference of two rows."""
    return float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())
