"""Outputs in an object store, over a real server: whole or not at all, whatever is in the way or breaks."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nimble_jobs import patience
from nimble_jobs.data import BadRecord
from nimble_jobs.data.object_runs import discard_objects
from nimble_jobs.data.object_staging import ObjectStaging
from nimble_jobs.data.records import NotFinite, ShardCounts
from nimble_jobs.errors import DataError, FencedOut, ObjectTrouble, OutputExists
from nimble_jobs.objects import Objects, Through, once
from nimble_jobs.retention.objects import left_objects
from nimble_jobs.spec.model import OutputSpec
from tests import cutting, s3
from tests.cli import Cli
from tests.ledger import Book

MODEL = """
import torch

class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x

def double():
    return Double()
"""
SPEC = """
version: 1
name: doubled
kind: score
model: {source: "python:model.py:double"}
input: {source: x.npy, format: npy, batch_size: 4}
output: {path: ADDRESS, format: npy, fields: [logits], shard_size: 8}
schedule: {on_miss: eager}
"""
SHARDS = 3
RECORDS = np.arange(96, dtype=np.float32).reshape(24, 4)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in a bucket of its own."""
    return f"s3://{s3.bucket(monkeypatch)}/results/one"


class Outputs:
    """Attempts at one address, whose publications one ledger knows."""

    def __init__(self, address: str, beside: Path) -> None:
        self.address, self.ledger, self.objects = address, Book(beside), Objects(address)

    def stage(
        self,
        number: int = 1,
        job: str = "job",
        if_exists: str = "fail",
        basis: str = "b",
        through: Through = once,
    ) -> ObjectStaging:
        output = OutputSpec(path=self.address, format="npy", if_exists=if_exists)  # type: ignore[arg-type]
        ledger = self.ledger.claim(job, number, self.address)
        return ObjectStaging(output, job, number, ledger=ledger, basis=basis, through=through)

    def whole(self, **options: Any) -> dict[str, Any]:
        """One whole attempt."""
        staging = self.stage(**options)
        if staging.finished is None:
            write(staging)
        return staging.publish({}, shards=SHARDS)

    def values(self) -> list[float]:
        """What a reader of the manifest reads."""
        manifest = json.loads(self.objects.read("manifest.json"))
        parts = [self.objects.read(f["name"]) for f in manifest["files"] if f["name"].endswith(".npy")]
        return [float(value) for part in parts for value in np.load(io.BytesIO(part))]


def write(staging: ObjectStaging, upto: int = SHARDS, salt: int = 0) -> None:
    for index in range(upto):
        if index not in staging.done:
            bad = [BadRecord(index=index, id=str(index), reason="r")]
            staging.write_shard(index, {"v": np.array([index + salt, index + 0.5])}, bad)


VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


@pytest.fixture
def outputs(address: str, tmp_path: Path) -> Outputs:
    return Outputs(address, tmp_path / "out")


def test_a_job(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its manifest names every file, under the address that all commands show; no secret is shown anywhere."""
    np.save(tmp_path / "x.npy", RECORDS)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(SPEC.replace("ADDRESS", address))
    cli = Cli(tmp_path / "home", capsys)
    ran = cli("run", tmp_path / "job.yaml", "--allow-python", tmp_path, "--json")
    assert ran.code == 0, ran.err
    (job,) = cli("ls", "--json").json
    said = cli("show", job["id"], "--json").json
    assert said["outputs"]["path"] == address
    assert address in cli("show", job["id"]).out
    objects = Objects(address)
    manifest = json.loads(objects.read("manifest.json"))
    assert set(objects.list()) == {"manifest.json", *(f["name"] for f in manifest["files"])}
    parts = [np.load(io.BytesIO(objects.read(f["name"]))) for f in manifest["files"]]
    assert len(parts) == 3
    np.testing.assert_array_equal(np.concatenate(parts), 2 * RECORDS)
    again = cli("run", tmp_path / "job.yaml", "--allow-python", tmp_path)
    assert again.code == 100
    assert f"{address} exists already; choose another output.path, or set output.if_exists: replace" in again.err
    told = [cli("logs", job["id"]).out, again.err, json.dumps(said)]
    assert not any(s3.SECRET in text for text in told)
    for path in (tmp_path / "home").rglob("*"):
        assert not path.is_file() or s3.SECRET.encode() not in path.read_bytes(), path


def test_published(outputs: Outputs) -> None:
    """Nothing is there to read before the manifest is; afterwards only what it names."""
    staging = outputs.stage()
    write(staging)
    assert "manifest.json" not in outputs.objects.list()
    facts = staging.publish({"made": "so"}, shards=SHARDS)
    assert (facts["path"], facts["records"], facts["bad"]) == (outputs.address, 6, 3)
    assert set(outputs.objects.list()) == set(facts["files"])
    assert outputs.values() == VALUES
    assert staging.publish({}, shards=SHARDS) == facts


def test_a_later_attempt_takes_shards_over(outputs: Outputs) -> None:
    """Sound ones stay where they are; a changed one, one that is gone, and those of another basis are written again."""
    first = outputs.stage()
    write(first)
    names = [shard.files[0].name for _, shard in sorted(first.done.items())]
    outputs.objects.write(names[1], outputs.objects.read(names[1])[:-1] + b"x")
    outputs.objects.remove([names[2]])
    assert sorted(outputs.stage(2, basis="other").done) == []
    second = outputs.stage(2)
    assert sorted(second.done) == [0]
    write(second)
    second.publish({}, shards=SHARDS)
    assert names[0] in outputs.objects.list()
    assert outputs.values() == VALUES


def test_outputs_that_are_not_finite_are_counted(outputs: Outputs) -> None:
    """Also those in shards that an earlier attempt wrote."""
    first = outputs.stage()
    first.write_shard(
        0, {"v": np.array([np.nan])}, counts=ShardCounts(not_finite={"v": NotFinite(records=1, first="a")})
    )
    second = outputs.stage(2)
    second.write_shard(
        1, {"v": np.array([np.inf])}, counts=ShardCounts(not_finite={"v": NotFinite(records=1, first="b")})
    )
    assert second.publish({}, shards=2)["not_finite"] == {"v": {"records": 2, "first": "a"}}


def test_the_first_manifest_stays(outputs: Outputs) -> None:
    """An attempt that was stopped before it published finds the other one's output and adopts it."""
    stale = outputs.stage(1)
    write(stale, salt=100)
    fresh = outputs.stage(2, basis="changed")
    write(fresh)
    facts = fresh.publish({}, shards=SHARDS)
    assert stale.publish({}, shards=SHARDS) == facts
    assert outputs.values() == VALUES
    assert outputs.stage(3).finished == facts


def test_the_same_moment(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs that both saw a free place: the condition lets one manifest be written, and the other job fails."""
    one, other = outputs.stage(job="one"), outputs.stage(job="other")
    write(one)
    write(other, salt=100)
    create = Objects.create

    def late(self: Objects, name: str, data: bytes) -> None:
        monkeypatch.setattr(Objects, "create", create)
        one.publish({}, shards=SHARDS)
        create(self, name, data)

    monkeypatch.setattr(Objects, "create", late)
    with pytest.raises(OutputExists, match="exists already"):
        other.publish({}, shards=SHARDS)
    assert outputs.values() == VALUES
    other.discard()
    assert all(not name.startswith("other-") for name in outputs.objects.list())


@pytest.mark.parametrize("how", ["fail", "resume", "replace"])
def test_what_others_put_there(outputs: Outputs, how: str) -> None:
    """Nothing that nimble-jobs did not publish is replaced."""
    outputs.objects.write("notes/mine.txt", b"mine")
    with pytest.raises(OutputExists):
        outputs.stage(if_exists=how)
    assert outputs.objects.read("notes/mine.txt") == b"mine"


def test_replaced(outputs: Outputs, tmp_path: Path) -> None:
    """In one step, under the condition that nobody else did; the old files go then. A forged manifest is left alone."""
    outputs.whole(job="old")
    old = set(outputs.objects.list())
    with pytest.raises(OutputExists, match="holds the output of another job"):
        outputs.stage(job="new", if_exists="resume", basis="other")
    assert outputs.stage(job="new", if_exists="resume").finished is not None
    outputs.whole(job="new", if_exists="replace", basis="other")
    assert set(outputs.objects.list()).isdisjoint(old - {"manifest.json"})
    assert outputs.values() == VALUES
    outputs.ledger = Book(tmp_path / "elsewhere")
    with pytest.raises(OutputExists, match="has no record that this job published it"):
        outputs.stage(job="third", if_exists="replace")


def test_cancelled_while_stopped(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files went with the job, so a manifest that comes late is taken back."""
    staging = outputs.stage()
    write(staging)
    create = Objects.create

    def late(self: Objects, name: str, data: bytes) -> None:
        discard_objects(outputs.address, "job")
        create(self, name, data)

    monkeypatch.setattr(Objects, "create", late)
    with pytest.raises(FencedOut, match="was removed while this attempt published"):
        staging.publish({}, shards=SHARDS)
    assert outputs.objects.list() == {}


def lost_answer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next request of this kind is carried out, but its answer does not come."""
    request = getattr(Objects, name)

    def carried_out(self: Objects, *given: Any) -> None:
        monkeypatch.setattr(Objects, name, request)
        request(self, *given)
        raise ObjectTrouble("no answer")

    monkeypatch.setattr(Objects, name, carried_out)


def test_what_was_replaced_goes_also_without_an_answer(
    outputs: Outputs, quick: patience.Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repetition finds its own manifest, and still knows which files that one replaced."""
    old = set(outputs.whole(job="old")["files"])
    staging = outputs.stage(job="new", if_exists="replace", basis="other")
    write(staging)
    lost_answer(monkeypatch, "replace")
    facts = quick.through(lambda: staging.publish({}, shards=SHARDS))
    assert set(outputs.objects.list()) == set(facts["files"])
    assert old.isdisjoint(set(facts["files"]) - {"manifest.json"})
    assert outputs.values() == VALUES


@pytest.mark.parametrize("when", ["at the start", "at the end"])
def test_a_manifest_whose_files_are_gone_is_not_adopted(outputs: Outputs, when: str) -> None:
    """By whichever attempt or job: it is taken back, and the output is made anew."""
    late = outputs.stage(job="other", if_exists="resume") if when == "at the end" else None
    outputs.whole()
    outputs.objects.remove([name for name in outputs.objects.list() if name.endswith("part-00001.v.npy")])
    staging = late or outputs.stage(job="other", if_exists="resume")
    assert staging.finished is None
    write(staging)
    facts = staging.publish({}, shards=SHARDS)
    assert all(name in outputs.objects.list() for name in facts["files"])
    assert outputs.values() == VALUES


def test_a_store_that_forbids_removal(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is there, so the job has succeeded; what stays is said."""
    outputs.whole(job="old")
    staging = outputs.stage(job="new", if_exists="replace", basis="other")
    write(staging)

    def forbidden(self: Objects, names: Any) -> None:
        if list(names):
            raise DataError(f"{self.address}: permission denied (AccessDenied)")

    monkeypatch.setattr(Objects, "remove", forbidden)
    facts = staging.publish({}, shards=SHARDS)
    assert staging.left_behind == f"{outputs.address}: permission denied (AccessDenied)"
    assert set(facts["files"]) < set(outputs.objects.list())
    assert outputs.values() == VALUES


def test_published_while_cleared(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round: the manifest comes between the look and the removal, and goes with the files."""
    staging = outputs.stage()
    write(staging)
    remove = Objects.remove

    def late(self: Objects, names: Any) -> None:
        monkeypatch.setattr(Objects, "remove", remove)
        staging.publish({}, shards=SHARDS)
        remove(self, names)

    monkeypatch.setattr(Objects, "remove", late)
    discard_objects(outputs.address, "job")
    assert outputs.objects.list() == {}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> patience.Patience:
    """Patience that repeats without pauses worth mentioning."""
    monkeypatch.setattr(patience, "_FIRST_S", 0.001)
    return patience.Patience(limit_s=20.0)


@pytest.mark.parametrize("first", range(0, cutting.WAYS, 2))
def test_cut_connections(
    outputs: Outputs, quick: patience.Patience, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Each request is cut twice when it is first made: before it, within it, before its answer, or within that. Nothing
    is lost, doubled or different.
    """
    with cutting.proxy(s3.endpoint(), first) as cut:
        monkeypatch.setenv("AWS_ENDPOINT_URL", cut.address)
        half = outputs.stage(1, through=quick.through)
        write(half, upto=1)
        whole = outputs.stage(2, through=quick.through)
        assert sorted(whole.done) == [0]
        write(whole)
        facts = whole.publish({}, shards=SHARDS)
        assert cut.cuts > 30
        assert cut.cuts >= half.troubles + whole.troubles > 10
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint())
    assert set(Objects(outputs.address).list()) == set(facts["files"])
    outputs.objects = Objects(outputs.address)
    assert outputs.values() == VALUES


def test_a_job_over_cut_connections(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It succeeds, and an event counts what had to be asked again."""
    monkeypatch.setattr(patience, "_FIRST_S", 0.001)
    np.save(tmp_path / "x.npy", RECORDS)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(SPEC.replace("ADDRESS", address))
    cli = Cli(tmp_path / "home", capsys)
    with cutting.proxy(s3.endpoint(), 2) as cut:
        monkeypatch.setenv("AWS_ENDPOINT_URL", cut.address)
        ran = cli("run", tmp_path / "job.yaml", "--allow-python", tmp_path, "--json")
        assert ran.code == 0, ran.err
    with cli.store() as store:
        (event,) = (event for event in store.jobs.events() if event.kind == "trouble")
    assert event.data["requests"] > 10
    assert "requests to the object store got no answer and had to be made again" in event.message
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint())
    objects = Objects(address)
    manifest = json.loads(objects.read("manifest.json"))
    parts = [np.load(io.BytesIO(objects.read(f["name"]))) for f in manifest["files"]]
    np.testing.assert_array_equal(np.concatenate(parts), 2 * RECORDS)


def test_pruned(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a failed job left is counted and removed; what others published or work on stays."""
    cli = Cli(tmp_path / "home", capsys)
    np.save(tmp_path / "x.npy", RECORDS)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(SPEC.replace("ADDRESS", address))
    for _ in range(2):
        assert cli("submit", tmp_path / "job.yaml", "--allow-python", tmp_path).code == 0
    ended, waiting = (job["id"] for job in cli("ls", "--json").json)
    assert cli("cancel", ended).code == 0
    objects = Objects(address)
    for job in (ended, waiting):
        objects.write(f"{job}-1-0123abcd/part-00000.v.npy", b"12345")
    with cli.store() as store:
        now = time.time() + 3600
        (left,) = left_objects(store, now, remove=False)
        assert (left.bytes, left.trouble) == (5, None)
        assert len(list(left_objects(store, now, remove=True))) == 1
        assert list(left_objects(store, now, remove=True)) == []
    assert list(objects.list()) == [f"{waiting}-1-0123abcd/part-00000.v.npy"]


def test_pruned_after_it_was_replaced(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a replaced output left goes, if whoever replaced it died too early; the output that is there stays."""
    cli = Cli(tmp_path / "home", capsys)
    np.save(tmp_path / "x.npy", RECORDS)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(SPEC.replace("ADDRESS", f"{address}, if_exists: replace"))
    objects, kept = Objects(address), dict[str, bytes]()
    for _ in range(2):
        ran = cli("run", tmp_path / "job.yaml", "--allow-python", tmp_path)
        assert ran.code == 0, ran.err
        kept = {name: objects.read(name) for name in objects.list()} | kept  # as the first output was
        for name, data in kept.items():
            if name not in objects.list():
                objects.write(name, data)
    there = set(objects.list())
    held = {str(file["name"]) for file in json.loads(objects.read("manifest.json"))["files"]}
    assert there - held - {"manifest.json"}
    with cli.store() as store:
        (left,) = left_objects(store, time.time() + 3600, remove=True)
        assert left.trouble is None
    assert set(objects.list()) == {"manifest.json", *held}
