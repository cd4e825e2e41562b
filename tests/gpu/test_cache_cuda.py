"""Stored schedules of a GPU: listed, replayed, carried to another state folder, and the software that they name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.store.toolchain import toolchain
from tests.cli import Cli

SPEC = """\
version: 1
name: net
kind: score
model: {source: "torchvision:squeezenet1_1"}
input: {source: x.npy, format: npy, batch_size: 4}
schedule: {fuse: FUSE, progressive: false}
output: {path: out, format: npy, fields: [id, top1]}
run: {device: cuda}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "x.npy", np.zeros((8, 3, 64, 64), dtype=np.float32))
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


def test_what_is_read_without_torch_is_what_keys_hold(device: torch.device) -> None:
    """torch, CUDA, triton, and where they can be read the driver and the GPU's name: nothing made here is stale."""
    facts = devices.facts(device)
    here = toolchain()
    assert here.outdated(facts) is None
    assert here.versions["cuda"].items() <= facts.items() | here.versions["cpu"].items()
    assert "cuda" not in here.devices or facts["device.name"] in here.devices["cuda"]
    assert here.outdated(facts | {"driver": "1.0"}) is not None or "driver" not in here.versions["cuda"]


@pytest.mark.parametrize("fuse", ["off", "auto"])
def test_a_schedule_is_carried_whole(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fuse: str) -> None:
    """Built ahead, sound, replayed against eager, exported with its machine code, imported, and then a stored hit."""
    spec.write_text(SPEC.replace("FUSE", fuse))
    cli, other = Cli(tmp_path / "home", capsys), Cli(tmp_path / "other", capsys)
    (made,) = cli("cache", "build", spec, "--json").json
    assert made["device"] == torch.cuda.get_device_name(0)
    (row,) = cli("cache", "verify", "--replay", "--json").json
    assert (row["sound"], row["replayed"]) == (True, True), row["said"]
    assert cli("cache", "export", made["key"], "one.zip").code == 0
    kernels = [a for a in cli("cache", "show", made["key"], "--json").json["artifacts"] if a["kind"] == "kernels"]
    if kernels:
        assert other("cache", "import", "one.zip").code == 2, "machine code is not taken unasked"
    assert other("cache", "import", "one.zip", "--yes").code == 0
    assert other("run", spec, "--json").json["schedule"]["hit"] == "stored"
    assert [r["state"] for r in other("cache", "ls", "--json").json] == ["ready"]
