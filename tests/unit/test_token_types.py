"""Which tokenizers give token types with a pair: as transformers opens the folder, so is the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.models.tokenizer_file import gives_token_types
from tests.text_models import WORDS, write_bert, write_bert_tokenizer, write_tokenizer

transformers = pytest.importorskip("transformers")


def config_of(folder: Path, model_type: str) -> None:
    """A model's configuration; no weights are read here."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "type_vocab_size": 2}))


def rewrite(folder: Path, **fields: Any) -> None:
    """Change tokenizer_config.json; None removes a field."""
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in known.items() if value is not None}))


@pytest.mark.parametrize(
    ("model_type", "named", "expected"),
    [
        ("bert", "BertTokenizer", True),
        ("bert", "BertTokenizerFast", True),
        ("electra", "ElectraTokenizer", True),
        ("mobilebert", "MobileBertTokenizerFast", True),
        ("distilbert", "DistilBertTokenizer", False),
        ("bert", "PreTrainedTokenizerFast", False),
        ("bert", None, True),  # no class is named: that of the kind of model
        ("nystromformer", None, False),
        ("bert", "TokenizerThatNobodyKnows", False),
    ],
)
def test_the_class_decides(tmp_path: Path, model_type: str, named: str | None, expected: bool) -> None:
    """Ours is what transformers gives with a pair of that folder."""
    config_of(tmp_path, model_type)
    write_bert_tokenizer(tmp_path)
    rewrite(tmp_path, tokenizer_class=named, backend=None)
    given = transformers.AutoTokenizer.from_pretrained(tmp_path)("cat", "dog")
    assert ("token_type_ids" in given) is expected
    assert gives_token_types(tmp_path, tmp_path) is expected


def test_roberta_gives_none(tmp_path: Path) -> None:
    """Also if its model could tell two kinds of tokens apart."""
    config_of(tmp_path, "roberta")
    vocabulary = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *WORDS])}
    transformers.RobertaTokenizer(vocab=vocabulary, merges=[]).save_pretrained(tmp_path)
    assert "token_type_ids" not in transformers.AutoTokenizer.from_pretrained(tmp_path)("cat", "dog")
    assert not gives_token_types(tmp_path, tmp_path)


@pytest.mark.parametrize("names", [["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]])
@pytest.mark.parametrize("write", [write_bert_tokenizer, write_tokenizer])
def test_the_folder_may_name_the_inputs(tmp_path: Path, write: Any, names: list[str]) -> None:
    """`model_input_names` wins over the class."""
    config_of(tmp_path, "bert")
    write(tmp_path)
    rewrite(tmp_path, model_input_names=names)
    given = transformers.AutoTokenizer.from_pretrained(tmp_path)("cat", "dog")
    assert ("token_type_ids" in given) is gives_token_types(tmp_path, tmp_path) is ("token_type_ids" in names)


@pytest.mark.parametrize("types", [True, False])
def test_a_file_is_judged_by_the_model(tmp_path: Path, types: bool) -> None:
    """A tokenizer.json alone has no class."""
    model = write_bert(tmp_path / "bert")
    if types:
        write_bert_tokenizer(model)
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    assert gives_token_types(tmp_path / "tokenizer.json", model) is types


def test_a_folder_of_a_tokenizer_alone(tmp_path: Path) -> None:
    """Its own class counts, and the model's kind if it names none."""
    model = write_bert(tmp_path / "bert")
    own, bare = tmp_path / "own", tmp_path / "bare"
    write_bert_tokenizer(own)
    write_tokenizer(bare)
    assert gives_token_types(own, model)
    assert not gives_token_types(bare, model)
    (own / "tokenizer_config.json").unlink()
    assert gives_token_types(own, model)


def test_code_of_the_folder_does_not_run(tmp_path: Path) -> None:
    """Transformers takes a tokenizer of no particular class instead."""
    config_of(tmp_path, "bert")
    write_tokenizer(tmp_path)
    rewrite(tmp_path, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    assert not gives_token_types(tmp_path, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_cannot_be_opened(tmp_path: Path) -> None:
    """Nothing says otherwise, so the model, which tells two kinds of tokens apart, is given them."""
    config_of(tmp_path / "model", "nystromformer")
    write_tokenizer(tmp_path)
    with pytest.raises((OSError, ValueError)):
        transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert gives_token_types(tmp_path / "tokenizer.json", tmp_path / "model")
