"""Commands about stored schedules, on those of a training on texts: one step for each bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import Cli
from tests.text_trainings import lay_out

pytest.importorskip("transformers")

SPEC = """
version: 1
name: animals
kind: finetune
model: {source: transformers:bert}
input:
  source: train.parquet
  format: text
  fields: {x: text, label: animal}
  batch_size: 8
  text: {max_length: 32, buckets: [16, 32]}
output: {path: out}
train: {epochs: 1, optimizer: {name: adamw, lr: 0.01}}
schedule: {fuse: "off", streams: 1}
run: {device: cpu}
"""


@pytest.mark.timeout(300)
def test_built_ahead_explained_and_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`explain` lists the buckets before and after they are built; the training then hits, and `show` lists them."""
    lay_out(tmp_path)
    path, cli = tmp_path / "job.yaml", Cli(tmp_path / "home", capsys)
    path.write_text(SPEC)
    answer = cli("explain", path, "--no-build", "--json")
    assert answer.code == 0, answer.err
    missing = answer.json["buckets"]
    assert [(bucket["length"], bucket["batch"], bucket["hit"]) for bucket in missing] == [
        (16, 8, "miss"),
        (32, 8, "miss"),
    ]
    assert cli("cache", "why", path, "--json").json["hit"] is False
    assert "tokens_per_batch" in cli("cache", "build", path, "--batch-size", "4").err
    built = cli("cache", "build", path, "--json")
    assert built.code == 0, built.err
    assert {one["key"] for one in built.json} == {bucket["key"] for bucket in missing}
    assert cli("cache", "why", path, "--json").json["hit"] is True
    assert [bucket["hit"] for bucket in cli("explain", path, "--json").json["buckets"]] == ["stored", "stored"]
    assert "buckets.16 tokens: 8 in a batch, stored hit" in cli("explain", path).out
    assert cli("run", path).code == 0
    assert "schedule.32 tokens: 8 in a batch, its schedule, a stored hit" in cli("show", "animals").out


@pytest.mark.timeout(300)
def test_a_reason_of_all_buckets_is_told_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A training too short for any build names the reason once in its schedule, and once among its events."""
    lay_out(tmp_path)
    path, cli = tmp_path / "job.yaml", Cli(tmp_path / "home", capsys)
    path.write_text(SPEC)
    assert cli("run", path).code == 0
    shown = cli("show", "animals").out.splitlines()
    told = [line.partition(": ")[0] for line in shown if "building would not pay" in line]
    assert len(told) == 2
    assert told[0] == "schedule.fallback"
    assert told[1].startswith("events.")
    assert "schedule.state: eager" in shown
    assert sum("8 in a batch, eager PyTorch" in line for line in shown) == 2
