"""SIGKILL in the middle of a job over texts: the next attempt publishes what an undisturbed one does, byte for byte."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.job import JobState
from nimble_jobs.store import open_store
from tests.seeds import seed
from tests.stage_kills import published, queue, score
from tests.text_jobs import sentences, write_texts
from tests.text_models import write_bert

pytest.importorskip("transformers")

SEED = seed()
TEXTS, SHARD = 1500, 32
STAGES = ("replay", "columns", "shards", "sheets", "publish")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("model"))


def text_input(folder: Path) -> dict[str, Any]:
    """A column of texts, two of which are null."""
    texts: list[Any] = sentences(TEXTS, 60)
    texts[100] = texts[1400] = None
    source = write_texts(folder / "t.parquet", texts)
    return {"source": str(source), "format": "text", "fields": {"x": "body", "id": "id"}}


def batch_input(folder: Path) -> dict[str, Any]:
    """Requests for one to three texts each, one of which the API does not have."""
    texts, lines = iter(sentences(TEXTS, 60)), []
    for number in range(TEXTS // 2):
        given = [text for text, _ in zip(texts, range(1 + number % 3), strict=False)]
        url = "/v1/chat/completions" if number == 300 else "/v1/embeddings"
        body = {"model": "mini", "input": [text or "the cat" for text in given]}
        lines.append(json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}))
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return {"source": str(folder / "in.jsonl"), "format": "openai-batch"}


def prepared(base: Path, model: Path, given: dict[str, Any]) -> None:
    """Queue a job whose records make windows of about 256."""
    base.mkdir()
    form = "parquet" if given["format"] == "text" else "openai-batch"
    output = {"path": str(base / "out"), "format": form, "fields": ["id", "embedding"], "pooling": "mean"}
    spec = {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": f"transformers:{model}"},
        "input": {**given, "text": {"tokens_per_batch": 512}},
        "schedule": {"on_miss": "eager"},
        "output": {**output, "shard_size": SHARD},
        "run": {"device": "cpu", "error_threshold": -1, "retry": {"max_attempts": 100}},
    }
    queue(base, spec)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["text", "openai-batch"])
def test_killed_in_the_middle(form: str, tmp_path: Path, model: Path) -> None:
    """Once in the middle of the replays, and once in another stage at a random moment. Finished windows are kept."""
    draw = random.Random(SEED)
    whole = tmp_path / "whole"
    given = text_input(tmp_path) if form == "text" else batch_input(tmp_path)
    prepared(whole, model, given)
    works = score(whole, "none", 0)
    assert works is not None
    expected = published(whole)
    assert len(expected) > TEXTS // 2 // SHARD
    stage = draw.choice(STAGES[1:])
    for kill in (("replay", works["replay"] * 2 // 3), (stage, draw.randint(1, works[stage]))):
        base = tmp_path / kill[0]
        prepared(base, model, given)
        told = f"seed {SEED}: killed at {kill}"
        assert score(base, *kill) is None, told
        again = score(base, "none", 0)
        assert again is not None, told
        assert published(base) == expected, told
        if kill[0] == "replay":
            # The second window may have been replayed whole, but not yet written.
            assert 0 < again["replay"] < works["replay"], told
        with open_store(base / "home") as store:
            (job,) = store.jobs.list()
            assert job.state is JobState.SUCCEEDED, told
            assert store.check() == []
