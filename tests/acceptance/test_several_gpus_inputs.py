"""Texts, batch files and folders that grow, over several devices: the output equals one device's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from several_devices import child_of, ended, files, hold, release, under_way, worker

from nimble_jobs import spec as specs
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store
from tests.inbox import counts
from tests.store_samples import queued
from tests.text_jobs import sentences, write_texts
from tests.text_models import write_tokenizer
from tests.waiting import until

pytest.importorskip("transformers")

TEXTS, SHARD, LIMIT = 6000, 512, 32
WINDOW = 1024  # records in a window of outputs of unknown size
MODEL = """\
import itertools
import os
import pathlib
import time

import torch

HERE = pathlib.Path(__file__).parent
SEEN = itertools.count(1)


def held(records, most):
    for _ in records:
        seen = next(SEEN)
    while seen > most and (HERE / "held").exists():
        time.sleep(0.01)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(40, 8)

    def forward(self, input_ids, attention_mask):
        held(input_ids, 2300)
        try:
            (HERE / "kill").unlink()
        except FileNotFoundError:
            pass
        else:
            os.kill(os.getpid(), 9)
        found = self.words(input_ids) * attention_mask.unsqueeze(-1)
        return {"own": found.sum(1), "embedding": found.sum(1) / attention_mask.sum(1, keepdim=True)}


class Vectors(Net):
    def forward(self, input_ids, attention_mask):
        return self.words(input_ids)


class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        held(x, 60)
        return x.flatten(1).mean(1, keepdim=True) * self.scale
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def submit(store: Store, base: Path, name: str, *, net: str = "Net", **sections: dict[str, Any]) -> Job:
    """Queue a job whose output goes to `name`."""
    given: dict[str, dict[str, Any]] = {
        "model": {"source": f"python:{base}/model.py:{net}"},
        "schedule": {"on_miss": "eager"},
        "run": {"gpus": 2, "error_threshold": -1, "retry": {"initial": 0.05, "backoff": "constant"}},
    }
    merged = {part: {**given.get(part, {}), **sections.get(part, {})} for part in {*given, *sections}}
    merged["output"] = {"path": str(base / name), "shard_size": SHARD, **merged.get("output", {})}
    spec = specs.dump(specs.restore({"version": 1, "name": name, "kind": "score", **merged}))
    return queued(store, spec=spec, name=name, kind="score", allow_python=[str(base)], now=time.time())


def text_job(store: Store, base: Path, name: str, **run: Any) -> Job:
    """A job over texts of 0 to 60 words, two of which are null, cut at LIMIT tokens. It has six windows."""
    if not (base / "t.parquet").exists():
        texts: list[Any] = sentences(TEXTS, 60)
        texts[100] = texts[5000] = None
        write_texts(base / "t.parquet", texts)
    text = {"tokenizer": str(base), "max_length": LIMIT, "tokens_per_batch": 2048}
    read = {"source": str(base / "t.parquet"), "format": "text", "fields": {"x": "body", "id": "id"}, "text": text}
    return submit(store, base, name, input=read, output={"fields": ["id", "own"]}, run={"gpus": 2, **run})


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def test_texts(running: Store, base: Path) -> None:
    """Members claim windows of shards, since texts of a window share batches. The manifest counts all cut texts."""
    hold(base)
    job = text_job(running, base, "both")
    under_way(running, job, WINDOW)
    release(base)
    done = ended(running, job)
    alone = ended(running, text_job(running, base, "alone", gpus=1))
    assert alone.state is JobState.SUCCEEDED, alone.error
    assert (done.state, done.attempt, done.records_done, done.records_bad) == (JobState.SUCCEEDED, 1, TEXTS, 2)
    assert files(base / "both") == files(base / "alone")
    assert sum(member.records_done for member in running.shards.members(job.id)) == TEXTS
    cut = manifest(base / "alone")["summary"]["text"]["truncated"]
    assert manifest(base / "both")["summary"]["text"]["truncated"] == cut
    assert cut == sum(len(text.split()) + 2 > LIMIT for text in sentences(TEXTS, 60)) > 100
    assert [path.name for path in base.glob(".both*")] == []


def test_texts_of_a_device_that_is_killed(store: Store, base: Path) -> None:
    """Its windows are scored again by the other one, which has the output of one device."""
    hold(base)
    job = text_job(store, base, "both")
    with worker(store, base, "cpu,cpu"):
        until(lambda: len(store.shards.members(job.id)) == 2)
        (base / "kill").touch()
        release(base)
        done = ended(store, job)
        alone = ended(store, text_job(store, base, "alone", gpus=1))
    assert (done.state, done.attempt, alone.state) == (JobState.SUCCEEDED, 1, JobState.SUCCEEDED), done.error
    assert sum(member.failures for member in store.shards.members(job.id)) == 1
    assert files(base / "both") == files(base / "alone")


def test_a_batch_file(running: Store, base: Path) -> None:
    """Its answers are the same, in the order of the requests. So few texts make one window."""
    texts, lines = iter(sentences(TEXTS, 30)), []
    for number in range(TEXTS // 2):
        given = [text or "the cat" for text, _ in zip(texts, range(1 + number % 3), strict=False)]
        url = "/v1/chat/completions" if number == 300 else "/v1/embeddings"
        body = {"model": "mini", "input": given or ["the cat"]}
        lines.append(json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}))
    (base / "in.jsonl").write_text("\n".join(lines) + "\n")
    text = {"tokenizer": str(base), "max_length": LIMIT, "tokens_per_batch": 2048, "truncate": "end"}
    read = {"source": str(base / "in.jsonl"), "format": "openai-batch", "text": text}
    write = {"format": "openai-batch", "fields": ["embedding"], "pooling": "mean"}
    alone = ended(running, submit(running, base, "alone", net="Vectors", input=read, output=write, run={"gpus": 1}))
    assert alone.state is JobState.SUCCEEDED, alone.error
    done = ended(running, submit(running, base, "both", net="Vectors", input=read, output=write))
    assert (done.state, done.records_bad) == (JobState.SUCCEEDED, alone.records_bad), done.error
    counted = [(each.records_done, each.records_total) for each in (done, alone)]
    assert counted == [(len(lines), len(lines))] * 2  # requests, not their texts
    assert sum(member.records_done for member in running.shards.members(done.id)) == len(lines)
    assert files(base / "both") == files(base / "alone")


def test_pictures(store: Store, base: Path) -> None:
    """All members score the pictures that the first one found, also one that comes back once there are others."""
    (folder := base / "in").mkdir()
    for number in range(200):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / f"{number:03}.png")
    options: dict[str, dict[str, Any]] = {
        "net": "Mean",
        "input": {"source": str(folder), "format": "images", "batch_size": 5},
        "output": {"fields": ["id", "logits"], "shard_size": 10},
    }
    with worker(store, base, "cpu,cpu") as process:
        alone = ended(store, submit(store, base, "alone", **options, run={"gpus": 1}))
        assert alone.state is JobState.SUCCEEDED, alone.error
        hold(base)
        job = submit(store, base, "both", **options)
        members, leader = under_way(store, job, 20), store.jobs.get(job.id).worker
        lost = next(member for member in members if member.worker != leader)
        Image.new("RGB", (4, 4)).save(folder / "new.png")
        child_of(store, process, lost).kill()

        def came_back() -> bool:
            back = next(member for member in store.shards.members(job.id) if member.worker == lost.worker)
            return back.failures == 1 and back.records_done >= lost.records_done + 20

        until(came_back)
        release(base)
        done = ended(store, job)
    assert (done.state, done.attempt, done.records_done) == (JobState.SUCCEEDED, 1, 200), done.error
    assert files(base / "both") == files(base / "alone")
    assert [path.name for path in base.glob(".both*")] == []


def test_only_new(running: Store, base: Path) -> None:
    """All members score the files that the first one listed, and those count as seen afterwards."""
    folder = base / "in"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in "abcd":
        np.save(folder / f"{name}.npy", rng.normal(size=(100, 3)).astype(np.float32))
    read = {"source": str(folder), "format": "npy", "batch_size": 5, "only_new": {"settle": 0}}
    write = {"fields": ["id", "logits"], "shard_size": 10}
    hold(base)
    job = submit(running, base, "both", net="Mean", input=read, output=write)
    under_way(running, job, 20)
    np.save(folder / "e.npy", np.ones((5, 3), np.float32))  # comes after the listing
    release(base)
    done = ended(running, job)
    assert done.state is JobState.SUCCEEDED, done.error
    ids = [name for part in sorted((base / "both").glob("part-*")) for name in pq.read_table(part)["id"].to_pylist()]
    assert ids == [f"{name}.npy:{number}" for name in "abcd" for number in range(100)]
    assert counts(done) == {"listed": 4, "new": 4}
    spec = {**done.spec, "output": {**done.spec["output"], "path": str(base / "next")}}
    after = queued(running, spec=spec, name="both", kind="score", allow_python=[str(base)], now=time.time())
    assert counts(ended(running, after)) == {"listed": 5, "new": 1, "skipped": 4}
