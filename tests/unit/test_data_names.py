"""File names with line breaks, with bytes that are no UTF-8, and as long as can be: ids in every format."""

# ruff: noqa: PTH118, PTH123 - the names are bytes

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from nimble_jobs.data import open_reader
from nimble_jobs.spec.model import InputSpec, OutputSpec
from tests.ledger import staged

NAMES = [b"a\nb.png", b"tab\t.png", b"caf\xe9.png", b"\xff\xfe.png", b"x" * 251 + b".png", "\u202e\u2028.png".encode()]


@pytest.mark.parametrize("format_", ["parquet", "jsonl", "npy"])
def test_odd_names_are_ids(tmp_path: Path, format_: str) -> None:
    """Each good record has a line or row of its own, as has each bad one, and no two ids are alike."""
    (tmp_path / "in").mkdir()
    for name in NAMES:
        path = os.path.join(os.fsencode(tmp_path / "in"), name)
        with open(path, "wb") as file:
            Image.new("RGB", (2, 2)).save(file, "png")
        with open(path[:-4] + b".jpg" if len(name) < 200 else path[:-5] + b"y.jpg", "wb") as file:
            file.write(b"no image")
    staging = staged(OutputSpec(path=tmp_path / "out", format=format_), "job", 1)  # type: ignore[arg-type]
    with open_reader(InputSpec(source=str(tmp_path / "in"), format="images")) as reader:
        (batch,) = reader.batches(batch_size=64)
    staging.write_shard(0, {"id": list(batch.ids), "top1": np.arange(len(batch))}, batch.bad, last=True)
    outputs = staging.publish({})
    assert (outputs["records"], outputs["bad"]) == (len(NAMES), len(NAMES))
    (part,) = (tmp_path / "out").glob("part-*id.npy" if format_ == "npy" else "part-*")
    match format_:
        case "parquet":
            ids = pq.read_table(part).column("id").to_pylist()
        case "jsonl":
            ids = [json.loads(line)["id"] for line in part.read_bytes().decode().split("\n")[:-1]]
        case _:
            ids = np.load(part).tolist()
    assert len(set(ids)) == len(NAMES)
    assert {"a\nb.png", "caf\\udce9.png"} <= set(ids)
    errors = (tmp_path / "out" / "errors.jsonl").read_bytes().decode().split("\n")[:-1]
    assert len({json.loads(line)["id"] for line in errors}) == len(NAMES)
