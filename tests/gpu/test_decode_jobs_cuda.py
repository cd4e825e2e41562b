"""Whole jobs whose pictures the GPU decodes, beside the same jobs with the CPU's decoders."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests.photographs import damaged, jpeg, photographs
from tests.picture_jobs import ran, spec_of

MEANS = """
import torch

class Means(torch.nn.Module):
    # Of each colour, and of each quarter: no weights, so differences are those of the pixels.
    def forward(self, x):
        return torch.nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)

def net(**_):
    return Means()
"""
GOOD = 90  # JPEGs that the GPU decodes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Good photographs of many sizes, those that only the host can decode, and damaged ones among them."""
    found = tmp_path / "in"
    found.mkdir()
    (tmp_path / "net.py").write_text(MEANS)
    rng = np.random.default_rng(0)
    images = list(photographs().values())
    for i in range(GOOD):
        size = tuple(rng.integers(60, 400, 2).tolist())
        image = images[i % len(images)].resize(size)
        (found / f"{i:03d}-good.jpg").write_bytes(jpeg(image, subsampling=("4:2:0", "4:4:4", "4:2:2")[i % 3]))
    whole = jpeg(images[0].resize((200, 150)))
    for i in range(60):
        (found / f"{i:03d}-damaged.jpg").write_bytes(damaged(whole, i))
    turned = images[1].getexif()
    turned[0x0112] = 6
    (found / "010-progressive.jpg").write_bytes(jpeg(images[1], progressive=True))
    (found / "020-cmyk.jpg").write_bytes(jpeg(images[2].convert("CMYK")))
    (found / "030-turned.jpg").write_bytes(jpeg(images[3], exif=turned))
    (found / "040-grey.jpg").write_bytes(jpeg(images[4].convert("L")))
    png = io.BytesIO()
    images[5].save(png, "PNG")
    (found / "050-other.png").write_bytes(png.getvalue())
    return found


def scored(
    store: Store, folder: Path, by: str, name: str, **schedule: Any
) -> tuple[Job, dict[str, np.ndarray], dict[str, str]]:
    """The job, the logits by id, and the reasons of bad records by id."""
    out = folder.parent / name
    spec = spec_of(
        folder,
        input={"batch_size": 16, "transform": {"resize": [96, 96], "center_crop": [80, 88]}, "decode": by},
        output={"path": str(out), "format": "jsonl", "shard_size": 50},
        schedule=schedule,
    )
    job = ran(store, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    lines = [json.loads(line) for path in sorted(out.glob("*.jsonl")) for line in path.read_text().splitlines()]
    good = {line["id"]: np.array(line["logits"]) for line in lines if "logits" in line}
    bad = {line["id"]: line["reason"] for line in lines if "logits" not in line}
    assert json.loads((out / "manifest.json").read_text())["summary"]["decode"]["by"] == by
    return job, good, bad


@pytest.mark.parametrize("schedule", [{"on_miss": "eager"}, {"progressive": False}])
def test_the_gpus_results_are_near_those_of_the_cpu(store: Store, folder: Path, schedule: dict[str, Any]) -> None:
    _, good_cpu, bad_cpu = scored(store, folder, "cpu", "by-cpu", **schedule)
    _, good_gpu, bad_gpu = scored(store, folder, "gpu", "by-gpu", **schedule)
    assert bad_gpu.items() <= bad_cpu.items()
    assert bad_gpu
    assert all("damaged" in name for name in bad_cpu)
    assert len(good_gpu) + len(bad_gpu) == len(good_cpu) + len(bad_cpu) == GOOD + 60 + 5
    whole = [name for name in good_cpu if "damaged" not in name]
    assert len(whole) == GOOD + 5
    far = np.stack([np.abs(good_gpu[name] - good_cpu[name]) for name in whole])
    assert far.max() < 0.01  # of 1, over a quarter of each picture


def test_the_same_job_gives_the_same_bytes_again(store: Store, folder: Path) -> None:
    """For whole pictures, and however many jobs came before: their streams are used again. Of data that is damaged
    between its markers, engines can make other pixels each time.
    """
    first, *others = (scored(store, folder, "gpu", f"out-{number}", progressive=False) for number in range(8))
    whole = [name for name in first[1] if "damaged" not in name]
    assert len(whole) == GOOD + 5
    for other in others:
        assert all((first[1][name] == other[1][name]).all() for name in whole)
        assert first[1].keys() == other[1].keys()
        assert first[2] == other[2]
