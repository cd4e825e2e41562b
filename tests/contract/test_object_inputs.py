"""Inputs in an object store, over a real server: the same scores as from local files, whatever changes or breaks."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nimble_jobs import patience
from nimble_jobs.data import fetched, object_inputs
from nimble_jobs.data.object_inputs import fetch, list_objects
from nimble_jobs.errors import DataError
from nimble_jobs.objects import Objects
from nimble_jobs.retention.copies import left_copies
from tests import cutting, s3
from tests.cli import Cli
from tests.object_jobs import SPEC, Desk, jpeg, upload, write
from tests.trainings import lay_out


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of its own."""
    return f"s3://{s3.bucket(monkeypatch)}"


def npy(first: int, count: int = 6) -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(first, first + 4 * count, dtype=np.float32).reshape(count, 4))
    return file.getvalue()


def parquet(first: int) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"x": [[float(first + i), 1.0, 2.0, 3.0] for i in range(5)]}), file)
    return file.getvalue()


NPY = {"a.npy": npy(0), "b.npy": npy(100), "deep/c.npy": npy(200), ".hidden.npy": npy(300), "notes.txt": b"no records"}
PICTURES = {
    "cats/1.jpg": jpeg(10),
    "cats/2.jpg": jpeg(60),
    "dogs/1.jpeg": jpeg(90),
    "dogs/.x.jpg": jpeg(1),
    "a.txt": b"",
}
KINDS: dict[str, tuple[dict[str, bytes], str, str]] = {
    "a file": (NPY, "b.npy", "format: npy"),
    "a folder": (NPY, "", "format: npy"),
    "a glob": (NPY, "[ab].npy", "format: npy"),
    "a deep glob": (NPY, "**/*.npy", "format: npy"),
    "a folder in a glob": (NPY, "d*/*.npy", "format: npy"),
    "parquet": ({"p/0.parquet": parquet(0), "p/1.parquet": parquet(9)}, "p", "format: parquet, fields: {x: x}"),
    "pictures": (PICTURES, "", "format: images"),
    "pictures by a glob": (PICTURES, "*/1.*", "format: images"),
    "csv": ({"t.csv": b"x\n1.5\nnan\n2\n"}, "t.csv", "format: csv, fields: {x: x}"),
}


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(tmp_path, capsys)


@pytest.mark.parametrize(
    ("kind", "below"), [*((kind, "in/records") for kind in KINDS), ("a folder", ""), ("a deep glob", "")]
)
def test_the_same_scores(kind: str, below: str, address: str, desk: Desk) -> None:
    """As from the same files in a folder: ids, order, bad records; and no copy stays."""
    files, source, input_ = KINDS[kind]
    where = f"{address}/{below}".rstrip("/")
    upload(where, files)
    write(desk.folder / "records", files)
    for at, out in ((str(desk.folder / "records"), "local"), (where, "fetched")):
        ran = desk.run(f"{at}/{source}".rstrip("/"), input_, out)
        assert ran.code in (0, 1), ran.err
    assert desk.results("local") == desk.results("fetched") != []
    errors = [(desk.folder / out / "errors.jsonl") for out in ("local", "fetched")]
    assert errors[0].exists() == errors[1].exists() == (kind == "csv")
    if kind == "csv":
        assert errors[0].read_text().replace(str(desk.folder / "records"), where) == errors[1].read_text()
    assert desk.copies() == []
    event = desk.event("fetched")
    assert event.message.startswith(f"{where}/p: 2 objects" if kind == "parquet" else where)
    assert event.data["bytes"] > 0


def test_another_job_resumes(address: str, desk: Desk) -> None:
    """The output is that of the same objects, whichever job fetched them to wherever; with other objects it is not."""
    upload(address, NPY)

    def run() -> Any:
        spec = desk.folder / "job.yaml"
        text = SPEC.format(source=address, input="format: npy", out=desk.folder / "out")
        spec.write_text(text.replace("if_exists: replace", "if_exists: resume"))
        return desk.cli("run", spec, "--allow-python", desk.folder)

    assert run().code == 0
    written = {path: path.stat().st_mtime_ns for path in (desk.folder / "out").iterdir()}
    assert run().code == 0
    assert {path: path.stat().st_mtime_ns for path in (desk.folder / "out").iterdir()} == written
    assert desk.event("published").message == f"{desk.folder / 'out'} already holds this job's output"
    upload(address, {"a.npy": npy(1000)})
    again = run()
    assert again.code != 0
    assert "holds the output of another job" in again.err


TRAINING = """
version: 1
name: {name}
kind: finetune
model: {{source: "python:model.py:net"}}
input: {{source: "{at}/train.npz", format: npz, fields: {{x: images, label: labels}}, batch_size: 8}}
output: {{path: {name}}}
schedule: {{on_miss: eager}}
train: {{epochs: 2, optimizer: {{name: sgd, lr: 0.02}}, validation: {{source: "{at}/train.npz"}}}}
"""


def test_a_training(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its records and its held-out ones are fetched, and the weights are those from local files."""
    lay_out(tmp_path)
    upload(f"{address}/data", {"train.npz": (tmp_path / "train.npz").read_bytes()})
    cli = Cli(tmp_path / "home", capsys)
    for name, at in (("local", str(tmp_path)), ("fetched", f"{address}/data")):
        (tmp_path / f"{name}.yaml").write_text(TRAINING.format(name=name, at=at))
        ran = cli("run", tmp_path / f"{name}.yaml", "--allow-python", tmp_path)
        assert ran.code == 0, ran.err
    local, from_there = (tmp_path / name / "model.safetensors" for name in ("local", "fetched"))
    assert local.read_bytes() == from_there.read_bytes()
    assert list(fetched.held(tmp_path / "home")) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("in", "{a}/in: nothing to read; expected objects that end in .npy"),
        ("none.npy", "{a}/none.npy: nothing to read; expected objects that end in .npy"),
        ("*.npy", "{a}/*.npy: nothing to read; expected objects that match {a}/*.npy"),
        ("//x.npy", "found '{a}///x.npy', with a part that is empty or begins with a dot"),
    ],
)
def test_nothing_there(source: str, message: str, address: str, desk: Desk) -> None:
    upload(address, {"in/only.txt": b"text"})
    ran = desk.run(f"{address}/{source}", "format: npy", "out")
    assert ran.code != 0
    assert message.format(a=address) in ran.err


def test_no_bucket(address: str, desk: Desk) -> None:
    ran = desk.run(f"{address}-none/x.npy", "format: npy", "out")
    assert ran.code != 0
    assert f"{address}-none: no such bucket; expected one that exists" in ran.err


def test_messages_name_the_address(address: str, desk: Desk) -> None:
    """Not the copy, of which users know nothing."""
    upload(address, {"t.csv": b"a,b\n1,2\n"})
    ran = desk.run(f"{address}/t.csv", "format: csv, fields: {x: z}", "out")
    assert ran.code != 0
    assert f"{address}/t.csv: input.fields.x: no 'z'; expected one of: a, b" in ran.err


def test_a_name_that_no_file_can_have(address: str) -> None:
    upload(address, {"a//b.jpg": jpeg(1)})
    with pytest.raises(
        DataError, match=r"a//b.jpg: cannot be the name of a file; expected parts between single slashes"
    ):
        list_objects(address, "images")


@pytest.mark.parametrize("how", ["changed", "vanished"])
def test_another_writer(how: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is written meanwhile is noticed, also with the same size; what came since is not read."""
    upload(address, NPY)
    listing = list_objects(address, "npy")
    assert sorted(listing.objects) == ["a.npy", "b.npy"]
    upload(address, {"b.npy": npy(500), "new.npy": npy(1)} if how == "changed" else {})
    if how == "vanished":
        Objects(address, whole_bucket=True).remove(["b.npy"])
    with pytest.raises(DataError, match=f"b.npy: {how} while the input was fetched"):
        list(fetch(listing, tmp_path / "copies", boot="1"))
    assert not list((tmp_path / "copies").glob("*.complete"))


def test_what_an_earlier_attempt_fetched(address: str, tmp_path: Path) -> None:
    """Is used if it is of the same listing and of the same boot; other copies go."""
    upload(address, NPY)
    folder, listing = tmp_path / "copies", list_objects(address, "npy")
    begun = fetch(listing, folder, boot="1")
    next(begun)
    begun.close()
    (folder / "other").mkdir()
    root = listing.root(folder)
    there = [path.name for path in root.glob("*.npy")]
    assert there
    sizes = list(fetch(listing, folder, boot="1"))
    assert len(sizes) == len(listing.objects) - len(there)
    assert not (folder / "other").exists()
    assert list(fetch(listing, folder, boot="2")) == []  # it is complete, and was written to the disk
    (folder / f"{root.parent.name}.complete").unlink()
    assert len(list(fetch(listing, folder, boot="3"))) == len(listing.objects)
    upload(address, {"a.npy": npy(7)})
    newer = list_objects(address, "npy")
    assert newer.digest != listing.digest
    assert len(list(fetch(newer, folder, boot="3"))) == len(newer.objects)
    assert not root.exists()
    assert (newer.root(folder) / "a.npy").read_bytes() == npy(7)


@pytest.mark.parametrize("answers", [True, False])
def test_processes_fetch_many(answers: bool, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each object arrives; what a process cannot fetch, this one tries again, and says why that failed."""
    monkeypatch.setattr(object_inputs, "_MANY", 4)
    monkeypatch.setattr(object_inputs, "_PIECE", 3)
    monkeypatch.setattr(object_inputs, "usable_cores", lambda: 2)
    files = {f"f{i % 3}/{i}.jpg": jpeg(i) for i in range(10)}
    upload(address, files)
    listing = list_objects(address, "images")
    if not answers:
        Objects(address, whole_bucket=True).remove(["f1/7.jpg"])
        with pytest.raises(DataError, match=r"f1/7.jpg: vanished while the input was fetched"):
            list(fetch(listing, tmp_path / "copies", boot="1"))
        return
    assert sum(fetch(listing, tmp_path / "copies", boot="1")) == listing.nbytes
    root = listing.root(tmp_path / "copies")
    assert {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.jpg")} == files


def test_too_little_room(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(address, NPY)
    monkeypatch.setattr(object_inputs, "_ROOM", 1 << 62)
    with pytest.raises(DataError, match=r"in 2 objects do not fit into .*/inputs/job/input, whose disk has"):
        list(fetch(list_objects(address, "npy"), tmp_path / "home" / "inputs" / "job" / "input", boot="1"))


@pytest.mark.parametrize("first", range(0, cutting.WAYS, 2))
def test_cut_connections(address: str, desk: Desk, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Each request is cut twice when it is first made; nothing is lost or damaged."""
    monkeypatch.setattr(patience, "_FIRST_S", 0.001)
    upload(address, NPY)
    write(desk.folder / "records", NPY)
    assert desk.run(str(desk.folder / "records"), "format: npy", "local").code == 0
    with cutting.proxy(s3.endpoint(), first) as cut:
        monkeypatch.setenv("AWS_ENDPOINT_URL", cut.address)
        ran = desk.run(address, "format: npy", "fetched")
        assert ran.code == 0, ran.err
        assert cut.cuts >= 6
    assert desk.results("fetched") == desk.results("local")


def test_prune_removes_the_copies_of_jobs_that_have_ended(address: str, desk: Desk) -> None:
    upload(address, NPY)
    (desk.folder / "job.yaml").write_text(SPEC.format(source=address, input="format: npy", out=desk.folder / "out"))
    for _ in range(2):
        assert desk.cli("submit", desk.folder / "job.yaml", "--allow-python", desk.folder).code == 0
    ended, waiting = (job["id"] for job in desk.cli("ls", "--json").json)
    for job in (ended, waiting, "2aaaaaaaaaaa"):
        fetched.folder_of(desk.folder / "home", job).mkdir(parents=True)
        (fetched.folder_of(desk.folder / "home", job) / "x").write_bytes(b"12345")
    assert desk.cli("cancel", ended).code == 0
    with desk.cli.store() as store:
        assert [left.bytes for left in left_copies(store, time.time(), remove=False)] == [5]  # one ended just now
        later = time.time() + 3600
        assert [left.bytes for left in left_copies(store, later, remove=True)] == [5, 5]
    assert [path.name for path in desk.copies()] == [waiting]
