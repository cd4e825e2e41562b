"""What stands in the place of a file and is none: it is refused at once, named for what it is, and never waited for."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from PIL import Image

from nimble_jobs import regular
from nimble_jobs.data import open_reader
from nimble_jobs.errors import DataError, NimbleError, SpecError
from nimble_jobs.models import identity, weights_identity
from nimble_jobs.models.build import build
from nimble_jobs.models.weights import read_weights
from nimble_jobs.regular import NotRegular, open_regular, read_regular
from nimble_jobs.spec import load
from nimble_jobs.spec.model import InputSpec, ModelSpec
from nimble_jobs.store.bundle import Bundle
from nimble_jobs.workloads.training.keep import checkpoint

Put = Callable[[Path], None]


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


def link_to_pipe(path: Path) -> None:
    pipe = Path("the-pipe").absolute()
    if not pipe.exists():
        os.mkfifo(pipe)
    path.symlink_to(pipe)


# What is put there, and what a message calls it.
STRANGE: dict[str, tuple[Put, str]] = {
    "pipe": (os.mkfifo, "a named pipe"),
    "link to a pipe": (link_to_pipe, "a named pipe"),
    "socket": (socket_at, "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a character device"),
    "folder": (Path.mkdir, "a folder"),
}
NO_FOLDER = [name for name in STRANGE if name != "folder"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Whoever waits for a writer that never comes fails instead of hanging."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("strange", STRANGE)
def test_opening(strange: str) -> None:
    """A message says what is there; a link to a regular file is one."""
    put, named = STRANGE[strange]
    put(Path("x"))
    with pytest.raises(NotRegular) as caught:
        open_regular("x")
    assert str(caught.value) == f"is {named}; expected a regular file"
    Path("file").write_bytes(b"held")
    Path("link").symlink_to("file")
    assert read_regular("link") == b"held"


def test_a_pipe_that_takes_the_place_of_a_file_just_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look that counts is at what was opened."""
    os.mkfifo("x")
    regular_file = Path(__file__).stat()
    monkeypatch.setattr(regular.os, "stat", lambda _path: regular_file)
    with pytest.raises(NotRegular):
        open_regular("x")


def test_a_library_opens_the_file_that_was_looked_at() -> None:
    """The name that is handed to a library leads to the open file, whatever lies at its path by then."""
    Path("x").write_bytes(b"held")
    with open_regular("x") as file:
        Path("x").unlink()
        os.mkfifo("x")
        assert Path(regular.name_of(file)).read_bytes() == b"held"


@pytest.mark.parametrize("strange", NO_FOLDER)
@pytest.mark.parametrize("format_", ["npy", "npz", "parquet", "csv"])
def test_an_input(format_: str, strange: str) -> None:
    """Every reader refuses it, given alone, in a folder and through a glob."""
    put, named = STRANGE[strange]
    Path("data").mkdir()
    path = Path("data") / f"x.{format_}"
    put(path)
    for source in (path, path.parent, path.with_name("x*")):
        with pytest.raises(DataError) as caught:
            open_reader(InputSpec(source=str(source), format=format_))  # type: ignore[arg-type]
        assert f"x.{format_}: is {named}; expected a regular file" in str(caught.value)


def test_a_link_to_nothing_among_tables() -> None:
    """A file that should be among the input's and is not is an error, not a file less."""
    Path("data").mkdir()
    np.save("data/a.npy", np.ones((2, 3), np.float32))
    Path("data/b.npy").symlink_to("gone.npy")
    with pytest.raises(DataError, match=r"b\.npy: No such file or directory; expected a readable file"):
        open_reader(InputSpec(source="data", format="npy"))
    Path("data/b.npy").unlink()
    Path("data/b.npy").mkdir()  # a folder is none of the folder's files
    assert open_reader(InputSpec(source="data", format="npy")).total == 2


@pytest.mark.parametrize("strange", NO_FOLDER)
def test_an_image_among_others_is_a_bad_record(strange: str) -> None:
    """The others are read."""
    put, named = STRANGE[strange]
    Path("data").mkdir()
    for name in ("a", "c"):
        Image.new("RGB", (2, 2)).save(f"data/{name}.png")
    put(Path("data/b.png"))
    with open_reader(InputSpec(source="data", format="images")) as reader:
        (batch,) = reader.batches(batch_size=8)
    assert batch.ids == ["a.png", "c.png"]
    assert [(b.id, b.reason) for b in batch.bad] == [
        ("b.png", f"cannot be decoded: is {named}; expected a regular file")
    ]


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights(name: str, strange: str) -> None:
    """Both kinds of file."""
    put, named = STRANGE[strange]
    put(Path(name))
    with pytest.raises(NimbleError, match=f"{name}: is {named}; expected a regular file"):
        read_weights(Path(name))


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("python:m.py:make", "m.py"),
        ("exported:m.pt2", "m.pt2"),
        ("transformers:m", "m/config.json"),
        ("transformers:m", "m/tokenizer.json"),
    ],
)
def test_a_model(source: str, file: str, strange: str) -> None:
    """Its file, and every member of its folder, both for its identity and when it is built."""
    put, named = STRANGE[strange]
    scheme, target = source.split(":", 1)
    Path("m").mkdir()
    if file == "m/tokenizer.json":
        Path("m/config.json").write_text('{"model_type": "bert"}')
        if strange == "folder":
            pytest.skip("a folder inside of a model's folder is no file of it")
    put(Path(file))
    spec = ModelSpec(source=f"{scheme}:{Path(target).absolute()}")
    looks = [lambda: build(spec, allowed_python=[Path()])]
    if file != "m/tokenizer.json":
        looks.append(lambda: identity(spec))
    for look in looks:
        with pytest.raises(NimbleError, match=f"{file}: is {named}; expected a regular file"):
            look()


@pytest.mark.parametrize("strange", NO_FOLDER)
def test_a_checkpoint(strange: str) -> None:
    """It is damaged."""
    put, named = STRANGE[strange]
    Path("step").mkdir()
    put(Path("step/checkpoint.json"))
    with pytest.raises(NimbleError, match=rf"checkpoint\.json: is {named}; expected a regular file"):
        checkpoint.read(Path("step"))


@pytest.mark.parametrize("strange", STRANGE)
def test_a_file_of_exported_schedules(strange: str) -> None:
    """`cache import` takes files only."""
    put, named = STRANGE[strange]
    put(Path("bundle"))
    with pytest.raises(NimbleError, match=f"bundle: is {named}; expected a regular file"):
        Bundle(Path("bundle"))


SPEC = """\
version: 1
name: n
kind: score
model: {{source: "{source}", weights: {weights}}}
input: {{source: {input}, format: npy}}
output: {{path: out}}
"""


@pytest.mark.parametrize("strange", NO_FOLDER)
def test_a_spec_that_names_one(strange: str) -> None:
    """`submit` says it, with the line of each field."""
    put, named = STRANGE[strange]
    for name in ("m.py", "w.pt", "x.npy", "spec.yaml"):
        put(Path(name))
    spec = Path("job.yaml")
    spec.write_text(SPEC.format(source="python:m.py:make", weights="w.pt", input="x.npy"))
    with pytest.raises(SpecError) as caught:
        load(spec)
    here = Path.cwd()
    assert str(caught.value).splitlines() == [
        f"job.yaml:4: model.source: {here}/m.py is {named}; expected a regular file",
        f"job.yaml:4: model.weights: {here}/w.pt is {named}; expected a regular file",
        f"job.yaml:5: input.source: {here}/x.npy is {named}; expected a regular file",
    ]
    with pytest.raises(SpecError, match=f"{named}; expected a job spec in YAML"):
        load(Path("spec.yaml"))


def test_identities_of_strange_weights_do_not_open_them() -> None:
    """Weights are told by what `stat` says; who reads them refuses them."""
    os.mkfifo("w.pt")
    assert stat.S_ISFIFO(Path("w.pt").stat().st_mode)
    assert "w.pt" in weights_identity(ModelSpec(source="torchvision:resnet18", weights=str(Path("w.pt").absolute())))
