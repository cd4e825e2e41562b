"""Jobs over texts: embeddings equal those of each text alone, whatever is beside it and however a job is cut short."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.cli.jobs import _schedule
from nimble_jobs.engine.held import Held
from nimble_jobs.engine.observe import Watched
from nimble_jobs.job import JobState
from nimble_jobs.models.packed import Packed
from nimble_jobs.planner.search.search import Search
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.views.schedules import grouped, rows_of
from nimble_jobs.views.stages import lines, of_job
from nimble_jobs.worker.executor import execute, real_station
from nimble_jobs.workloads.context import Stop
from nimble_jobs.workloads.scoring import Scoring
from tests import prefork
from tests.store_samples import queued
from tests.text_jobs import one_by_one, outputs, run, sentences, text_spec, worst, write_texts
from tests.text_models import write_bert, write_bert_tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LONG = 2048
TEXTS = 10_000 if os.environ.get(prefork.COLD) else 1000  # with --all more


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that takes long texts."""
    return write_bert(tmp_path_factory.mktemp("bert"), max_position_embeddings=LONG)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("small"))


def test_embeddings_equal_those_of_each_text_alone(store: Store, tmp_path: Path, model: Path) -> None:
    """Thousands of texts of 0 to 2,000 tokens, in any order, to 1e-5; order and batches change less than 1e-6."""
    texts = sentences(TEXTS, 2000)
    expected = one_by_one(model, texts, LONG)
    text = {"max_length": LONG}
    spec = text_spec(tmp_path, model, write_texts(tmp_path / "t.parquet", texts), input={"text": text})
    spec["input"]["text"]["max_length"] = LONG
    job = run(store, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    found = outputs(tmp_path / "out")
    assert list(found) == [f"r{i}" for i in range(len(texts))]
    first = np.stack(list(found.values()))
    assert worst(first, expected) < 1e-5

    order = np.random.default_rng(3).permutation(len(texts))
    shuffled = write_texts(tmp_path / "s.parquet", [texts[i] for i in order])
    other = text_spec(
        tmp_path, model, shuffled, out="other", input={"text": {**spec["input"]["text"], "tokens_per_batch": 4096}}
    )
    assert run(store, other).state is JobState.SUCCEEDED
    second = np.stack(list(outputs(tmp_path / "other").values()))
    assert worst(second, first[order]) < 1e-6


@pytest.mark.parametrize("buckets", ["auto", [8, 16, 24], [64]])
def test_bucket_edges(store: Store, tmp_path: Path, small: Path, buckets: Any) -> None:
    """Texts of exactly a bucket's length, and of one token more, up to what the model takes."""
    texts = [" ".join(["cat"] * n) for n in (*range(32), 61, 62, 63, 64, 100_000)]
    source = write_texts(tmp_path / "t.parquet", texts)
    job = run(store, text_spec(tmp_path, small, source, input={"text": {"buckets": buckets}}))
    assert job.state is JobState.SUCCEEDED, job.error
    assert worst(np.stack(list(outputs(tmp_path / "out").values())), one_by_one(small, texts, 64)) < 1e-5
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["summary"]["text"]["truncated"] == 3
    assert manifest["summary"]["text"]["max_length"] == 64
    events = [event.message for event in store.jobs.events(job.id)]
    assert "3 of 37 texts were cut to 64 tokens" in events
    assert job.timings["text"]["truncated"] == 3
    assert sum(bucket["records"] for bucket in job.schedule["buckets"]) == len(texts)
    assert job.schedule["buckets"][-1]["length"] == 64
    shown = dict(_schedule(job))
    assert ", eager PyTorch, " in shown["64 tokens"]
    assert {name for name in shown if name.endswith(" tokens")} == {
        f"{b['length']} tokens" for b in job.schedule["buckets"]
    }


def test_odd_texts(store: Store, tmp_path: Path, small: Path) -> None:
    """Empty and blank ones, NUL, emoji, other directions and special tokens are texts like others."""
    texts = ["", " \n\t", "a\0cat", "😀 cat", "שלום cat עالم", "the [SEP] cat [PAD] [MASK]", "cat" * 50_000]
    job = run(store, text_spec(tmp_path, small, write_texts(tmp_path / "t.parquet", texts)))
    assert job.state is JobState.SUCCEEDED, job.error
    assert worst(np.stack(list(outputs(tmp_path / "out").values())), one_by_one(small, texts, 64)) < 1e-5


def test_bad_records_are_left_out(store: Store, tmp_path: Path, small: Path) -> None:
    """With their places; the others keep their order and values. Whole shards and windows may be bad."""
    texts = sentences(600, 40)
    rows = [json.dumps({"id": f"r{i}", "body": text if i >= 300 else None}) for i, text in enumerate(texts)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    spec = text_spec(tmp_path, small, tmp_path / "t.jsonl", output={"shard_size": 64}, run={"error_threshold": 0.5})
    job = run(store, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    found = outputs(tmp_path / "out")
    assert list(found) == [f"r{i}" for i in range(300, 600)]
    assert worst(np.stack(list(found.values())), one_by_one(small, texts[300:], 64)) < 1e-5
    bad = [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert [b["id"] for b in bad] == [f"r{i}" for i in range(300)]
    assert bad[4]["reason"] == f"{tmp_path}/t.jsonl:5: field 'body' is null; expected text"

    strict = text_spec(tmp_path, small, tmp_path / "t.jsonl", out="strict", run={"error_threshold": 0.4})
    job = run(store, strict)
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert "of 600 records are bad, more than run.error_threshold 0.4 allows" in job.error


def test_too_long_texts_may_be_bad_records(store: Store, tmp_path: Path, small: Path) -> None:
    texts = ["cat", "cat " * 62, "cat " * 63]
    source = write_texts(tmp_path / "t.parquet", texts)
    spec = text_spec(tmp_path, small, source, input={"text": {"truncate": "error"}}, run={"error_threshold": -1.0})
    assert run(store, spec).state is JobState.SUCCEEDED
    assert list(outputs(tmp_path / "out")) == ["r0", "r1"]
    (bad,) = (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
    assert json.loads(bad)["reason"] == (
        f"{source}: record 2: has more than 64 tokens; to cut longer texts, set input.text.truncate: end"
    )


def test_all_records_bad(store: Store, tmp_path: Path, small: Path) -> None:
    """There is nothing to embed, and the folder says so."""
    (tmp_path / "t.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    job = run(store, text_spec(tmp_path, small, tmp_path / "t.jsonl", run={"error_threshold": -1.0}))
    assert job.state is JobState.SUCCEEDED, job.error
    assert (job.outputs["records"], job.outputs["bad"]) == (0, 2)


@pytest.mark.parametrize("types", [True, False])
def test_pairs_are_classified_as_transformers_does(store: Store, tmp_path: Path, types: bool) -> None:
    """Both texts in one row, told apart by their types if the folder's tokenizer gives them."""
    transformers = pytest.importorskip("transformers")
    folder = write_bert(tmp_path / "cross", cls="BertForSequenceClassification", num_labels=3)
    if types:
        write_bert_tokenizer(folder)
    first, second = sentences(200, 40), sentences(200, 40, seed=1)[::-1]
    second = [text or "cat" for text in second]  # transformers takes an empty one for none
    source = write_texts(tmp_path / "t.parquet", first, other=second)
    spec = text_spec(tmp_path, folder, source, input={"fields": {"x": ["body", "other"], "id": "id"}})
    spec["output"] |= {"fields": ["id", "logits"], "pooling": None}
    job = run(store, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    net = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = []
    with torch.no_grad():
        for a, b in zip(first, second, strict=True):
            given = tokenizer(a, b, return_tensors="pt", truncation="longest_first", max_length=64)
            assert ("token_type_ids" in given) is types
            expected.append(net(**given).logits[0].numpy())
    assert worst(np.stack(list(outputs(tmp_path / "out", "logits").values())), np.stack(expected)) < 1e-5
    how = json.loads((tmp_path / "out" / "manifest.json").read_text())["summary"]["text"]
    assert how.get("token_types", False) is types


def test_a_tokenizer_of_another_folder_changes_the_output(store: Store, tmp_path: Path, small: Path) -> None:
    """A resumed job must not mix two tokenizers, so the output is another one."""
    texts = sentences(20, 20)
    source = write_texts(tmp_path / "t.parquet", texts)
    other = write_bert(tmp_path / "other")
    raw = json.loads((other / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]
    (other / "tokenizer.json").write_text(json.dumps(raw))
    done = []
    for out, tokenizer in (("a", None), ("b", str(other))):
        spec = text_spec(tmp_path, small, source, out=out, input={"text": {"tokenizer": tokenizer}})
        assert run(store, spec).state is JobState.SUCCEEDED
        done.append(json.loads((tmp_path / out / "manifest.json").read_text()))
    assert done[0]["basis"] != done[1]["basis"]
    assert done[0]["summary"]["text"]["tokenizer"] != done[1]["summary"]["text"]["tokenizer"]


def test_a_resumed_job_gives_the_same_bits(
    store: Store, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker leaves in the middle of the second window; the next attempt begins with that window. Its manifest does
    not say how many texts were cut, because it knows only those that it scored itself.
    """
    monkeypatch.setattr("nimble_jobs.workloads.text.windows.FEW_RECORDS", 128)
    texts = sentences(2000, 60)
    source = write_texts(tmp_path / "t.parquet", texts)
    size, short = {"shard_size": 128}, {"text": {"max_length": 32}}
    assert run(store, text_spec(tmp_path, small, source, input=short, output=size)).state is JobState.SUCCEEDED

    spec = text_spec(tmp_path, small, source, out="again", input=short, output=size)
    job = queued(store, spec=spec, name="texts", kind="score", foreground=True, now=0.0)
    batches: list[int] = []
    whole = Scoring._counted

    def counted(self: Scoring, landed: Any, lane: Any) -> Any:
        batches.extend([1] * landed.beside.at.last)
        return whole(self, landed, lane)

    claimed = store.jobs.claim_foreground(job.id, "w", now=0.0)
    assert claimed is not None
    with monkeypatch.context() as patch:
        patch.setattr(Scoring, "_counted", counted)
        wish = lambda: Stop.DRAIN if batches else Stop.GO  # noqa: E731
        execute(claimed, real_station(store, "w", "cpu", None), wish=wish)
    assert store.jobs.get(job.id).state is JobState.QUEUED
    done = len(list((tmp_path / f".again.{job.id}" / "shards-1").glob("*.json")))
    assert 0 < done < 16
    claimed = store.jobs.claim_foreground(job.id, "w", now=10.0)
    assert claimed is not None
    execute(claimed, real_station(store, "w", "cpu", None), wish=lambda: Stop.GO)
    assert store.jobs.get(job.id).state is JobState.SUCCEEDED
    first, second = outputs(tmp_path / "out"), outputs(tmp_path / "again")
    assert list(first) == list(second)
    assert all((first[name] == second[name]).all() for name in first)
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("out", "again")]
    cut, again = (manifest["summary"]["text"]["truncated"] for manifest in manifests)
    assert again == cut > 0  # of all attempts


def test_a_window_with_finished_shards_is_counted_once(
    store: Store, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window is scored again if one of its shards is left. Its other records, good and bad, were counted before."""
    monkeypatch.setattr("nimble_jobs.workloads.text.windows.FEW_RECORDS", 10)  # of short texts, four times as many
    texts: list[Any] = sentences(80, 20)
    for row in (3, 7, 12, 25, 55):
        texts[row] = None
    source, share = write_texts(tmp_path / "t.parquet", texts), {"error_threshold": 5 / 80, "device": "cpu"}
    spec = text_spec(tmp_path, small, source, output={"shard_size": 10}, run=share)
    job = queued(store, spec=spec, name="texts", kind="score", foreground=True, now=0.0)
    claimed = store.jobs.claim_foreground(job.id, "w", now=0.0)
    assert claimed is not None
    landed: list[bool] = []
    whole = Scoring._counted

    def counted(self: Scoring, one: Any, lane: Any) -> Any:
        landed.append(one.beside.at.last)
        return whole(self, one, lane)

    with monkeypatch.context() as patch:
        patch.setattr(Scoring, "_counted", counted)
        execute(claimed, real_station(store, "w", "cpu", None), wish=lambda: Stop.DRAIN if landed else Stop.GO)
    sheets = sorted((tmp_path / f".out.{job.id}" / "shards-1").glob("*.json"))
    assert len(sheets) == 4
    sheets[-1].unlink()  # as if the worker had died before it wrote the window's last shard

    claimed = store.jobs.claim_foreground(job.id, "w", now=10.0)
    assert claimed is not None
    execute(claimed, real_station(store, "w", "cpu", None), wish=lambda: Stop.GO)
    ended = store.jobs.get(job.id)
    assert ended.state is JobState.SUCCEEDED, ended.error
    assert (ended.records_done, ended.records_bad) == (80, 5)
    assert len(outputs(tmp_path / "out")) == 75


@pytest.mark.parametrize("fields", [["id", "embedding"], ["id", "last_hidden_state"]])
def test_several_windows_keep_the_order(
    store: Store, tmp_path: Path, small: Path, fields: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nimble_jobs.workloads.text.windows.FEW_RECORDS", 25)
    texts = sentences(500, 60)
    spec = text_spec(tmp_path, small, write_texts(tmp_path / "t.parquet", texts), output={"shard_size": 30})
    assert run(store, spec).state is JobState.SUCCEEDED
    found = outputs(tmp_path / "out")
    assert list(found) == [f"r{i}" for i in range(500)]
    assert worst(np.stack(list(found.values())), one_by_one(small, texts, 64)) < 1e-5


def test_schedules_of_all_buckets_are_found_again(
    store: Store, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share one copy of the weights, also as residents, and run from the store in the next process.

    There the calls of their model are watched while the first bucket is checked.
    """
    watched: list[Packed] = []

    def watch(module: Packed, device: torch.device, held: Held | None) -> Watched:
        watched.append(module)
        return Watched(module, device, held)

    monkeypatch.setattr("nimble_jobs.planner.jobs.take.Watched", watch)
    texts = sentences(300, 60)
    source = write_texts(tmp_path / "t.parquet", texts)
    expected = one_by_one(small, texts, 64)
    hits, counts, station = [], [], real_station(store, "w", "cpu", None)
    schedule = {"on_miss": "build", "progressive": False, "fuse": "off"}
    for out, again in (("a", station), ("b", station), ("c", real_station(store, "w", "cpu", None))):
        spec = text_spec(tmp_path, small, source, out=out, schedule=schedule)
        spec["input"]["text"] = {"buckets": [16, 64]}
        job = run(store, spec, again)
        assert job.state is JobState.SUCCEEDED, job.error
        hits.append([bucket["hit"] for bucket in job.schedule["buckets"]])
        counts.append(len(watched))
        assert worst(np.stack(list(outputs(tmp_path / out).values())), expected) < 1e-5
    assert hits == [["miss", "miss"], ["resident", "resident"], ["stored", "stored"]]
    assert counts == [1, 1, 2]
    (one, other) = rows_of(store, store.schedules.list()[::-1])  # the longer one first
    assert one["family"] == other["family"]
    image = {**one, "key": "image", "bucket": None, "family": None}
    assert [row["bucket"] for row in grouped([one, image, other])] == [16, 64, None]
    loaded: list[Any] = [station.residents.get(key) for key in station.residents.keys]
    assert len(loaded) == 2
    assert loaded[0].siblings is loaded[1].siblings
    embeddings = [
        dict(one.module.named_parameters())["model.model.embeddings.word_embeddings.weight"] for one in loaded
    ]
    assert embeddings[0].data_ptr() == embeddings[1].data_ptr()


@pytest.mark.parametrize("merged", [False, True])
def test_a_bucket_whose_first_call_makes_what_it_reads_is_watched_too(
    store: Store, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, merged: bool
) -> None:
    """Calls of the shorter ones, which were checked before, leave no traces in the model. If the schedules have merged
    products, a copy of it was made before, too.
    """
    plainly = Search._try

    def try_(self: Search, source: Source, **named: Any) -> Any:
        found = plainly(self, source, **named)
        if found is not None and source.merged:
            self._best = found
        return found

    if merged:
        monkeypatch.setattr(Search, "_try", try_)
    embeddings = pytest.importorskip("transformers.models.bert.modeling_bert").BertEmbeddings
    plain = embeddings.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = plain(self, *args, **kwargs)
        if found.shape[1] <= 32:
            return found
        if getattr(self, "_further", None) is None:
            self._further = torch.arange(64.0)[:, None] * 1e-3
        return found + self._further[: found.shape[1]]

    monkeypatch.setattr(embeddings, "forward", forward)
    source = write_texts(tmp_path / "t.parquet", ["cat " * 25] * 400 + ["dog " * 8] * 150 + ["mat " * 55] * 20)
    schedule = {"on_miss": "build", "progressive": False, "fuse": "off", "kernels": {"merged": merged}}
    for hit in ("miss", "stored"):
        spec = text_spec(tmp_path, small, source, out=hit, schedule=schedule)
        spec["input"]["text"] = {"buckets": [16, 32, 64]}
        job = run(store, spec, real_station(store, "w", "cpu", None))
        assert job.state is JobState.SUCCEEDED, job.error
        assert [bucket["hit"] for bucket in job.schedule["buckets"]] == [hit] * 3


def test_buckets_that_stay_in_eager_say_so_together(store: Store, tmp_path: Path, small: Path) -> None:
    """One event with their number and keys, not one for each."""
    source = write_texts(tmp_path / "t.parquet", sentences(60, 60))
    spec = text_spec(tmp_path, small, source, schedule={"on_miss": "build"})
    spec["input"]["text"] = {"buckets": [16, 32, 64]}
    job = run(store, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    said = [event for event in store.jobs.events(job.id) if "stayed in eager" in event.message]
    assert len(said) == 1
    assert said[0].message.startswith("3 of 3 buckets: stayed in eager: the job ended after ")
    assert len(said[0].data["keys"]) == 3


def test_what_would_help_a_job_over_texts() -> None:
    """Not `input.batch_size`, which it may not set."""
    stage = {"name": "replay", "busy": 0.9, "workers": 1, "unit": "replay in flight", "limit": 0, "depth": 0.0}
    (_, (_, of_arrays)), (_, (_, of_texts)) = (lines({"stages": [stage], **more}) for more in ({}, {"text": {}}))
    assert "a larger input.batch_size" in of_arrays
    assert of_texts.endswith("What would help: model.dtype fp16 or bf16, or a faster device")


def test_what_would_help_is_what_can_be_done(store: Store) -> None:
    """The GPU decodes only where there is one, and nobody is told to build what is built."""

    def advice(busiest: str, schedule: dict[str, Any], *others: str, on_miss: str = "build") -> str:
        stage = {"workers": 1, "unit": "thread", "limit": 0, "depth": 0.0}
        stages = [{"name": name, "busy": 0.9 if name == busiest else 0.1, **stage} for name in (busiest, *others)]
        job = queued(
            store, spec={"input": {"decode": "cpu"}, "schedule": {"on_miss": on_miss}}, name="n", kind="score", now=0.0
        )
        return of_job(replace(job, timings={"stages": stages}, schedule=schedule))[-1][1]

    assert "input.decode" not in advice("read and decode", {})
    assert "input.decode: gpu, or more CPU cores" in advice("read and decode", {}, "download")
    assert "cache build" in advice("replay", {"fallback": "on_miss: eager"}, on_miss="eager")
    assert "cache build" not in advice("replay", {"fallback": "it draws random numbers"})
    assert "cache build" in advice("replay", {"progress": "eager", "first_run": {"why": "few records"}})
    assert "cache build" not in advice("replay", {"hit": "stored"})
