"""Decoders that classify a text by its last token, which they find as the last one that is no padding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs import spec as specs
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads.text.setup import set_up
from tests.text_jobs import outputs, run, sentences, text_spec, worst, write_texts
from tests.text_models import WORDS, rewrite
from tests.text_trainings import lay_out, spec_of
from tests.trainings import Attempt

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

END = len(WORDS) + 1  # the id of </s>
TEXTS = [text for text in sentences(40, 30, seed=3) if text]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def write_words(folder: Path, *, ends: bool = False, **names: str) -> None:
    """A tokenizer of words, from the id 0 on, which ends texts with </s> or adds nothing."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate([*WORDS, "<unk>", "</s>"])}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    if ends:
        made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=64, unk_token="<unk>", eos_token="</s>", **names
    ).save_pretrained(folder)


def write_classifier(folder: Path, kind: str, *, vocabulary: int, **config: Any) -> Path:
    """A classifier of the library, with whatever its config.json says of padding."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        made = transformers.GPT2Config(vocab_size=vocabulary, initializer_range=0.5, num_labels=3, **sizes)
        transformers.GPT2ForSequenceClassification(made).save_pretrained(folder)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        made = transformers.LlamaConfig(
            vocab_size=vocabulary, initializer_range=0.5, num_labels=3, max_position_embeddings=64, **sizes
        )
        transformers.LlamaForSequenceClassification(made).save_pretrained(folder)
    held = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(held | config))
    return folder


def alone(model: Path, texts: list[str], **config: Any) -> np.ndarray:
    """Logits of each text in a batch of its own, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    net = transformers.AutoModelForSequenceClassification.from_pretrained(model, **config).eval()
    with torch.no_grad():
        return np.stack([net(**tokenizer(text, return_tensors="pt")).logits[0].numpy() for text in texts])


def scored(store: Store, folder: Path, model: Path, texts: list[str], **entries: Any) -> dict[str, np.ndarray]:
    """Logits by id; `entries` are of the spec's model."""
    folder.mkdir(exist_ok=True)
    source = write_texts(folder / "t.parquet", texts)
    logits = {"fields": ["id", "logits"], "pooling": None}
    named = {"source": f"transformers:{model}", **entries}
    spec = text_spec(folder, model, source, model=named, output=logits, run={"error_threshold": -1.0})
    job = run(store, spec)
    assert job.state is JobState.SUCCEEDED, job.error
    return outputs(folder / "out", "logits")


@pytest.mark.parametrize("ends", [True, False], ids=["with-end", "without"])
@pytest.mark.parametrize("vocabulary", [END + 1, 64], ids=["full", "free"])
@pytest.mark.parametrize("padding", [None, -1, 64, 10**6, END], ids=["none", "negative", "beyond", "far", "end"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_class_is_that_of_the_text_alone(
    kind: str, padding: int | None, vocabulary: int, ends: bool, store: Store, tmp_path: Path
) -> None:
    """Whatever the configuration says of padding, and although every id may stand for a word of a text."""
    model = write_classifier(tmp_path / "m", kind, vocabulary=vocabulary, pad_token_id=padding)
    write_words(model, ends=ends)
    texts = [*TEXTS, f"cat {WORDS[0]}", f"{WORDS[0]} {WORDS[0]}", *WORDS]
    found = scored(store, tmp_path, model, texts)
    assert len(found) == len(texts)
    expected = alone(model, texts, **({} if padding == END else {"pad_token_id": None}))
    assert worst(np.stack(list(found.values())), expected) < 1e-5


def test_a_text_that_ends_with_the_only_token_for_padding_is_refused(store: Store, tmp_path: Path) -> None:
    """No other id is free, so the model cannot be told where such a text ends; unless the spec names another one."""
    model = write_classifier(tmp_path / "m", "gpt2", vocabulary=END + 1)
    write_words(model, pad_token="</s>")
    texts = ["the cat", "the cat </s>", "</s>", "</s> dog"]
    found = scored(store, tmp_path, model, texts)
    assert list(found) == ["r0", "r2", "r3"]
    expected = alone(model, [texts[0], *texts[2:]], pad_token_id=None)
    assert worst(np.stack(list(found.values())), expected) < 1e-5
    (bad,) = (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
    assert "ends with the token '</s>', which the model would take for padding" in bad
    again = scored(store, tmp_path / "again", model, texts, args={"pad_token_id": WORDS.index("red")})
    assert worst(np.stack(list(again.values())), alone(model, texts, pad_token_id=None)) < 1e-5


def test_what_rows_are_padded_with_is_part_of_what_decides(tmp_path: Path) -> None:
    """Two tokenizers that differ in nothing but the name of their padding ask for different models."""
    model = write_classifier(tmp_path / "m", "gpt2", vocabulary=64)
    source = write_texts(tmp_path / "t.parquet", TEXTS)
    asked = []
    for name in ("</s>", "<unk>"):
        write_words(model, pad_token=name)
        spec = specs.restore(text_spec(tmp_path, model, source, output={"fields": ["id", "logits"], "pooling": None}))
        setup = set_up(spec)
        asked.append((setup.model(spec.model).args, setup.to_json()["padding"]))
    assert asked == [({"pad_token_id": END}, END), ({"pad_token_id": END - 1}, END - 1)]


def test_a_model_with_a_configuration_of_its_texts(store: Store, tmp_path: Path) -> None:
    """Gemma 3 says in `text_config` what pads its texts."""
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    seeing = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = transformers.Gemma3Config(
        text_config=sizes, vision_config={**seeing, "image_size": 16, "patch_size": 8}, mm_tokens_per_image=1
    )
    made.num_labels = 3
    torch.manual_seed(0)
    model = tmp_path / "m"
    transformers.Gemma3ForSequenceClassification(made).save_pretrained(model)
    held = json.loads((model / "config.json").read_text())
    rewrite(model / "config.json", text_config=held["text_config"] | {"pad_token_id": None}, pad_token_id=None)
    write_words(model)
    found = scored(store, tmp_path, model, TEXTS)
    assert worst(np.stack(list(found.values())), alone(model, TEXTS)) < 1e-5


def test_a_model_that_counts_places_from_its_padding_is_told_nothing(store: Store, tmp_path: Path) -> None:
    """RoBERTa's positions begin behind the padding's id, which therefore stays as it is."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = transformers.RobertaConfig(
        vocab_size=40, max_position_embeddings=66, pad_token_id=-1, initializer_range=0.5, num_labels=3, **sizes
    )
    torch.manual_seed(0)
    transformers.RobertaForSequenceClassification(made).save_pretrained(tmp_path / "m")
    write_words(tmp_path / "m", ends=True)
    found = scored(store, tmp_path, tmp_path / "m", TEXTS)
    assert worst(np.stack(list(found.values())), alone(tmp_path / "m", TEXTS)) < 1e-5


@pytest.mark.parametrize("padding", [None, 64])
def test_a_published_classifier_finds_the_ends_of_texts(padding: int | None, tmp_path: Path) -> None:
    """It says what its rows were padded with, so transformers classifies padded batches as single texts."""
    lay_out(tmp_path)
    model = write_classifier(tmp_path / "gpt2", "gpt2", vocabulary=64, pad_token_id=padding)
    write_words(model, pad_token="</s>")
    spec = spec_of(tmp_path, model__source=f"transformers:{model}", train__epochs=1)
    Attempt(spec).run()
    published = Path(spec.output.path)
    assert json.loads((published / "config.json").read_text())["pad_token_id"] == END
    tokenizer = transformers.AutoTokenizer.from_pretrained(published)
    net = transformers.AutoModelForSequenceClassification.from_pretrained(published).eval()
    with torch.no_grad():
        together = net(**tokenizer(TEXTS, return_tensors="pt", padding=True)).logits.numpy()
    assert worst(together, alone(published, TEXTS)) < 1e-5
