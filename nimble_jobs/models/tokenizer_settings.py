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
# What these make of their settings is known. The class is that of the model's type if no file names one.
_LIKE_BERT = frozenset(
    {"BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer", "bert", "distilbert", "mpnet", "None"}
)
_OVER_BYTES = frozenset({"RobertaTokenizer", "GPT2Tokenizer", "roberta", "gpt2", "None"})
_OF_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_MODEL = re.compile(r'"model":\s*\{\s*"type":\s*"(\w+)"')
_DEFAULTS = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}  # of BERT's kind


def overruled(data: bytes, folder: Path) -> bool:
    """Whether settings beside a tokenizer.json, whose bytes are `data`, make another tokenizer of it in transformers.

    Only parts of the file are parsed: its vocabulary may be large.
    """
    text, settings = data.decode(errors="replace"), read_settings(folder / CONFIG)
    if '"model"' not in text:
        return False  # it is no tokenizer, as whoever opens it will say
    if _adds_ends(settings) not in (None, _ends(_part(text, "post_processor"))):
        return True
    if _adds_tokens(folder, settings, _part(text, "added_tokens")):
        return True
    config = read_settings(folder / "config.json")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class") or config.get("model_type")
    named = str(named).removesuffix("Fast")  # "None" if no file says anything
    if named in _AS_WRITTEN:
        return False
    normalizers, splits = (list(_pieces(_part(text, name))) for name in ("normalizer", "pre_tokenizer"))
    kinds = [*(piece["type"] for piece in (*normalizers, *splits)), *_MODEL.findall(text)]
    if named in _LIKE_BERT and kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]:
        wanted = {own: settings.get(name, _DEFAULTS[name]) for name, own in _OF_BERT.items()}
        return any(normalizers[0].get(own) != value for own, value in wanted.items())
    if named in _OVER_BYTES and kinds == ["ByteLevel", "BPE"]:
        prefix = bool(settings.get("add_prefix_space", False))
        return bool(splits[0].get("add_prefix_space")) is not prefix or splits[0].get("use_regex") is False
    return named != "None"  # of any other class transformers alone knows


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


def _adds_tokens(folder: Path, settings: Mapping[str, Any], added: Any) -> bool:
    """Whether files beside a tokenizer.json name special tokens that are not among those `added` there, or differ."""
    own = {one.get("content"): one for one in added if isinstance(one, dict)} if isinstance(added, list) else {}
    named = {**read_settings(folder / "special_tokens_map.json"), **settings}
    tokens = [value for name, value in named.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = named.get(name) or []
        tokens += list(more.values()) if isinstance(more, dict) else more
    contents = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    if any(isinstance(content, str) and content not in own for content in contents):
        return True
    decoder = settings.get("added_tokens_decoder")
    known = {str(one.get("id")): one for one in own.values()}
    return isinstance(decoder, dict) and any(
        {name: value for name, value in known.get(number, {}).items() if name != "id"} != token
        for number, token in decoder.items()
    )


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
