"""`explain` writes drawings of the schedule, or says at once why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli import Cli

SPEC = """
version: 1
name: look
kind: score
model: {source: "torchvision:squeezenet1_1", seed: 0}
input: {source: x.npy, format: npy, batch_size: 1}
schedule: {fuse: "off"}
output: {path: out, format: npy, fields: [logits]}
run: {device: cpu}
"""


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "home", capsys)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 40, 40), dtype=np.float32))
    path = tmp_path / "job.yaml"
    path.write_text(SPEC)
    return path


def test_explain_draws_what_it_explains(cli: Cli, spec: Path, tmp_path: Path) -> None:
    """Each option writes its file; stdout holds the answer alone; a stored schedule is drawn the same."""
    page, trace, dot = tmp_path / "a.html", tmp_path / "a.json", tmp_path / "a.dot"
    answer = cli("explain", spec, "--timeline", page, "--trace", trace, "--dot", dot, "--json")
    assert answer.code == 0, answer.err
    tasks = answer.json["graph"]["tasks"]
    assert page.read_text().count("data-task=") == tasks
    assert sum(e["ph"] == "X" for e in json.loads(trace.read_text())["traceEvents"]) == tasks
    assert dot.read_text().count("fillcolor=") == tasks
    assert answer.lines[-3:] == [f"wrote {path}" for path in (page, trace, dot)]
    again = tmp_path / "b.html"
    assert cli("explain", spec, "--no-build", "--timeline", again).code == 0
    assert again.read_text() == page.read_text()


def test_nothing_is_built_for_a_file_that_cannot_be_written(cli: Cli, spec: Path, tmp_path: Path) -> None:
    """Wrong suffixes and missing folders are bad usage; without a stored schedule there is nothing to draw."""
    for option, path in (("--timeline", tmp_path / "a.png"), ("--dot", tmp_path / "missing" / "a.dot")):
        answer = cli("explain", spec, option, path)
        assert (answer.code, answer.out) == (2, "")
        assert str(path) in answer.err
    assert cli("cache", "ls", "--json").json == []
    answer = cli("explain", spec, "--no-build", "--dot", tmp_path / "a.dot")
    assert answer.code == 102
    assert "no schedule to draw" in answer.err
    assert not (tmp_path / "a.dot").exists()
