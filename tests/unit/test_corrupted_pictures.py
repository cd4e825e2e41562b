"""Five hundred corrupted JPEGs in one job: each is a bad record or a picture, alone, and no process ends over them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nimble_jobs.data import reader
from nimble_jobs.decoding.processes import Processes
from nimble_jobs.engine import device as devices
from nimble_jobs.engine import picture_trial
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests.photographs import jpeg, photographs
from tests.picture_jobs import ran, spec_of

EACH = 125  # of four kinds
GOOD = 60
SIZES = [(65500, 65500), (65535, 65535), (20000, 20000), (9500, 9500), (0, 0), (0, 48)]
STARTS = [
    b"",
    b"\x89PNG\r\n\x1a\n",
    b"GIF89a\xff\xff\xff\xff",
    b"BM",
    b"RIFF\0\0\0\0WEBPVP8 ",
    b"II*\0\x08\0\0\0",
    b"\0" * 16,
]
CODE = """
import torch

def net(**_):
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
"""


def truncated(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut before the last row of pixels, at times to nothing."""
    return data[: int(rng.integers(0, len(data) * 9 // 10))]


def flipped(data: bytes, rng: np.random.Generator) -> bytes:
    """Some bits anywhere are turned over: that may go unnoticed."""
    broken = bytearray(data)
    for place in rng.integers(0, 8 * len(data), int(rng.integers(1, 30))).tolist():
        broken[place // 8] ^= 1 << place % 8
    return bytes(broken)


def with_another_start(data: bytes, rng: np.random.Generator) -> bytes:
    """What other formats begin with, or noise, in the place of the header."""
    start = STARTS[int(rng.integers(len(STARTS)))]
    return start + rng.bytes(int(rng.integers(0, 40))) + data[int(rng.integers(20, 400)) :]


def of_another_size(data: bytes, rng: np.random.Generator) -> bytes:
    """The header names no height, or more pixels than anybody decodes."""
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", *SIZES[int(rng.integers(len(SIZES)))]) + data[at + 4 :]


KINDS = {"cut": truncated, "flip": flipped, "start": with_another_start, "size": of_another_size}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Good and corrupted pictures among each other, and the good ones alone."""
    rng = np.random.default_rng(0)
    images = [image.resize((80, 60)) for image in photographs().values()]
    both, good = tmp_path / "both" / "in", tmp_path / "good" / "in"
    for folder in (both, good):
        folder.mkdir(parents=True)
        (folder.parent / "net.py").write_text(CODE)
    for i in range(GOOD):
        data = jpeg(images[i % len(images)], quality=60 + i % 40)
        for folder in (both, good):
            (folder / f"{i * 9:03d}-good.jpg").write_bytes(data)
    for i in range(EACH):
        for j, (name, corrupt) in enumerate(KINDS.items()):
            (both / f"{i * 4 + j:03d}-{name}.jpg").write_bytes(corrupt(jpeg(images[i % len(images)]), rng))
    return both, good


@pytest.mark.parametrize("by", ["threads", "processes", "device"])
def test_corrupted_pictures_are_bad_records_alone(
    by: str, store: Store, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good pictures give what they give without them. On a CPU torchvision's decoder stands in for the device's."""
    ended: list[object] = []
    monkeypatch.setattr(Processes, "_bury", lambda _, process: ended.append(process))
    monkeypatch.setattr(reader, "FEW", 1 if by == "processes" else 1 << 30)
    if by == "device":
        monkeypatch.setattr(devices, "separate_memory", lambda _: True)
        monkeypatch.setattr(picture_trial, "available", lambda *_: None)
    found = []
    for folder in folders:
        spec = spec_of(
            folder,
            input={"batch_size": 32, "transform": {"resize": [24, 32]}},
            output={"path": str(folder.parent / "out"), "format": "jsonl"},
            schedule={"on_miss": "eager"},
        )
        job = ran(store, spec)
        assert job.state is JobState.SUCCEEDED, job.error
        lines = [
            json.loads(line) for path in spec.output.path.glob("*.jsonl") for line in path.read_text().splitlines()
        ]
        good = {line["id"]: line["logits"] for line in lines if "logits" in line}
        bad = [line["id"] for line in lines if "logits" not in line]
        assert sorted([*good, *bad]) == sorted(path.name for path in folder.iterdir())
        found.append((good, bad))
    (good, bad), (alone, none) = found
    assert ended == []
    assert none == []
    assert {name: logits for name, logits in good.items() if "good" in name} == alone
    assert len(bad) > 3 * EACH
    assert {name for name in good if "good" not in name and "flip" not in name} == set()
