"""Jobs with tokenizers that do not fit their model: without a token for padding, or with fewer tokens than it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.job import JobState
from nimble_jobs.models.build import build
from nimble_jobs.spec.model import ModelSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests.text_jobs import one_by_one, outputs, run, sentences, text_spec, worst, write_texts
from tests.text_models import WORDS, write_bert

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MODEL_IDS = 64  # of the model with the small tokenizer
LAST = MODEL_IDS - 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def write_plain_tokenizer(folder: Path) -> None:
    """Words alone, from the number 0 on, with two ends: there is no token for padding, and no number is free for it."""
    vocabulary = {word: i for i, word in enumerate([*WORDS, "<unk>", "<s>", "</s>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    begin, end = vocabulary["<s>"], vocabulary["</s>"]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=64, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def write_encoder(folder: Path) -> Path:
    """A BERT that knows of no padding."""
    write_bert(folder, pad_token_id=None)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    write_plain_tokenizer(folder)
    return folder


def write_gpt2(folder: Path) -> Path:
    """A GPT-2, which has no padding as it is published."""
    torch.manual_seed(0)
    made = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=24, eos_token_id=25,
        initializer_range=0.5,
    )  # fmt: skip
    transformers.GPT2Model(made).save_pretrained(folder)
    write_plain_tokenizer(folder)
    return folder


@pytest.mark.parametrize("on_miss", ["eager", "build"])
@pytest.mark.parametrize("write", [write_encoder, write_gpt2], ids=["bert", "gpt2"])
def test_a_tokenizer_without_a_pad_token(write: Any, on_miss: str, store: Store, tmp_path: Path) -> None:
    """Rows are padded with a number that no token has. The mask alone decides what is padding."""
    model = write(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert tokenizer.pad_token is None
    assert json.loads((model / "config.json").read_text()).get("pad_token_id") is None
    assert tokenizer.convert_tokens_to_ids(WORDS[0]) == 0
    texts = [*sentences(60, 60), WORDS[0], f"{WORDS[0]} " * 30, f"cat {WORDS[0]} {WORDS[0]}"]
    source = write_texts(tmp_path / "t.parquet", texts)
    schedule = {"on_miss": on_miss, "progressive": False, "fuse": "off"}
    spec = text_spec(tmp_path, model, source, input={"text": {"buckets": [16, 64]}}, schedule=schedule)
    job = run(store, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    found = outputs(tmp_path / "out")
    assert list(found) == [f"r{i}" for i in range(len(texts))]
    assert worst(np.stack(list(found.values())), one_by_one(model, texts, 64)) < 1e-5
    assert job.timings["text"]["padding_share"] > 0.1


def write_wide(folder: Path) -> Path:
    """A BERT with a row for each of 64 tokens, as tables are rounded up, over a tokenizer of 28. It pads with the last
    row, which no token has.
    """
    write_bert(folder, vocab_size=MODEL_IDS, pad_token_id=LAST)
    path = folder / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(["[E1]"])
    made.save(str(path))
    return folder


def test_a_tokenizer_with_fewer_tokens_than_the_model(store: Store, tmp_path: Path) -> None:
    """Its special tokens, unknown words and an added token reach the model by their own numbers."""
    model = write_wide(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    size = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    assert size == len(WORDS) + 6 < MODEL_IDS
    texts = [*sentences(40, 60), "", "[SEP] cat [CLS]", "[E1] the cat [E1]", "[MASK] zebra", "[PAD] cat [PAD]"]
    source = write_texts(tmp_path / "t.parquet", texts)
    fields = {"fields": ["id", "embedding", "tokens"]}
    spec = text_spec(tmp_path, model, source, input={"text": {"buckets": [16, 64]}}, output=fields)
    job = run(store, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    assert job.outputs["bad"] == 0
    assert worst(np.stack(list(outputs(tmp_path / "out").values())), one_by_one(model, texts, 64)) < 1e-5
    tokens = outputs(tmp_path / "out", "tokens")
    for text, ids in zip(texts, tokens.values(), strict=True):
        assert ids.tolist() == tokenizer(text, truncation=True, max_length=64)["input_ids"]
        assert max(ids) < size  # never the padding's
    assert tokens["r42"].tolist() == [2, size - 1, 5, 7, size - 1, 3]
    assert tokens["r43"].tolist() == [2, 4, 1, 3]


def test_token_ids_beyond_the_tokenizer_are_the_models(store: Store, tmp_path: Path) -> None:
    """Requests may hold token ids: those that only the model knows are scored as they are, and the first that it does
    not know is refused, by the size of its own table.
    """
    model = write_wide(tmp_path / "m")
    given = [[2, 5, 28, 3], [2, LAST - 1, 3], [LAST, 5], [2, MODEL_IDS, 3]]
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": ids}}
        for i, ids in enumerate(given)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = text_spec(tmp_path, model, tmp_path / "in.jsonl", run={"error_threshold": -1.0})
    spec["input"] |= {"format": "openai-batch", "fields": {}}
    spec["output"] |= {"format": "openai-batch"}
    job = run(store, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    parts = sorted((tmp_path / "out").glob("part-*.jsonl"))
    found = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == ["c0", "c1", "c2"]
    net = build(ModelSpec(source=f"transformers:{model}"))
    for line, ids in zip(found, given, strict=False):
        with torch.no_grad():
            expected = net(input_ids=torch.tensor([ids]))["last_hidden_state"][0].mean(dim=0).numpy()
        vector = np.array(line["response"]["body"]["data"][0]["embedding"])
        assert worst(vector[None], expected[None]) < 1e-5
    (refused,) = (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
    assert f"holds the token id {MODEL_IDS}; expected ids below {MODEL_IDS}" in refused


def test_a_vocabulary_that_is_too_large_is_told_from_one_that_is_small(store: Store, tmp_path: Path) -> None:
    """With the same tokenizer, a model of fewer rows refuses the texts with a token beyond them, and only these."""
    model = write_bert(tmp_path / "m", vocab_size=10)
    source = write_texts(tmp_path / "t.parquet", ["the cat", "the mat", "dog"])
    job = run(store, text_spec(tmp_path, model, source, run={"error_threshold": -1.0}))
    assert job.state is JobState.SUCCEEDED, job.error
    assert list(outputs(tmp_path / "out")) == ["r0", "r2"]
    (bad,) = (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
    assert json.loads(bad)["reason"] == (
        f"{source}: record 1: token 'mat' has the id 12; expected ids below 10, the size of the model's vocabulary"
    )
