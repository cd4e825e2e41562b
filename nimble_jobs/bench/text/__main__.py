"""Steps of the benchmark that need torch or tokenizers, in a process of their own.

python -m nimble_jobs.bench.text prepare REQUEST.json RESULT.json
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tokenizers import Tokenizer

from nimble_jobs.bench import environment as environments
from nimble_jobs.bench.scoring.workshop import answer
from nimble_jobs.bench.text import models
from nimble_jobs.engine import device as devices

_PACKAGES = ("sentence-transformers", "tokenizers")
_BATCH = 4096  # texts that are tokenised at once


def prepare(asked: dict[str, Any]) -> dict[str, Any]:
    """The environment, the folder of each model, and how many tokens the texts have in it."""
    device = devices.resolve(asked["device"], "--device")
    found = environments.environment(device)
    for package in _PACKAGES:
        try:
            found["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    folders, tokens = {}, {}
    for name in asked["models"]:
        folder = models.folder_of(name, Path(asked["beside"]))
        if name == models.BERT:
            models.make_bert(folder)
        folders[name] = str(folder)
        tokens[name] = count_tokens(folder, Path(asked["texts"]), asked["max_length"])
    environment = {**found, "cpus": len(os.sched_getaffinity(0))}
    return {"environment": environment, "device": device.type, "folders": folders, "tokens": tokens}


def count_tokens(folder: Path, texts: Path, max_length: int) -> int:
    """Tokens of all texts, special ones included, cut at `max_length`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    batches = pq.ParquetFile(texts).iter_batches(_BATCH, columns=["text"])
    return sum(len(each.ids) for batch in batches for each in tokenizer.encode_batch(batch["text"].to_pylist()))


if __name__ == "__main__":
    sys.exit(answer({"prepare": prepare}, sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
