"""What tokenizer_config.json says beside a tokenizer.json. If the two differ, transformers follows the former."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nimble_jobs.spec.text_model import read_json

CONFIG = "tokenizer_config.json"
# With these classes of transformers, tokenizer.json says how texts are split. All others do that themselves.
_AS_WRITTEN = frozenset({"PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"})
_OF_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_DEFAULTS = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}  # of BERT's kind
_PARTS = {"do_lower_case": "Lowercase", "strip_accents": "StripAccents"}  # of other normalizers


def overruled(data: bytes, folder: Path) -> bool:
    """Whether settings beside a tokenizer.json, whose bytes are `data`, make another tokenizer of it in transformers.

    Only parts of the file are parsed: its vocabulary may be large.
    """
    text, settings = data.decode(errors="replace"), read_json(folder / CONFIG)
    if _adds_ends(settings) not in (None, _ends(_part(text, "post_processor"))):
        return True
    named = settings.get("tokenizer_class") or read_json(folder / "config.json").get("tokenizer_class")
    if str(named).removesuffix("Fast") in _AS_WRITTEN:
        return False
    prefix = bool(settings.get("add_prefix_space", False))
    splits = _pieces(_part(text, "pre_tokenizer"))
    if any(piece["type"] == "ByteLevel" and bool(piece.get("add_prefix_space")) is not prefix for piece in splits):
        return True
    return _normalizes_otherwise(list(_pieces(_part(text, "normalizer"))), settings)


def named_padding(folder: Path) -> str | None:
    """The token for padding that the files of a tokenizer's folder name; None if they name none."""
    for name in (CONFIG, "special_tokens_map.json"):
        found = read_json(folder / name).get("pad_token")
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str):
            return found
    return None


def cuts_start(data: bytes, folder: Path) -> bool:
    """Whether a text that is too long loses its start, by the settings of its tokenizer; else it loses its end."""
    side = read_json(folder / CONFIG).get("truncation_side")
    if side is None and (own := _part(data.decode(errors="replace"), "truncation")):
        side = own.get("direction")
    return str(side).lower() == "left"


def _normalizes_otherwise(normalizers: list[Mapping[str, Any]], settings: Mapping[str, Any]) -> bool:
    bert = next((one for one in normalizers if one["type"] == "BertNormalizer"), None)
    if bert is not None:
        wanted = {own: settings.get(name, _DEFAULTS[name]) for name, own in _OF_BERT.items()}
        return any(bert.get(own) != value for own, value in wanted.items())
    kinds = {one["type"] for one in normalizers}
    return any(
        settings.get(name) is not None and bool(settings[name]) is not (kind in kinds) for name, kind in _PARTS.items()
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
