"""What the folder of a transformers model says about the texts that the model takes. Only JSON is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimble_jobs.errors import ModelError
from nimble_jobs.sentence import read_settings, transformer_folder

_SENSIBLE = 1 << 24  # tokens; transformers writes 1e30 where a tokenizer has no limit
# Their positions begin behind that of the padding token, so two of the table's rows are never used.
_SHIFTED = frozenset(
    {
        *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "camembert", "luke", "ibert"),
        *("mpnet", "longformer", "data2vec-text", "esm", "lilt", "layoutlmv3", "markuplm"),
        *("altclip_text_model", "bridgetower_text_model", "clap_text_model"),
    }
)
# Their positions are relative or computed, so `max_position_embeddings` is no limit, if they have it at all.
_RELATIVE = frozenset({"t5", "mt5", "umt5", "xlnet"})
# What they make of a text depends on how many tokens of padding stand behind it, whatever the mask says: they mix
# neighbours or pool places, hash, take landmarks, or know no mask. Reformer's hashes are random as well. MRA takes the
# row in blocks, and without a kernel from a hub transformers gives it no attention at all.
_FEEL_PADDING = frozenset(
    {"canine", "convbert", "fnet", "funnel", "mobilebert", "mra", "nystromformer", "reformer", "yoso"}
)
_SUMMARIES = {"xlnet": "last", "xlm": "first", "flaubert": "first"}  # which token they classify by, if they do not say
_ALIKE = "a model that gives a padded text the result of the text alone, such as BERT"


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """What is known about a model's texts; None: it does not say."""

    positions: int | None = None  # most tokens that the model can tell apart by their place
    usual: int | None = None  # most tokens that its tokenizer or sentence-transformers gives it; at most `positions`
    vocabulary: int | None = None  # token ids are below it
    padding: int | None = None  # the token id that it takes for padding, if it has a token of this id
    counts_from_padding: bool = False  # whether positions begin behind the padding's id
    token_types: int | None = None  # kinds of tokens that it tells apart

    @property
    def limit(self) -> int | None:
        """The default of `input.text.max_length`."""
        return self.usual if self.usual is not None else self.positions

    @property
    def tells_pairs(self) -> bool:
        """Whether it tells the tokens of a pair's second text from those of the first."""
        return self.token_types is not None and self.token_types > 1


def text_model(folder: Path, config: Mapping[str, Any] | None = None) -> TextModel:
    """What the folder says. A missing or unreadable file says nothing: other checks report it. Raises ModelError
    for a file that is too large.

    `config` is the configuration with its defaults, which config.json may leave out.
    """
    try:
        folder = transformer_folder(folder)
    except ModelError:
        return TextModel()
    config = read_settings(folder / "config.json") if config is None else config
    inner = config.get("text_config")
    if isinstance(inner, dict) and "vocab_size" not in config:
        config = inner
    kind = config.get("model_type")
    positions = _count(config.get("max_position_embeddings"))
    if positions is None:
        positions = _count(config.get("n_positions"))  # of GPT-2
    if kind in _RELATIVE:
        positions = None
    elif kind in _SHIFTED and positions is not None:
        padding = config.get("pad_token_id")
        positions -= (padding if type(padding) is int and padding >= 0 else 1) + 1
    usual = [
        _count(read_settings(folder / "sentence_bert_config.json").get("max_seq_length")),
        _count(read_settings(folder / "tokenizer_config.json").get("model_max_length")),
        positions,
    ]
    known = [limit for limit in usual if limit is not None]
    vocabulary = _count(config.get("vocab_size"))
    return TextModel(
        positions=positions,
        usual=min(known, default=None),
        vocabulary=vocabulary,
        padding=_padding(config, vocabulary),
        counts_from_padding=kind in _SHIFTED,
        token_types=_count(config.get("type_vocab_size")),
    )


def problem_of_padding(config: Mapping[str, Any], *, classifies: bool, limit: int | None) -> tuple[str, str] | None:
    """Why padding would change what a model makes of a text, and what is expected instead; None if it would not.

    `classifies`: whether texts get classes; `limit`: most tokens of a text.
    """
    kind = str(config.get("model_type"))
    found = f"found a model of type {kind}"
    if kind in _FEEL_PADDING and not (kind == "mobilebert" and config.get("trigram_input") is False):
        return f"{found}, whose results depend on how far a text is padded", _ALIKE
    if classifies and kind in _SUMMARIES:
        summary = config.get("summary_type", _SUMMARIES[kind])
        if summary != "first":
            return f"{found} with summary_type {summary}, which takes padding for a part of the text", _ALIKE
    if kind == "big_bird" and config.get("attention_type", "block_sparse") == "block_sparse":
        sizes = {"block_size": 64, "num_random_blocks": 3}
        size, chance = (config[n] if type(config.get(n)) is int else default for n, default in sizes.items())
        whole = (5 + 2 * chance) * size  # transformers attends to everything up to this length
        if limit is not None and limit > whole:
            problem = f"{found} and up to {limit} tokens, where sparse attention depends on how far a text is padded"
            return problem, f"input.text.max_length up to {whole}, or model.args: {{attention_type: original_full}}"
    return None


def with_padding(args: Mapping[str, Any], config: Mapping[str, Any], padding: int) -> dict[str, Any]:
    """`model.args` by which a model takes this token id for padding, whatever its configuration, `config`, says."""
    found = {**args, **({"pad_token_id": padding} if "pad_token_id" in config else {})}
    inner = config.get("text_config")
    if isinstance(inner, dict) and "pad_token_id" in inner:
        found["text_config"] = {**args.get("text_config", {}), "pad_token_id": padding}
    return found


def _padding(config: Mapping[str, Any], vocabulary: int | None) -> int | None:
    found = config.get("pad_token_id")
    return found if type(found) is int and 0 <= found < (vocabulary or _SENSIBLE) else None


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and 1 <= value <= _SENSIBLE else None
