"""Classes of transformers that split texts in their own way, whatever tokenizer.json says, give a job's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.data.text.tokenizer import Tokenizer, TokenRules
from nimble_jobs.errors import ModelError
from nimble_jobs.models.tokenizer_file import tokenizer_json
from nimble_jobs.models.tokenizer_settings import overruled

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CORPUS = ["The cat sat on the mat.", "Café cafe naïve CAT", "the  dog ``quoted'' 123", "hello HELLO World"] * 20
TEXTS = [
    "The cat", " the cat", "the  cat", "Café CAFE", "``quoted''", "<mask> cat", "", "zq 中文", "the\tcat\n", "</s> cat",
    "hello  ", "[MASK] cat", "cat <extra> dog",
]  # fmt: skip
PARTS = tokenizers.pre_tokenizers


def replaced(*more: Any) -> Any:
    return tokenizers.normalizers.Sequence([tokenizers.normalizers.Replace(a, '"') for a in ("``", "''")] + list(more))


def unigram(special: list[str], normalizer: Any, single: str) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.normalizer = normalizer
    made.pre_tokenizer = PARTS.Sequence([PARTS.WhitespaceSplit(), PARTS.Metaspace()])
    return trained(made, tokenizers.trainers.UnigramTrainer, special, single, vocab_size=120, unk_token="<unk>")


def bpe(special: list[str], normalizer: Any, splits: Any, single: str) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer, made.pre_tokenizer = normalizer, splits
    over = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    return trained(made, tokenizers.trainers.BpeTrainer, over, single, vocab_size=400)


def trained(made: Any, trainer: Any, special: list[str], single: str, **more: Any) -> Any:
    made.train_from_iterator(CORPUS, trainer(special_tokens=special, show_progress=False, **more))
    ends = [(token, made.token_to_id(token)) for token in single.split() if token != "$A"]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=ends)
    return made


def llama() -> Any:
    space = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    return bpe(["<unk>", "<s>", "</s>"], space, None, "<s> $A")


def gemma() -> Any:
    space = tokenizers.normalizers.Replace(" ", "▁")
    return bpe(["<pad>", "<eos>", "<bos>", "<unk>"], space, PARTS.Split(" ", "merged_with_previous"), "<bos> $A")


def albert() -> Any:
    return unigram(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"], replaced(), "[CLS] $A [SEP]")


def xlnet() -> Any:
    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>"]
    return unigram(special, replaced(tokenizers.normalizers.Lowercase()), "$A <sep> <cls>")


def t5() -> Any:
    return unigram(["<pad>", "</s>", "<unk>"], tokenizers.normalizers.NFKC(), "$A </s>")


def roberta() -> Any:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    return unigram(special, tokenizers.normalizers.NFKC(), "<s> $A </s>")


def bert() -> Any:
    """It splits at spaces alone, which the class does not."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = tokenizers.normalizers.BertNormalizer(), PARTS.WhitespaceSplit()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return trained(made, tokenizers.trainers.WordPieceTrainer, special, "[CLS] $A [SEP]", vocab_size=120)


def write(folder: Path, made: Any, kind: str, **settings: Any) -> None:
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def same(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(tokenizer_json(folder), TokenRules(limit=64), name="t")
    assert {text: ours([text]).ids.tolist() for text in TEXTS} == {text: theirs(text)["input_ids"] for text in TEXTS}


CASES: list[tuple[Any, str, str, list[dict[str, Any]]]] = [
    (llama, "llama", "LlamaTokenizer", [{}, {"add_prefix_space": False}, {"legacy": True}, {"add_eos_token": True}]),
    (gemma, "gemma", "GemmaTokenizer", [{}, {"add_bos_token": True, "add_eos_token": True}]),
    (albert, "albert", "AlbertTokenizer", [{}, {"do_lower_case": False}, {"keep_accents": True}]),
    (xlnet, "xlnet", "XLNetTokenizer", [{}, {"do_lower_case": False}, {"keep_accents": True}]),
    (t5, "t5", "T5Tokenizer", [{}, {"legacy": False}, {"add_prefix_space": False}]),
    (roberta, "xlm-roberta", "XLMRobertaTokenizer", [{}, {"add_prefix_space": False}]),
    (roberta, "mbart", "MBartTokenizer", [{}]),
    (albert, "big_bird", "BigBirdTokenizer", [{}]),
    (t5, "pegasus", "PegasusTokenizer", [{}]),
    (bert, "bert", "BertTokenizer", [{}]),
]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("make", "kind", "cls", "settings"),
    [(make, kind, cls, one) for make, kind, cls, settings in CASES for one in settings],
)
def test_the_class_decides(
    make: Any, kind: str, cls: str, settings: dict[str, Any], named: bool, tmp_path: Path
) -> None:
    """It is that of the settings, or of the model's type."""
    write(tmp_path, make(), kind, **({"tokenizer_class": cls} if named else {}), **settings)
    same(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"mask_token": "<mask>"}, {"additional_special_tokens": ["<extra>"]},
        {"extra_special_tokens": {"e": "<extra>"}},
        {"added_tokens_decoder": {"1": {
            "content": "</s>", "lstrip": False, "normalized": False, "rstrip": True, "single_word": False,
            "special": True,
        }}},
        {"mask_token": {"content": "<mask>", "lstrip": True, "__type": "AddedToken"}},
    ],
)  # fmt: skip
def test_special_tokens_that_only_the_settings_name(settings: dict[str, Any], tmp_path: Path) -> None:
    """transformers adds them, also to a tokenizer that it takes as it is written."""
    write(tmp_path, t5(), "t5", tokenizer_class="PreTrainedTokenizerFast", **settings)
    same(tmp_path)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "dog", "<s>", "</s>", "<extra>"]
PAIRS = [*("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"), *"thecasdog", "th", "the"]


def saved(folder: Path, cls: str) -> dict[str, Any]:
    """A tokenizer as its class saves it. Returns what tokenizer.json says."""
    numbers = {token: number for number, token in enumerate(WORDS if cls == "BertTokenizer" else PAIRS)}
    more = {} if cls == "BertTokenizer" else {"merges": [("t", "h"), ("th", "e")]}
    getattr(transformers, cls)(vocab=numbers, **more).save_pretrained(folder)
    found: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return found


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda made: made.update(added_tokens=[one for one in made["added_tokens"] if one["content"] != name])


@pytest.mark.parametrize("cls", ["BertTokenizer", "RobertaTokenizer", "GPT2Tokenizer"])
def test_files_that_their_class_saved_are_taken_as_they_are(cls: str, tmp_path: Path) -> None:
    """To open them with transformers would take longer."""
    saved(tmp_path, cls)
    assert not overruled((tmp_path / "tokenizer.json").read_bytes(), tmp_path)
    same(tmp_path)


@pytest.mark.parametrize(
    ("cls", "change", "files"),
    [
        ("BertTokenizer", None, {"tokenizer_config": {"cls_token": "[MASK]"}}),
        ("RobertaTokenizer", None, {"special_tokens_map": {"cls_token": "</s>"}}),
        ("BertTokenizer", lambda made: made["post_processor"]["single"].pop(0), {}),
        ("RobertaTokenizer", lambda made: made.update(post_processor=None), {}),
        ("BertTokenizer", without("[MASK]"), {}),
        ("RobertaTokenizer", without("<mask>"), {}),
        ("GPT2Tokenizer", without("<|endoftext|>"), {}),
        ("BertTokenizer", lambda made: made["model"].update(max_input_chars_per_word=2), {}),
        ("BertTokenizer", None, {"added_tokens": {"<extra>": 11}}),
        ("GPT2Tokenizer", None, {"tokenizer_config": {"split_special_tokens": True}}),
    ],
)
def test_what_a_class_makes_of_an_odd_file(
    cls: str, change: Callable[[dict[str, Any]], object] | None, files: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Its own template, tokens and longest word, whatever the file says."""
    made = saved(tmp_path, cls)
    if change is not None:
        change(made)
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    for name, more in files.items():
        path = tmp_path / f"{name}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        if name == "special_tokens_map":
            settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
            settings.pop("cls_token")
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        path.write_text(json.dumps(before | more))
    assert overruled((tmp_path / "tokenizer.json").read_bytes(), tmp_path)
    same(tmp_path)


@pytest.mark.parametrize("odd", [True, 3, "<extra>", [["x"]]])
def test_special_tokens_that_are_no_list(odd: object, tmp_path: Path) -> None:
    """What transformers makes of them is its matter."""
    saved(tmp_path, "BertTokenizer")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "additional_special_tokens": odd}))
    made = (tmp_path / "tokenizer.json").read_bytes()
    assert not overruled(made, tmp_path)
    odd_added = json.dumps({**json.loads(made), "added_tokens": [{"content": {}}, 1]}).encode()
    assert overruled(odd_added, tmp_path)


def test_a_tokenizer_alone_is_taken_as_it_is(tmp_path: Path) -> None:
    """No file says of which class or model it is."""
    write(tmp_path, xlnet(), "xlnet", keep_accents=True)
    (tmp_path / "config.json").unlink()
    same(tmp_path)


def test_a_tokenizer_that_transformers_cannot_open(tmp_path: Path) -> None:
    """What its class would make of the file is unknown. Naming the file takes it as it is."""
    write(
        tmp_path,
        albert(),
        "albert",
        tokenizer_class="AlbertTokenizer",
        do_lower_case={"no": "switch"},
        added_tokens_decoder={"x": 1},
    )
    with pytest.raises(ModelError, match=r"to take its tokenizer\.json as it is, name that file as input\.text\.tok"):
        tokenizer_json(tmp_path)
    file = tmp_path / "tokenizer.json"
    assert tokenizer_json(file) == file.read_bytes()
