"""SIGKILL in any stage of a scoring job: the next attempt publishes what an undisturbed job publishes.

NIMBLE_JOBS_KILL_ROUNDS sets the number of rounds, three by default and twenty with --all; NIMBLE_JOBS_KILL_SEED the
stages and moments. docs/measurements/kill-rounds.md holds the result of fifty.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import dying_stages
import numpy as np
import pytest
from PIL import Image

from nimble_jobs.data import fetched
from nimble_jobs.job import JobState
from nimble_jobs.store import open_store
from tests import s3
from tests.object_jobs import upload
from tests.seeds import seed
from tests.stage_kills import left_over, published, queue, score
from tests.waiting import until

ROUNDS = int(os.environ["NIMBLE_JOBS_KILL_ROUNDS"])
SEED = seed()
PICTURES, BATCH, SHARD = 48, 4, 10
MODEL = """\
import torch

class Means(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return x.mean((2, 3)) * self.scale
"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of several sizes, one of them broken, and one PNG."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for i in range(PICTURES):
        height, width = rng.integers(20, 60, 2)
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03d}.{'png' if i == 7 else 'jpg'}")
    (folder / "011.jpg").write_bytes((folder / "012.jpg").read_bytes()[:300])
    return folder


def prepared(base: Path, pictures: Path | str) -> None:
    """Queue a job."""
    base.mkdir()
    (base / "model.py").write_text(MODEL)
    spec = {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": f"python:{base}/model.py:Means"},
        "input": {"source": str(pictures), "format": "images", "batch_size": BATCH, "transform": {"resize": 16}},
        "schedule": {"on_miss": "eager"},
        "output": {"path": str(base / "out"), "format": "jsonl", "fields": ["id", "logits"], "shard_size": SHARD},
        "run": {"error_threshold": 0.1, "retry": {"max_attempts": 100}},
    }
    queue(base, spec)


@pytest.mark.timeout(300 + 90 * ROUNDS)
def test_killed_in_each_stage(tmp_path: Path, pictures: Path) -> None:
    """Each job is killed twice, in two random stages at random moments. No process of a killed attempt survives."""
    draw = random.Random(SEED)
    whole = tmp_path / "whole"
    prepared(whole, pictures)
    works = score(whole, "none", 0)
    assert works is not None
    assert works.pop("processes") > 0
    assert set(works) == set(dying_stages.STAGES)
    expected = published(whole)
    assert b"011.jpg" in expected["errors.jsonl"]
    killed, attempts = Counter[str](), 0
    for number in range(ROUNDS):
        base = tmp_path / f"round-{number}"
        prepared(base, pictures)
        kills = [(stage, draw.randint(1, works[stage])) for stage in draw.sample(sorted(works), 2)]
        died = []
        for kill in [*kills, ("none", 0)]:
            died.append(score(base, *kill) is None)
            attempts += 1
            if not died[-1]:
                break
            killed[kill[0]] += 1
        told = f"seed {SEED}, round {number}: killed at {kills}, {died}"
        assert died[0], told
        with open_store(base / "home") as store:
            (job,) = store.jobs.list()
            assert job.state is JobState.SUCCEEDED, told
            assert store.check() == []
        assert published(base) == expected, told
        until(lambda base=base: not left_over(base))  # type: ignore[misc]
    print(f"seed {SEED}: {ROUNDS} rounds, {attempts} attempts, killed in {dict(sorted(killed.items()))}")


@pytest.mark.timeout(300 + 90 * ROUNDS)
def test_killed_while_pictures_are_fetched(tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt takes over the objects that are there and the shards that were scored meanwhile."""
    draw = random.Random(SEED)
    address = f"s3://{s3.bucket(monkeypatch)}/pictures"
    upload(address, {file.name: file.read_bytes() for file in pictures.iterdir()})
    whole = tmp_path / "whole"
    prepared(whole, address)
    works = score(whole, "none", 0)
    assert works is not None
    assert (works["fetch"], works["list"]) == (PICTURES, 2)
    expected = published(whole)
    for number in range(ROUNDS):
        base = tmp_path / f"round-{number}"
        prepared(base, address)
        kills = [("fetch", draw.randint(2, PICTURES)), ("shards", draw.randint(1, 3)), ("list", 2), ("none", 0)]
        fetched_before, died = 0, []
        for kill in kills:
            ended = score(base, *kill)
            died.append(ended is None)
            told = f"seed {SEED}, round {number}: killed at {kills}, {died}"
            copies = [file for file in (base / "home" / "inputs").rglob("*.*") if file.parent.name == "pictures"]
            if ended is not None:
                assert ended.get("fetch", 0) <= PICTURES - fetched_before, told
                break
            assert fetched_before <= len(copies) <= PICTURES, told
            fetched_before = len(copies)
        assert died[0], told
        with open_store(base / "home") as store:
            (job,) = store.jobs.list()
            assert job.state is JobState.SUCCEEDED, told
            assert list(fetched.held(store.home)) == [], told
        assert published(base) == expected, told
        until(lambda base=base: not left_over(base))  # type: ignore[misc]
