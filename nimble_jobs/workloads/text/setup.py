"""What a job does with its texts before the model: tokenizer, limits, and the layout of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nimble_jobs.data.text.fixed import FixedRows
from nimble_jobs.data.text.tokenizer import Tokenizer, TokenRules
from nimble_jobs.errors import ModelError
from nimble_jobs.models.tokenizer_file import gives_token_types, tokenizer_json, whole_config
from nimble_jobs.models.tokenizer_settings import cuts_start, named_padding
from nimble_jobs.packing import Layout, text_layout
from nimble_jobs.sentence import SentenceFolder, problem_of_prompt, prompt_of, read_texts_of, transformer_folder
from nimble_jobs.spec import JobSpec, ModelSpec, parse_source
from nimble_jobs.spec.pooling_rules import classifies, pools
from nimble_jobs.spec.text import TOKENS_ON_CPU, TOKENS_PER_BATCH, TextSpec
from nimble_jobs.spec.text_model import TextModel, problem_of_padding, text_model, with_padding


@dataclass(frozen=True, kw_only=True, eq=False)
class TextSetup:
    """How the texts of one job become rows of tokens."""

    spec: TextSpec
    tokenizer: Tokenizer
    padding: int  # the token id behind a text; the mask makes the model ignore it, or the model looks for it
    vocabulary: int  # token ids are below it
    place: Path  # of the tokenizer, a file or a folder
    of_model: bool  # whether that is the model's own folder
    cuts_start: bool = False  # whether a text that is to be cut loses its start, also if the job cuts none
    wants_tokens: bool = False  # whether the output holds token ids
    config: Mapping[str, Any] | None = None  # of a model that must be told its padding; None: it knows

    @property
    def limit(self) -> int:
        """Most tokens of a record."""
        return self.tokenizer.rules.limit

    def batch_tokens(self, *, pads: bool) -> int:
        """Tokens of a batch, padding included. `pads`: whether short batches are padded, as on a GPU.

        A CPU gains nothing from larger batches, which its caches do not hold.
        """
        return self.spec.tokens_per_batch or (TOKENS_PER_BATCH if pads else TOKENS_ON_CPU)

    def layout(self, length: int) -> Layout:
        """The layout of a row in the bucket of this length."""
        return text_layout(length, vocabulary=self.vocabulary, token_types=self.tokenizer.rules.types)

    def model(self, spec: ModelSpec) -> ModelSpec:
        """The model as its rows need it: it takes for padding what they are padded with."""
        if self.config is None:
            return spec
        return spec.model_copy(update={"args": with_padding(spec.args, self.config, self.padding)})

    def to_json(self) -> dict[str, Any]:
        """What decides the tokens, beside the spec."""
        rules = self.tokenizer.rules
        found = {
            "tokenizer": f"sha256:{self.tokenizer.sha256}",
            "max_length": rules.limit,
            "truncate": rules.truncate,
            "prompt": rules.prompt,
            "lower_case": rules.lower_case,
        }
        if rules.types:
            found["token_types"] = True
        if self.config is not None:
            found["padding"] = self.padding
        return found


def set_up(spec: JobSpec) -> TextSetup:
    """Open the tokenizer that the spec or the model's folder names. Raises ModelError."""
    text = spec.input.text or TextSpec()
    source = parse_source(spec.model.source)
    model, sentence, folder, config = TextModel(), None, None, dict[str, Any]()
    if source.scheme == "transformers":
        folder = transformer_folder(Path(source.target))
        config = whole_config(folder, spec.model.args)
        model, sentence = text_model(folder, config), read_texts_of(Path(source.target))
    place = Path(text.tokenizer) if text.tokenizer is not None else folder
    limit = text.max_length or (sentence.max_length if sentence is not None else None) or model.limit
    if place is None or limit is None:
        if place is None:
            raise ModelError("input.text.tokenizer: missing, and the model brings no tokenizer")
        raise ModelError("input.text.max_length: missing, and the model does not say how many tokens it takes")
    if model.positions is not None and limit > model.positions:
        limit = model.positions  # settings of the folder may promise more than the model has
    if problem := problem_of_padding(config, classifies=classifies(spec, config), limit=limit):
        raise ModelError(f"model.source: {problem[0]}; expected {problem[1]}")
    pairs = isinstance(spec.input.fields.x, tuple)
    data = tokenizer_json(place, folder)
    rules = TokenRules(
        limit=limit,
        truncate=text.truncate or _truncation(spec, data, place),
        prompt=_prompt(text, sentence, spec),
        lower_case=sentence is not None and sentence.lower_case,
        vocabulary=model.vocabulary,
        alone=not pairs,
        types=pairs and model.tells_pairs and folder is not None and gives_token_types(place, folder),
        offsets="offsets" in spec.output.fields,
        # A training with another tokenizer makes a model for it, so what the model knew of padding does not count.
        padding=model.padding if spec.kind == "score" or place == folder or model.counts_from_padding else None,
        pad_token=named_padding(place),
        finds_end=classifies(spec, config),
    )
    tokenizer = Tokenizer(data, rules, name=str(place))
    if not pairs:
        _check_room(tokenizer, text)
    return TextSetup(
        spec=text,
        tokenizer=tokenizer,
        padding=tokenizer.padding,
        vocabulary=model.vocabulary or tokenizer.vocabulary,
        place=place,
        of_model=place == folder,
        cuts_start=rules.truncate == "start" or (rules.truncate == "error" and cuts_start(data, place)),
        wants_tokens="tokens" in spec.output.fields,
        config=config if config and tokenizer.padding != model.padding and not model.counts_from_padding else None,
    )


def _check_room(tokenizer: Tokenizer, text: TextSpec) -> None:
    """Refuse a prompt that leaves no room for the texts behind it. Raises ModelError.

    A space at its end is usually a part of the text's first token.
    """
    prompt, limit = tokenizer.rules.prompt, tokenizer.rules.limit
    if prompt and (taken := tokenizer.count(prompt.removesuffix(" "))) >= limit:
        field = "input.text.prompt" if text.prompt_name is None else "input.text.prompt_name"
        which = "the model's default prompt" if text.prompt is None and text.prompt_name is None else "the prompt"
        raise ModelError(
            f"{field}: {which} has {taken} tokens, special ones included, but a record has at most {limit} "
            f"(input.text.max_length), so it does not fit beside a text; expected at most {limit - 1}"
        )


def _truncation(spec: JobSpec, data: bytes, place: Path) -> Literal["end", "start", "error"]:
    """What becomes of a text that is too long, if the spec does not say."""
    if spec.input.format == "openai-batch":
        return "error"
    return "start" if cuts_start(data, place) else "end"


class ColumnOfText:
    """How a text becomes tokens that is one of several inputs. The tokenizer is opened once such a column is found."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.setup: TextSetup | None = None  # None: no column of text was found
        self._rows: FixedRows | None = None

    def __call__(self) -> FixedRows:
        """What fills the rows. Raises ModelError."""
        if self._rows is None:
            self.setup = set_up(self._spec)
            tokenizer, vocabulary = self.setup.tokenizer, self.setup.vocabulary
            self._rows = FixedRows(tokenizer, padding=self.setup.padding, vocabulary=vocabulary)
        return self._rows

    @property
    def cut(self) -> int:
        """Texts that lost tokens so far."""
        return self._rows.cut if self._rows is not None else 0


def _prompt(text: TextSpec, sentence: SentenceFolder | None, spec: JobSpec) -> str:
    """The prompt that the spec names, or else the folder's default. Raises ModelError."""
    alone = len(spec.input.fields.columns) == 1
    prompt = prompt_of(sentence, text.prompt, text.prompt_name, alone=alone)
    if prompt is None:
        known = ", ".join(sentence.prompts) if sentence is not None else ""
        raise ModelError(f"input.text.prompt_name: the model has no prompt {text.prompt_name!r}; it has: {known}")
    if pools(spec) and (problem := problem_of_prompt(sentence, prompt)):
        raise ModelError(f"input.text.prompt: {problem}")
    return prompt
