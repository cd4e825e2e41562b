"""How far embeddings of a job are from those of each text alone, in eager and fp32, and from those in another order.

    python scripts/compare_texts.py --json FILE [--device cpu] [--dtype fp32] [--count 10000] [--ways 4] [--model DIR]
        [--reference FILE]

Texts of 0 to --longest words, most of them short, are scored by jobs of this process: as they are, then in three random
orders with other tokens in a batch. The model is a BERT of two layers with random weights and 2,048 positions, or the
one in DIR. Differences are norms, of vectors that are scaled to length 1. For a narrow --dtype the first line says how
far eager in that dtype is, each text alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import ROOT, environment, save

sys.path.insert(0, str(ROOT))

from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import real_station
from tests.text_jobs import one_by_one, outputs, run, sentences, text_spec, write_texts
from tests.text_models import write_bert

POSITIONS = 2048
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WAYS = ((None, None), (1024, 1), (4096, 2), (16_384, 3))  # tokens in a batch, and the seed of the order


def compare(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each way. Prints them."""
    model = options.model
    if model is None:
        (folder / "bert").mkdir()
        model = write_bert(folder / "bert", max_position_embeddings=POSITIONS)
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    texts = sentences(options.count, options.longest)
    if options.reference is not None and options.reference.is_file():
        alone = np.load(options.reference)
    else:
        alone = one_by_one(model, texts, positions, device=options.device)
        if options.reference is not None:
            np.save(options.reference, alone)
    first: np.ndarray | None = None
    rows: list[dict[str, Any]] = []
    if options.dtype != "fp32" and not options.no_eager:
        narrow = one_by_one(model, texts, positions, dtype=DTYPES[options.dtype], device=options.device)
        rows.append({"eager": worst(narrow, alone)})
        print(f"eager in {options.dtype}, each text alone: {rows[0]['eager']:.2e} from eager in fp32", flush=True)
    with open_store(resolve(str(folder / "home"))) as store:
        station = real_station(store, "w", options.device, None)
        for number, (tokens, seed) in enumerate(WAYS[: options.ways]):
            order = np.arange(len(texts)) if seed is None else np.random.default_rng(seed).permutation(len(texts))
            source = write_texts(folder / f"{number}.parquet", [texts[i] for i in order])
            text = {"max_length": positions} | ({} if tokens is None else {"tokens_per_batch": tokens})
            spec = text_spec(
                folder,
                model,
                source,
                out=str(number),
                model={"dtype": options.dtype},
                input={"text": text},
                schedule={"on_miss": options.on_miss, "fuse": options.fuse},
                run={"device": options.device},
            )
            job = run(store, spec, station)
            if job.error is not None:
                raise SystemExit(f"the job failed: {job.error}")
            found = np.empty_like(alone)
            found[order] = np.stack(list(outputs(folder / str(number)).values()))
            first = found if first is None else first
            row = {"tokens": tokens, "order": seed, "alone": worst(found, alone), "first": worst(found, first)}
            print(
                f"{tokens or 'default'} tokens in a batch, {'as they are' if seed is None else f'order {seed}'}: "
                f"{row['alone']:.2e} from each text alone, {row['first']:.2e} from the first job",
                flush=True,
            )
            rows.append(row)
    return rows


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest norm of a row's difference, where all rows are of length 1, as sentence models make them."""
    return float(np.linalg.norm(_scaled(found) - _scaled(expected), axis=1).max())


def _scaled(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def main() -> None:
    """Compare, print a line a job, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--longest", type=int, default=2000)
    parser.add_argument("--on-miss", default="eager", choices=["eager", "build"], help="build: through schedules")
    parser.add_argument("--fuse", default="off", choices=["auto", "off", "max"])
    parser.add_argument("--ways", type=int, default=len(WAYS), help="how many orders")
    parser.add_argument("--no-eager", action="store_true", help="without eager in a narrow dtype")
    parser.add_argument("--reference", type=Path, help="an .npy of each text alone: read, or written if there is none")
    parser.add_argument("--model", type=Path, help="a folder of transformers, with pooling by the mean")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = compare(options, Path(temporary))
    settings = {name: getattr(options, name) for name in ("device", "dtype", "count", "longest", "on_miss", "fuse")}
    save(options.json, {"environment": environment(options=settings), "results": rows})


if __name__ == "__main__":
    main()
