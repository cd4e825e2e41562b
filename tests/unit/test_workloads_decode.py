"""Who decodes the pictures of a job: chosen, said, and part of what decides its output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.engine import picture_trial
from nimble_jobs.errors import UsageError
from nimble_jobs.job import Job, JobState
from nimble_jobs.spec import JobSpec, dump
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import execute, real_station
from nimble_jobs.workloads.basis import basis
from nimble_jobs.workloads.context import Stop
from nimble_jobs.workloads.decode import Decode, choose, on_host
from nimble_jobs.workloads.scoring import Scoring
from tests.photographs import jpeg, photographs
from tests.picture_jobs import ran, spec_of
from tests.store_samples import queued

CPU = torch.device("cpu")
CODE = """
import torch

def net(**_):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5, 5), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(3))
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine photographs, one of which is damaged in its middle, and a PNG."""
    found = tmp_path / "in"
    found.mkdir()
    for i, (name, image) in enumerate(list(photographs().items()) * 2):
        if i < 9:
            data = jpeg(image.resize((120, 90)), quality=60 + i)
            (found / f"{i}-{name}.jpg").write_bytes(data if i != 4 else data[: len(data) // 3] + b"\xff\xd9")
    photographs()["coffee"].resize((90, 70)).save(found / "9.png")
    (tmp_path / "net.py").write_text(CODE.replace("Lazy", "").replace("Linear(3)", "Linear(4 * 8 * 6, 3)"))
    return found


def job(folder: Path, **given: Any) -> JobSpec:
    return spec_of(
        folder,
        input={"batch_size": 4, "transform": {"resize": [40, 30]}, **given},
        output={"path": str(folder.parent / "out"), "format": "npy"},
    )


def published(spec: JobSpec) -> tuple[dict[str, Any], np.ndarray, list[str]]:
    """The manifest, all logits, and the ids of bad records."""
    out = spec.output.path
    logits = np.concatenate([np.load(path) for path in sorted(out.glob("*logits*.npy"))])
    errors = out / "errors.jsonl"
    bad = [json.loads(line)["id"] for line in errors.read_text().splitlines()] if errors.exists() else []
    return json.loads((out / "manifest.json").read_text())["summary"], logits, bad


def test_a_device_decodes_what_it_can(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are near those of the CPU, for the same records; the manifest and an event name the decoder."""
    spec = job(folder)
    assert ran(store, spec).state is JobState.SUCCEEDED
    by_cpu = published(spec)
    monkeypatch.setattr(devices, "separate_memory", lambda _: True)
    monkeypatch.setattr(picture_trial, "available", lambda *_: None)  # the stand-in on the CPU
    again = spec.model_copy(update={"output": spec.output.model_copy(update={"path": folder.parent / "again"})})
    done = ran(store, again)
    assert done.state is JobState.SUCCEEDED, done.error
    by_gpu = published(again)
    assert by_cpu[0]["decode"] == on_host().to_json()
    assert (by_gpu[0]["decode"]["by"], by_gpu[0]["decode"]["resize"]) == ("gpu", by_cpu[0]["decode"]["resize"])
    assert "nvJPEG" in by_gpu[0]["decode"]["decoder"]
    assert by_gpu[2] == by_cpu[2]
    assert len(by_cpu[1]) == 10 - len(by_cpu[2])
    np.testing.assert_allclose(by_gpu[1], by_cpu[1], atol=0.02)
    said = [e.message for e in store.jobs.events(done.id) if e.kind == "decode"]
    assert said == [f"pictures are decoded by gpu, {by_gpu[0]['decode']['decoder']}"]


def test_who_decodes_is_chosen_by_spec_and_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto: the device if it can, else the CPU, which is told only where a device might have; gpu: that or an error."""
    gpu = torch.device("cuda")
    with open_reader(job(folder).input) as reader:
        assert choose(job(folder), reader, CPU) == (on_host(), None)
        with pytest.raises(UsageError, match=r"found gpu, but the job runs on the CPU.*; expected auto or cpu"):
            choose(job(folder, decode="gpu"), reader, CPU)
        monkeypatch.setattr(picture_trial, "available", lambda *_: "no such engine")
        assert choose(job(folder), reader, gpu) == (on_host(), "no such engine")
        monkeypatch.setattr(picture_trial, "available", lambda *_: None)
        found, why_not = choose(job(folder), reader, gpu)
        assert found is not None
        assert (found.by, why_not) == ("gpu", None)
        assert choose(job(folder, decode="cpu"), reader, gpu) == (on_host(), None)
    np.save(folder.parent / "x.npy", np.zeros((2, 3)))
    spec = job(folder, source=str(folder.parent / "x.npy"), format="npy", transform={})
    with open_reader(spec.input) as reader:
        assert choose(spec, reader, gpu) == (None, None)


class Attempts:
    """Attempts at one job over three shards. The first drains after a batch; later ones have a GPU that decodes."""

    def __init__(self, store: Store, folder: Path, patch: pytest.MonkeyPatch) -> None:
        output = {"path": str(folder.parent / "out"), "format": "npy", "shard_size": 4}
        self.spec = spec_of(folder, input={"batch_size": 4, "transform": {"resize": [40, 30]}}, output=output)
        self.landed: list[int] = []  # the shard of each batch
        self._store, self._patch = store, patch
        given = {"spec": dump(self.spec), "allow_python": [str(folder.parent)]}
        self._job = queued(store, name="n", kind="score", foreground=True, now=0.0, **given)
        whole = Scoring._counted

        def counted(scoring: Scoring, one: Any, lane: Any) -> Any:
            self.landed.append(one.beside.at.shard)
            return whole(scoring, one, lane)

        patch.setattr(Scoring, "_counted", counted)
        self._run(lambda: Stop.DRAIN if self.landed else Stop.GO)

    def next(self) -> Job:
        self._patch.setattr(devices, "separate_memory", lambda _: True)
        self._patch.setattr(picture_trial, "available", lambda *_: None)
        return self._run(lambda: Stop.GO)

    def restarts(self) -> int:
        """How often the job said that it starts again."""
        return [event.kind for event in self._store.jobs.events(self._job.id)].count("restart")

    def _run(self, wish: Callable[[], Stop]) -> Job:
        taken = self._store.jobs.claim_foreground(self._job.id, "w", now=10.0)
        assert taken is not None
        execute(taken, real_station(self._store, "w", "cpu", None), wish=wish)
        return self._store.jobs.get(self._job.id)


def test_an_attempt_keeps_the_cpu_of_an_earlier_one(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With auto it takes over shards that the CPU decoded, although this machine's device could decode."""
    attempts = Attempts(store, folder, monkeypatch)
    assert store.jobs.list()[0].state is JobState.QUEUED
    assert set(attempts.landed) == {0}
    done = attempts.next()
    assert done.state is JobState.SUCCEEDED, done.error
    assert published(attempts.spec)[0]["decode"]["by"] == "cpu"
    assert sorted(attempts.landed) == [0, 1, 2]
    assert attempts.restarts() == 0


def test_an_attempt_that_can_keep_nothing_chooses_anew(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input has changed since the CPU decoded it, so all is scored again, by the device."""
    attempts = Attempts(store, folder, monkeypatch)
    photographs()["china"].resize((70, 60)).save(folder / "new.png")
    assert attempts.next().state is JobState.SUCCEEDED
    assert published(attempts.spec)[0]["decode"]["by"] == "gpu"
    assert attempts.restarts() == 1


def test_the_decoder_is_part_of_the_basis_and_the_wish_is_not(folder: Path) -> None:
    """auto and what came of it are the same; another decoder or version is not."""
    with open_reader(job(folder).input) as reader:
        host = basis(job(folder), reader, on_host())
        assert basis(job(folder, decode="cpu"), reader, on_host()) == host
        assert basis(job(folder), reader) == host
        assert basis(job(folder), reader, Decode(by="cpu", decoder="Pillow 1.0")) != host
        assert basis(job(folder), reader, Decode(by="gpu", decoder=on_host().decoder)) != host
