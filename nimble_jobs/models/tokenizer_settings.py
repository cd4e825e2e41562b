"""What tokenizer_config.json says beside a tokenizer.json. If the two differ, transformers follows the former."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nimble_jobs.sentence import read_settings

CONFIG = "tokenizer_config.json"
# With these classes of transformers, tokenizer.json says how texts are split. All others do that themselves, with their
# own settings: `do_lower_case` and `keep_accents` of ALBERT, `legacy` and `add_prefix_space` of Llama, and so on.
_AS_WRITTEN = frozenset({"PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"})
# What these make of their settings is known. The class is that of the model's type if no file names one; "None" if that
# is unknown, too. Each with the special tokens that it has if no file names others.
_OF_WORDS = {f"{name.lower()}_token": f"[{name}]" for name in ("CLS", "SEP", "UNK", "PAD", "MASK")}
_OF_PIECES = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
_LIKE_BERT: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("BertTokenizer", "bert", "DistilBertTokenizer", "distilbert"), _OF_WORDS),
    **{key: {**_OF_PIECES, "unk_token": "[UNK]"} for key in ("MPNetTokenizer", "mpnet")},
    "None": {},
}
_OVER_BYTES: Mapping[str, Mapping[str, str]] = {
    **{key: {**_OF_PIECES, "unk_token": "<unk>"} for key in ("RobertaTokenizer", "roberta")},
    **dict.fromkeys(("GPT2Tokenizer", "gpt2"), dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")),
    "None": {},
}
_LONGEST_WORD = 100  # characters, with which WordPiece's classes build the model
_OF_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_WORD = re.compile(r'"max_input_chars_per_word":\s*(\d+)')
_MODEL = re.compile(r'"model":\s*\{\s*"type":\s*"(\w+)"')
_DEFAULTS = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}  # of BERT's kind


def overruled(data: bytes, folder: Path) -> bool:
    """Whether settings beside a tokenizer.json, whose bytes are `data`, make another tokenizer of it in transformers.

    Only parts of the file are parsed: its vocabulary may be large.
    """
    text, settings = data.decode(errors="replace"), read_settings(folder / CONFIG)
    if '"model"' not in text:
        return False  # it is no tokenizer, as whoever opens it will say
    processor, added = _part(text, "post_processor"), _part(text, "added_tokens")
    if _adds_ends(settings) not in (None, _ends(processor)) or settings.get("split_special_tokens"):
        return True
    parsed = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    own = {one["content"]: one for one in parsed if isinstance(one.get("content"), str)}
    if _adds_tokens(folder, settings, own):
        return True
    config = read_settings(folder / "config.json")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class") or config.get("model_type")
    named = str(named).removesuffix("Fast")
    if named in _AS_WRITTEN:
        return False
    normalizers, splits = (list(_pieces(_part(text, name))) for name in ("normalizer", "pre_tokenizer"))
    kinds = [*(piece["type"] for piece in (*normalizers, *splits)), *_MODEL.findall(text)]
    if named in _LIKE_BERT and kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]:
        wanted = {part: settings.get(name, _DEFAULTS[name]) for name, part in _OF_BERT.items()}
        if any(normalizers[0].get(part) != value for part, value in wanted.items()):
            return True
        longest = _WORD.search(text)
        defaults = _LIKE_BERT[named]
        as_class = longest is not None and int(longest[1]) == _LONGEST_WORD
    elif named in _OVER_BYTES and kinds == ["ByteLevel", "BPE"]:
        prefix = bool(settings.get("add_prefix_space", False))
        if bool(splits[0].get("add_prefix_space")) is not prefix or splits[0].get("use_regex") is False:
            return True
        defaults, as_class = _OVER_BYTES[named], True
    else:
        return named != "None"  # of any other class transformers alone knows
    tokens = {role: _named(folder, settings, role, default) for role, default in defaults.items()}
    ends = [tokens[role] for role in ("cls_token", "sep_token") if role in tokens]
    framed = _is_framed(processor, ends, twice=defaults.get("cls_token") == "<s>")
    return bool(tokens) and not (as_class and framed and own.keys() >= set(tokens.values()))


def named_padding(folder: Path) -> str | None:
    """The token for padding that the files of a tokenizer's folder name; None if they name none."""
    for name in (CONFIG, "special_tokens_map.json"):
        found = read_settings(folder / name).get("pad_token")
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str):
            return found
    return None


def cuts_start(data: bytes, folder: Path) -> bool:
    """Whether a text that is too long loses its start, by the settings of its tokenizer; else it loses its end."""
    side = read_settings(folder / CONFIG).get("truncation_side")
    if side is None and (own := _part(data.decode(errors="replace"), "truncation")):
        side = own.get("direction")
    return str(side).lower() == "left"


def _adds_tokens(folder: Path, settings: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether files beside a tokenizer.json name special tokens that are not among its `own`, or differ from them."""
    named = {**read_settings(folder / "special_tokens_map.json"), **settings}
    tokens = [value for name, value in named.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = named.get(name)
        tokens += list(more.values()) if isinstance(more, dict) else more if isinstance(more, list) else []
    tokens += read_settings(folder / "added_tokens.json")
    contents = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    if any(isinstance(content, str) and content not in own for content in contents):
        return True
    decoder = settings.get("added_tokens_decoder")
    known = {str(one.get("id")): one for one in own.values()}
    return isinstance(decoder, dict) and any(
        {name: value for name, value in known.get(number, {}).items() if name != "id"} != token
        for number, token in decoder.items()
    )


def _named(folder: Path, settings: Mapping[str, Any], name: str, default: str) -> str:
    """A special token as the files of a tokenizer's folder name it."""
    for found in (settings.get(name), read_settings(folder / "special_tokens_map.json").get(name)):
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str):
            return found
    return default


def _is_framed(processor: Any, ends: list[str], *, twice: bool) -> bool:
    """Whether a post-processor puts these special tokens before and behind a text, and the second one also between the
    texts of a pair, once or `twice`. Without two tokens it must put none.
    """

    def special(token: str, of: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": of}}

    def text(name: str, of: int = 0) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": of}}

    kind = processor.get("type") if isinstance(processor, dict) else None
    second = 0 if twice else 1
    single, pair = [text("A")], [text("A"), text("B", second)]
    if len(ends) == 2:
        first, last = ends
        if kind == ("RobertaProcessing" if twice else "BertProcessing"):
            return [processor.get(name, [None])[0] for name in ("cls", "sep")] == ends
        single = [special(first), *single, special(last)]
        pair = [*single, *([special(last)] if twice else []), pair[1], special(last, second)]
    elif kind in (None, "ByteLevel"):
        return True
    return kind == "TemplateProcessing" and (processor.get("single"), processor.get("pair")) == (single, pair)


def _adds_ends(settings: Mapping[str, Any]) -> tuple[bool, bool] | None:
    """Whether the settings put a token before each text, and one behind it; None if they do not say."""
    said = [settings.get(name) for name in ("add_bos_token", "add_eos_token")]
    return None if said == [None, None] else (bool(said[0]), bool(said[1]))


def _ends(processor: Any) -> tuple[bool, bool]:
    """The same of a post-processor."""
    template = next((one for one in _pieces(processor) if one["type"] == "TemplateProcessing"), {})
    single = template.get("single") or [{}]
    return "SpecialToken" in single[0], "SpecialToken" in single[-1]


def _pieces(part: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of a sequence of normalizers and the like, which may be nested, or the only part."""
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        inner = next((part[name] for name in ("normalizers", "pretokenizers", "processors") if name in part), None)
        if part["type"] == "Sequence" and isinstance(inner, list):
            for one in inner:
                yield from _pieces(one)
        else:
            yield part


def _part(text: str, name: str) -> Any:
    """A part of a tokenizer.json, in which it stands before all tokens that are not added ones; None without it."""
    key = f'"{name}":'
    at = text.find(key)
    if at < 0:
        return None
    behind = at + len(key)
    while text[behind : behind + 1].isspace():
        behind += 1
    try:
        return json.JSONDecoder().raw_decode(text, behind)[0]
    except ValueError:
        return None
