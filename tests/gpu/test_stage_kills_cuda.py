"""SIGKILL in any stage of a job whose pictures the GPU decodes and whose batches it replays: outputs are equal.

NIMBLE_JOBS_KILL_ROUNDS sets the number of rounds, NIMBLE_JOBS_KILL_SEED the stages and moments. Nothing else may use
the device or /dev/shm meanwhile.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from nimble_jobs.job import JobState
from nimble_jobs.store import open_store
from tests.photographs import jpeg, photographs
from tests.seeds import seed
from tests.stage_kills import left_over, published, queue, score
from tests.waiting import until

ROUNDS = int(os.environ["NIMBLE_JOBS_KILL_ROUNDS"])
SEED = seed()
AT_ONCE = 8  # rounds
ATTEMPTS = 6  # after the kills, at most
PICTURES, BATCH, SHARD = 96, 8, 20
STAGES = {"read", "decode", "upload", "replay", "download", "columns", "shards", "sheets", "publish"}
MODEL = """\
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten()
    )
"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of several sizes that the GPU decodes, one that only the host can, and one that is cut off."""
    folder = tmp_path_factory.mktemp("pictures")
    rng, images = np.random.default_rng(0), list(photographs().values())
    for i in range(PICTURES):
        image = images[i % len(images)].resize(tuple(rng.integers(60, 300, 2).tolist()))
        (folder / f"{i:03d}.jpg").write_bytes(jpeg(image, progressive=i == 7))
    (folder / "011.jpg").write_bytes((folder / "012.jpg").read_bytes()[:300])
    return folder


@pytest.fixture
def device_memory() -> Iterator[None]:
    """What the device has free must be free again."""
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    yield
    gc.collect()
    until(lambda: torch.cuda.mem_get_info()[0] >= before - (64 << 20))


def spec_of(base: Path, pictures: Path, code: Path) -> dict[str, Any]:
    """A job whose output goes into `base`, with the model in the folder `code`."""
    return {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": f"python:{code}/model.py:make", "dtype": "fp16"},
        "input": {
            "source": str(pictures),
            "format": "images",
            "batch_size": BATCH,
            "transform": {"resize": [64, 64]},
            "decode": "gpu",
        },
        "schedule": {"progressive": False, "fuse": "off"},
        "output": {"path": str(base / "out"), "format": "jsonl", "fields": ["id", "logits"], "shard_size": SHARD},
        "run": {"device": "cuda:0", "error_threshold": 0.1, "retry": {"max_attempts": 100}},
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    """A folder with the model, and a state folder in which its schedule is stored. Searches of their own could choose
    different plans, whose last bits differ.
    """
    folder = tmp_path_factory.mktemp("stored")
    (folder / "model.py").write_text(MODEL)
    (folder / "job.yaml").write_text(yaml.safe_dump(spec_of(folder, pictures, folder)))
    command = [sys.executable, "-m", "nimble_jobs.cli.main", "--home", str(folder / "home"), "cache", "build"]
    subprocess.run([*command, str(folder / "job.yaml"), "--allow-python", str(folder)], check=True)
    return folder


def prepared(base: Path, pictures: Path, stored: Path) -> None:
    """Queue a job in a state folder of its own, in which its schedule is stored."""
    base.mkdir()
    shutil.copytree(stored / "home", base / "home")
    queue(base, spec_of(base, pictures, stored), allowed=stored)


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """What differs, by file and record."""
    said = []
    for name in sorted(found.keys() | expected.keys()):
        lines = [files.get(name, b"").splitlines() for files in (found, expected)]
        if len(lines[0]) != len(lines[1]):
            said.append(f"{name}: {len(lines[0])} lines instead of {len(lines[1])}")
        said += [f"{name}: {_difference(*both)}" for both in zip(*lines, strict=False) if both[0] != both[1]]
    return said


def _difference(mine: bytes, theirs: bytes) -> str:
    try:
        one, other = json.loads(mine), json.loads(theirs)
        logits = np.abs(np.subtract(one["logits"], other["logits"]))
    except (ValueError, KeyError):
        return f"{mine!r} instead of {theirs!r}"
    return f"{one['id']} instead of {other['id']}: {(logits > 0).sum()} numbers, by up to {logits.max()}"


def one_round(
    base: Path, pictures: Path, stored: Path, kills: list[tuple[str, int]], expected: dict[str, bytes]
) -> tuple[list[str], list[str]]:
    """Two kills, and attempts until the job ends. Returns in which stages it was killed, and why an attempt began anew
    for another reason, as when the death of another process takes the device's decoders from this one.

    Raises AssertionError if an output differs.
    """
    prepared(base, pictures, stored)
    told, killed = f"seed {SEED}, {base.name}: killed at {kills}", []
    for kill in [*kills, *[("none", 0)] * ATTEMPTS]:
        if score(base, *kill, device="cuda:0") is None:
            killed.append(kill[0])
        with open_store(base / "home") as store:
            (job,) = store.jobs.list()
            reasons = [e.message for e in store.jobs.events(job.id) if e.kind in ("requeued", "failed")]
            sound = store.check() == []
        if job.state is not JobState.QUEUED:
            break
    assert job.state is JobState.SUCCEEDED, f"{told}: {job.error}, {reasons}"
    assert (job.schedule["runs"], job.schedule["hit"]) == ("schedule", "stored"), told
    assert sound, told
    assert published(base) == expected, f"{told}: {differences(published(base), expected)}; {job.schedule}"
    until(lambda: not left_over(base))
    print(f"{base.name}: killed in {killed}; succeeded as attempt {job.attempt}", flush=True)
    return killed, [reason for reason in reasons if "worker died" not in reason]


@pytest.mark.timeout(300 + 30 * ROUNDS)
@pytest.mark.usefixtures("device_memory")
def test_killed_in_each_stage(tmp_path: Path, pictures: Path, stored: Path) -> None:
    """Each job is killed in two random stages at random moments. No process, shared memory or device memory is left."""
    draw = random.Random(SEED)
    shared = set(Path("/dev/shm").iterdir())
    whole = tmp_path / "whole"
    prepared(whole, pictures, stored)
    works = score(whole, "none", 0, device="cuda:0")
    assert works is not None
    works.pop("processes")
    assert set(works) == STAGES
    expected = published(whole)
    assert b"011.jpg" in expected["errors.jsonl"]
    plans = [[(s, draw.randint(1, works[s])) for s in draw.sample(sorted(works), 2)] for _ in range(ROUNDS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rounds = [
            pool.submit(one_round, tmp_path / f"round-{number}", pictures, stored, kills, expected)
            for number, kills in enumerate(plans)
        ]
        ended = [each.result() for each in rounds]
    killed = Counter(stage for stages, _ in ended for stage in stages)
    others = [reason for _, reasons in ended for reason in reasons]
    print(f"seed {SEED}: {ROUNDS} rounds, killed in {dict(sorted(killed.items()))}; anew for other reasons: {others}")
    assert killed.total() >= ROUNDS
    assert set(Path("/dev/shm").iterdir()) <= shared
