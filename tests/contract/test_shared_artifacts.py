"""Two state folders over one database: the files of stored schedules go through a shared place, by their SHA-256."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nimble_jobs.errors import NotFound
from nimble_jobs.objects import Objects
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import postgres, s3
from tests.cli import Cli

MODEL = """
import torch

class Shifted(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])

def shifted():
    return Shifted()
"""
SPEC = """
version: 1
name: shifted
kind: score
model: {source: "python:model.py:shifted"}
input: {source: x.npy, format: npy, batch_size: 4}
output: {path: out, format: npy, fields: [logits], if_exists: replace}
schedule: {progressive: false}
"""


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A shared folder, or an address."""
    if request.param == "folder":
        (tmp_path / "shared").mkdir()
        return str(tmp_path / "shared")
    return f"s3://{s3.bucket(monkeypatch)}/artifacts"


def spoil(place: str, name: str) -> None:
    """Make the shared bytes of an artifact others."""
    if place.startswith("s3:"):
        Objects(place).write(f"{name[:2]}/{name}", b"others")
    else:
        (Path(place) / name[:2] / name).write_bytes(b"others")


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_the_second_home_gets_a_stored_hit(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It builds nothing: rows come from the database, files from the shared place. Without that, it has to build."""
    np.save(tmp_path / "x.npy", np.ones((8, 4), np.float32))
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(SPEC)

    def run(home: str) -> Any:
        cli = Cli(tmp_path / home, capsys)
        return cli("run", tmp_path / "job.yaml", "--allow-python", tmp_path, "--json").json["schedule"]

    with postgres.schema() as url:
        monkeypatch.setenv("NIMBLE_JOBS_DB", url)
        monkeypatch.setenv("NIMBLE_JOBS_CACHE_SHARED", place)
        first = run("one")
        second = run("two")
        assert (first["hit"], second["hit"]) == ("miss", "stored")
        assert first["key"] == second["key"]
        with open_store(resolve(str(tmp_path / "two"))) as store:
            (refs,) = store.schedules.artifacts().values()
            assert refs
            assert all(store.artifacts.has(ref.name) for ref in refs)
        for ref in refs:
            spoil(place, ref.name)
        third = run("three")
        assert third["hit"] == "miss"
        assert "the bytes that cache.shared has for it are damaged" in third["miss_reason"]
        assert run("four")["hit"] == "stored"  # what was damaged was shared anew
        monkeypatch.delenv("NIMBLE_JOBS_CACHE_SHARED")
        alone = run("five")
        assert alone["hit"] == "miss"
        assert alone["miss_reason"].endswith("is not stored")
        assert run("one")["hit"] == "stored"  # a state folder that lacks files does not set the schedule aside
    assert np.load(next((tmp_path / "out").glob("*.npy")))[0].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_bytes(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are fetched once, verified, and put in place; `get` looks only here; what is nowhere is not found."""
    monkeypatch.setenv("NIMBLE_JOBS_CACHE_SHARED", place)
    with postgres.schema() as url, opened(tmp_path / "one", url) as one, opened(tmp_path / "two", url) as two:
        name = one.artifacts.put(b"code")
        with pytest.raises(NotFound):
            two.artifacts.get(name)
        assert two.artifacts.can_have(name)
        assert two.artifacts.fetch(name) == two.artifacts.get(name) == b"code"
        other = one.artifacts.put(b"other code")
        spoil(place, other)
        with pytest.raises(NotFound, match="are damaged; they were removed"):
            two.artifacts.fetch(other)
        with pytest.raises(NotFound, match=r"neither here nor where cache\.shared says"):
            two.artifacts.fetch(other)
        assert one.check() == two.check() == []


def test_a_place_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing fails for it: what is stored stays here, and the log says that it was not shared; the rest is a miss."""
    s3.bucket(monkeypatch)
    places: dict[str, Callable[[], object]] = {
        str(tmp_path / "nowhere"): lambda: None,
        "s3://bucket/a": lambda: monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
    }
    for place, before in places.items():
        before()
        monkeypatch.setenv("NIMBLE_JOBS_CACHE_SHARED", place)
        with postgres.schema() as url, opened(tmp_path / "one", url) as store:
            name = store.artifacts.put(place.encode())
            assert store.artifacts.fetch(name) == place.encode()
            with pytest.raises(NotFound):
                store.artifacts.fetch("0" * 64)
        assert f"artifact {name} was not shared: " in caplog.text


def opened(home: Path, url: str) -> Store:
    return open_store(resolve(str(home)), url)
