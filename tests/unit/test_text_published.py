"""A training publishes how its texts became tokens: scoring its folder needs no settings, whatever the training had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.job import JobState
from nimble_jobs.sentence import read_folder
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads.text.publish import write_tokenizer
from nimble_jobs.workloads.text.setup import set_up
from tests.text_jobs import outputs, run, text_spec, worst, write_texts
from tests.text_models import TEXTS, WORDS, rewrite, write_bert, write_bert_tokenizer, write_sentence_model
from tests.text_trainings import lay_out, spec_of
from tests.trainings import Attempt

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def write_other(folder: Path) -> None:
    """A tokenizer that gives the same words other ids, and has names of its own for its special tokens."""
    vocabulary = {word: i for i, word in enumerate([*reversed(WORDS), "<none>", "<pad>", "<go>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<none>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<go> $A", special_tokens=[("<go>", vocabulary["<go>"])]
    )
    made.add_special_tokens(["<none>", "<pad>", "<go>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))


def lay_out_all(folder: Path) -> None:
    """A BERT of its own class, one that makes texts lower case, and a tokenizer of another kind."""
    lay_out(folder)
    write_bert_tokenizer(folder / "bert")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    write_sentence_model(folder / "lower", write_bert(folder / "base"), modules.Pooling(16, "mean"))
    rewrite(folder / "lower" / "sentence_bert_config.json", do_lower_case=True, max_seq_length=20)
    found = read_folder(folder / "lower")
    assert found is not None
    assert found.lower_case
    write_other(folder / "other")


CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "tokenizer": {"input__text__tokenizer": "other"},
    "file": {"input__text__tokenizer": "other/tokenizer.json"},
    "lower case": {"model__source": "lower"},
    "prompt": {"input__text__prompt": "query : "},
    "shorter": {"input__text__max_length": 5, "input__text__buckets": "auto"},
    "start": {"input__text__max_length": 5, "input__text__buckets": "auto", "input__text__truncate": "start"},
}


@pytest.mark.parametrize("by_settings", [True, False])
@pytest.mark.parametrize(
    ("side", "truncate", "expected"),
    [
        ("left", "error", "left"),
        ("right", "error", "right"),
        ("left", "end", "right"),
        ("left", None, "left"),
    ],
)
def test_a_training_that_cuts_no_text_leaves_the_side(
    side: str, truncate: str | None, expected: str, by_settings: bool, tmp_path: Path
) -> None:
    """What the tokenizer's files say of it stays, wherever they say it."""
    lay_out(tmp_path)
    write_bert_tokenizer(tmp_path / "bert")
    if by_settings:
        rewrite(tmp_path / "bert" / "tokenizer_config.json", truncation_side=side)
    else:
        file = str(tmp_path / "bert" / "tokenizer.json")
        made = tokenizers.Tokenizer.from_file(file)
        made.enable_truncation(32, direction=side)
        made.save(file)
        rewrite(tmp_path / "bert" / "tokenizer_config.json", truncation_side=None)
    setup = set_up(spec_of(tmp_path, input__text__truncate=truncate))
    write_tokenizer(setup, tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).truncation_side == expected


@pytest.mark.parametrize("name", CASES)
def test_the_folder_makes_the_tokens_of_the_training(name: str, store: Store, tmp_path: Path) -> None:
    lay_out_all(tmp_path)
    changes = {"input__text__buckets": [32], **CASES[name]}  # one length: this is not about buckets
    for field, scheme in (("input__text__tokenizer", ""), ("model__source", "transformers:")):
        if field in changes:
            changes[field] = f"{scheme}{tmp_path / changes[field]}"
    spec = spec_of(tmp_path, train__epochs=1, **changes)
    Attempt(spec).run()
    published = Path(spec.output.path)
    texts = [*TEXTS, "THE Cat", "cat [SEP] dog", "dog mat"]
    trained = set_up(spec)
    expected = [trained.tokenizer([text]).ids.tolist() for text in texts]
    theirs, prompt = transformers.AutoTokenizer.from_pretrained(published), trained.tokenizer.rules.prompt
    assert [theirs(prompt + text, truncation=True)["input_ids"] for text in texts] == expected
    assert theirs.pad_token_id == trained.padding
    net = transformers.AutoModelForSequenceClassification.from_pretrained(published).eval()
    with torch.no_grad():
        logits = np.stack([net(input_ids=torch.tensor([ids])).logits[0].numpy() for ids in expected])
        one = net(**theirs([prompt + text for text in texts], truncation=True, padding=True, return_tensors="pt"))
    assert worst(one.logits.numpy(), logits) < 1e-5
    source = write_texts(tmp_path / "t.parquet", texts)
    fields = {"fields": ["id", "logits"], "pooling": None}
    job = run(store, text_spec(tmp_path, published, source, out="scored", output=fields))
    assert job.state is JobState.SUCCEEDED, job.error
    assert worst(np.stack(list(outputs(tmp_path / "scored", "logits").values())), logits) < 1e-5
