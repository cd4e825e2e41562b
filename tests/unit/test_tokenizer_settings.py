"""Settings beside a tokenizer.json count as they do in transformers: the same tokens as `AutoTokenizer` gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs import spec as specs
from nimble_jobs.data.text.tokenizer import Tokenizer, TokenRules
from nimble_jobs.errors import ModelError
from nimble_jobs.models import tokenizer_file
from nimble_jobs.models.tokenizer_file import tokenizer_json
from nimble_jobs.models.tokenizer_settings import cuts_start
from nimble_jobs.workloads.text.setup import set_up
from tests.text_jobs import text_spec, write_texts
from tests.text_models import rewrite, write_bert

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TEXTS = ["The cat", "the CAT", "Café cafe", "中文 cat", " the cat", "the\tcat  the", "[MASK] cat", "", "catthe"]
WORDS = ["the", "The", "cat", "CAT", "café", "Café", "cafe", "Cafe", "中", "文", "中文", "##the"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NAMES = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}


def write_wordpiece(folder: Path, config: dict[str, Any] | None, **normalizer: Any) -> None:
    """A tokenizer of BERT's kind, with a model's configuration, and tokenizer_config.json if there is a `config`."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(**normalizer)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(SPECIAL)
    _written(folder, made, "bert", config)


def write_bytes(folder: Path, config: dict[str, Any] | None, *, kind: str = "roberta", prefix: bool = False) -> None:
    """A tokenizer of the kind of RoBERTa and GPT-2, over bytes."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["the cat the cat sat the"] * 50, trainer)
    if kind == "roberta":
        made.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    _written(folder, made, kind, config)


def _written(folder: Path, made: Any, kind: str, config: dict[str, Any] | None) -> None:
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def same(folder: Path) -> Tokenizer:
    """The tokenizer of a job, which gives the tokens of transformers."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(tokenizer_json(folder), TokenRules(limit=64), name="t")
    for text in TEXTS:
        expected = theirs(text)["input_ids"]
        assert ours([text]).ids.tolist() == expected, text
    return ours


@pytest.mark.parametrize("named", ["BertTokenizer", "BertTokenizerFast", "DistilBertTokenizer", "MPNetTokenizer", None])
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"do_lower_case": True}, {"do_lower_case": False}, {"strip_accents": True}, {"strip_accents": False},
        {"tokenize_chinese_chars": False}, {"do_lower_case": False, "strip_accents": True},
    ],
)  # fmt: skip
def test_tokenizers_of_berts_kind(settings: dict[str, Any], lowercase: bool, named: str | None, tmp_path: Path) -> None:
    config = settings if named is None else {"tokenizer_class": named, **NAMES, **settings}
    write_wordpiece(tmp_path, config, lowercase=lowercase)
    same(tmp_path)


def test_large_files_of_settings_count(tmp_path: Path) -> None:
    """Thousands of added tokens take more than 1 MiB. Far larger files are refused, not passed over."""
    write_wordpiece(tmp_path, {"note": "x" * (2 << 20), "truncation_side": "left"}, lowercase=False)
    assert cuts_start(tokenizer_json(tmp_path), tmp_path)
    rewrite(tmp_path / "tokenizer_config.json", note="x" * (16 << 20))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: larger than 16 MiB; expected a small JSON file"):
        tokenizer_json(tmp_path)


def test_without_a_file_of_settings_the_class_has_defaults(tmp_path: Path) -> None:
    write_wordpiece(tmp_path, None, lowercase=False, handle_chinese_chars=False)
    same(tmp_path)


def test_a_folder_of_a_tokenizer_alone(tmp_path: Path) -> None:
    """Its own class decides, whatever the model is; or the model's kind, if it names none."""
    whole, other = tmp_path / "whole", tmp_path / "other"
    for folder in (whole, other):
        folder.mkdir()
        write_wordpiece(folder, {"tokenizer_class": "BertTokenizer", **NAMES, "do_lower_case": True}, lowercase=False)
    (other / "config.json").unlink()
    assert tokenizer_json(other) == tokenizer_json(whole) != (whole / "tokenizer.json").read_bytes()
    rewrite(other / "tokenizer_config.json", tokenizer_class=None)
    assert tokenizer_json(other, whole) == tokenizer_json(whole)


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_a_class_without_settings_takes_the_file_as_it_is(named: str, tmp_path: Path) -> None:
    write_wordpiece(tmp_path, {"tokenizer_class": named, "do_lower_case": True}, lowercase=False)
    same(tmp_path)
    write_bytes(tmp_path, {"tokenizer_class": named, "add_prefix_space": True}, prefix=False)
    same(tmp_path)


@pytest.mark.parametrize("named", ["RobertaTokenizer", "RobertaTokenizerFast", None])
@pytest.mark.parametrize("kind", ["roberta", "gpt2"])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("settings", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}])
def test_tokenizers_over_bytes(
    settings: dict[str, Any], prefix: bool, kind: str, named: str | None, tmp_path: Path
) -> None:
    named = named.replace("Roberta", "GPT2") if named and kind == "gpt2" else named
    config = settings if named is None else {"tokenizer_class": named, **settings}
    write_bytes(tmp_path, config, kind=kind, prefix=prefix)
    same(tmp_path)


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(("begin", "end"), [(True, False), (False, True), (True, True), (False, False)])
def test_ends_that_the_settings_add(named: str, begin: bool, end: bool, tmp_path: Path) -> None:
    config = {"tokenizer_class": named, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_bytes(tmp_path, {**config, "add_bos_token": begin, "add_eos_token": end}, kind="gpt2")
    same(tmp_path)


def test_settings_that_agree_need_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual case: the file is taken as it is, and so it is if the spec names the file."""

    def opened(*_: Any) -> None:
        raise AssertionError("transformers is asked")

    monkeypatch.setattr(tokenizer_file, "_opened", opened)
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "strip_accents": None}
    write_wordpiece(tmp_path, settings, lowercase=False)
    assert tokenizer_json(tmp_path) == (tmp_path / "tokenizer.json").read_bytes()
    ends = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_bytes(tmp_path, {"add_prefix_space": True, "add_bos_token": False, **ends}, kind="gpt2", prefix=True)
    assert tokenizer_json(tmp_path) == (tmp_path / "tokenizer.json").read_bytes()
    rewrite(tmp_path / "tokenizer_config.json", add_prefix_space=False)
    with pytest.raises(AssertionError, match="transformers is asked"):
        tokenizer_json(tmp_path)
    assert tokenizer_json(tmp_path / "tokenizer.json") == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("side", "own", "asked", "expected"),
    [
        ("left", None, None, "start"), ("right", "left", None, "end"), (None, "left", None, "start"),
        (None, None, None, "end"), ("left", None, "end", "end"), ("left", None, "error", "error"),
    ],
)  # fmt: skip
def test_where_long_texts_are_cut(
    side: str | None, own: str | None, asked: str | None, expected: str, tmp_path: Path
) -> None:
    """As in transformers, unless the spec says otherwise."""
    model = write_bert(tmp_path / "m")
    if own is not None:
        made = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        made.enable_truncation(32, direction=own)
        made.save(str(model / "tokenizer.json"))
    rewrite(model / "tokenizer_config.json", truncation_side=side)
    source = write_texts(tmp_path / "t.parquet", ["cat"])
    given = {"source": str(source), "text": {"max_length": 4, "truncate": asked}}
    setup = set_up(specs.restore(text_spec(tmp_path, model, source, input=given)))
    assert setup.tokenizer.rules.truncate == expected
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    if asked is None:
        text = "the cat sat on"
        assert setup.tokenizer([text]).ids.tolist() == theirs(text, truncation=True, max_length=4)["input_ids"]
