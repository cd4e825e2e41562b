"""The commands show each of several inputs by its name, type and shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli import Cli

CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4)

    def forward(self, ids, meta):
        return {"sum": self.words(ids).sum(1) * meta["weight"].unsqueeze(1)}
"""
SPEC = """\
version: 1
name: several
kind: score
model: {source: "python:net.py:Net"}
input:
  source: d.npz
  format: npz
  fields: {x: {ids: tokens, meta.weight: weight}}
  batch_size: 4
output: {path: out, fields: [id, sum]}
run: {device: cpu}
"""


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    (tmp_path / "net.py").write_text(CODE)
    (tmp_path / "job.yaml").write_text(SPEC)
    random = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", tokens=random.integers(0, 9, (6, 3)).astype(np.int16), weight=random.random(6))
    monkeypatch.setenv("NIMBLE_JOBS_ALLOW_PYTHON", str(tmp_path))
    return Cli(tmp_path / "home", capsys)


def test_the_cache_and_explain_show_several_inputs(cli: Cli, tmp_path: Path) -> None:
    """In listings, in the parts of the key, and in the reason for a miss."""
    job = tmp_path / "job.yaml"
    shown = "[4] ids int16[3], meta.weight float64"
    built = cli("cache", "build", job)
    assert built.code == 0, built.err
    assert shown in built.out + built.err
    (row,) = cli("cache", "ls", "--json").json
    assert row["input"] == shown
    assert shown in cli("cache", "ls").out
    parts = cli("explain", job, "--json").json["key_parts"]
    assert parts["input"] == shown
    assert parts["input.part.ids"] == "int16[3] integer"
    assert parts["input.part.meta.weight"] == "float64[] float"
    np.savez(tmp_path / "d.npz", tokens=np.zeros((6, 3), dtype=np.int64), weight=np.ones(6))
    why = cli("cache", "why", job)
    assert "input.part.ids: int64[3] integer; stored: int16[3] integer" in why.out + why.err


def test_validate_looks_at_several_inputs(cli: Cli, tmp_path: Path) -> None:
    """With --data it reads a record, and says what does not fit the model."""
    job = tmp_path / "job.yaml"
    found = cli("validate", job, "--data", "--json").json["data"]
    assert found["record"] == "ids int16[3], meta.weight float64"
    assert found["outputs"] == "sum [4, 4]"
    wrong = cli("validate", job, "--data", "input.fields.x={idz: tokens, meta.weight: weight}")
    assert wrong.code == 2
    assert "input.fields.x.idz: no such argument; the model takes: ids (required), meta (required)" in wrong.err
    wrong = cli("validate", job, "--data", "input.fields.x={ids: tokens, meta.height: weight}")
    refusal = (
        "input.fields.x: the model cannot take a batch of 4: ids int16[3], meta.height float64: KeyError: 'weight'"
    )
    assert refusal in wrong.err
    ran = cli("run", job, "input.fields.x={ids: tokens, meta.height: weight}")
    assert ran.code == 100
    assert "failed: KeyError: 'weight'\n" in ran.err
    wrong = cli("validate", job, "--data", "input.fields.x={ids: words, meta.weight: weight}")
    assert "input.fields.x.ids: no 'words'; expected one of: tokens, weight" in wrong.err


def test_whole_numbers_for_an_argument_of_fractions_are_refused_with_the_remedy(cli: Cli, tmp_path: Path) -> None:
    """The message names the arguments that are whole."""
    (tmp_path / "net.py").write_text(CODE.replace("self.words(ids).sum(1)", "self.words.weight.T @ ids"))
    answer = cli("validate", tmp_path / "job.yaml", "--data")
    assert answer.code == 2
    assert "input.fields.x: the model computes in float32 and refuses whole numbers (ids int16): " in answer.err
    assert answer.lines[-1].endswith("; if it wants fractions, store them as fractions")
