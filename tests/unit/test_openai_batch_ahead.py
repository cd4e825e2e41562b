"""Commands that look at a batch file ahead of its job treat it as texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import Cli
from tests.text_models import write_bert

pytest.importorskip("transformers")


def test_commands_that_look_ahead(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`validate --data` says how many tokens a text may have; `cache why` and `explain` ask for schedules of texts."""
    write_bert(tmp_path / "m")
    body = {"model": "m", "input": "the cat"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    spec = {
        "version": 1,
        "name": "batch",
        "kind": "score",
        "model": {"source": "transformers:m"},
        "input": {"source": "in.jsonl", "format": "openai-batch"},
        "output": {"path": "out", "format": "openai-batch", "fields": ["id", "embedding"], "pooling": "mean"},
        "schedule": {"on_miss": "eager"},
        "run": {"device": "cpu"},
    }
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(spec))
    cli = Cli(tmp_path / "home", capsys)
    answer = cli("validate", str(path), "--data")
    assert answer.code == 0, answer.err
    assert "at most 64 per record" in answer.out
    answer = cli("cache", "why", str(path), "--json")
    assert "attention_mask" in answer.out + answer.err
    assert "output.pooling" not in answer.err
    answer = cli("explain", str(path), "--no-build", "--json")
    assert answer.code == 0, answer.err
    assert [bucket["hit"] for bucket in answer.json["buckets"]] == ["miss"]
    assert cli("run", str(path)).code == 0
