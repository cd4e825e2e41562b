"""Contradictions in a spec whose records are texts, and fields that only such a spec may have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nimble_jobs.errors import ModelError
from nimble_jobs.sentence import read_settings, transformer_folder
from nimble_jobs.spec.findings import Finding, Rule, register, worded
from nimble_jobs.spec.formats import TEXTS
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.paths import parse_source
from nimble_jobs.spec.pooling_rules import classifies
from nimble_jobs.spec.text_model import problem_of_padding, text_model
from nimble_jobs.spec.transform import TransformSpec
from nimble_jobs.spec.units import show

RULES: list[Rule] = []
rule = register(RULES)

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
_PADDED = "not allowed if input.fields.x is a mapping, whose texts all have one length"


@rule("input.format", "input.text", "input.fields.x")
def _only_text(spec: JobSpec) -> Iterator[Finding]:
    """Texts are records, or one of several inputs."""
    text, format_ = spec.input.text, spec.input.format
    if text is None or format_ in TEXTS:
        return
    if format_ not in ("parquet", "csv") or "input_ids" not in (spec.input.fields.arguments or {}):
        yield Finding("input.text", f"not allowed if input.format is {format_}", "format: text")
        return
    if text.buckets != "auto":
        yield Finding("input.text.buckets", _PADDED, "max_length alone")
    if text.tokens_per_batch is not None:
        yield Finding("input.text.tokens_per_batch", _PADDED, "input.batch_size")


@rule("input.format", "kind")
def _only_scored(spec: JobSpec) -> Iterator[Finding]:
    if spec.input.format in TEXTS and spec.input.format != "text" and spec.kind == "finetune":
        yield Finding(
            "input.format", f"found {spec.input.format}, but kind is finetune", "kind: score, or another format"
        )


@rule("input.format", "input.batch_size", "input.transform", "input.decode", "input.allow_nan")
def _no_numbers(spec: JobSpec) -> Iterator[Finding]:
    """Fields that say something about numbers or pictures."""
    given = spec.input
    if given.format not in TEXTS:
        return
    if spec.kind == "score" and "batch_size" in given.model_fields_set and given.batch_size != 32:
        problem = f"found {given.batch_size}, but input.format is {given.format}, whose batches are counted in tokens"
        yield Finding("input.batch_size", problem, "input.text.tokens_per_batch")
    for name in TransformSpec.model_fields:
        if getattr(given.transform, name) is not None:
            yield Finding(f"input.transform.{name}", f"not allowed if input.format is {given.format}", "none")
    if given.allow_nan:
        yield Finding("input.allow_nan", f"not allowed if input.format is {given.format}", "none")


@rule("input.format", "input.fields.x")
def _columns(spec: JobSpec) -> Iterator[Finding]:
    x = spec.input.fields.x
    if isinstance(x, str):
        return
    if isinstance(x, dict):
        if spec.input.format == "text":
            yield Finding("input.fields.x", "found a mapping, but input.format is text", "one column, or a list of two")
        return
    if spec.input.format != "text":
        yield Finding("input.fields.x", f"found a list, but input.format is {spec.input.format}", "one name")
    elif len(x) != 2:
        yield Finding("input.fields.x", f"found {len(x)} columns", "one column, or two that make a pair")
    elif x[0] == x[1]:
        yield Finding("input.fields.x", f"{show(x[0])} is given twice", "two different columns")


@rule("input.format", "input.fields.x", "input.source")
def _plain_lines(spec: JobSpec) -> Iterator[Finding]:
    """A file of plain lines has no columns."""
    if spec.input.format != "text" or not spec.input.source.lower().removesuffix(".gz").endswith(".txt"):
        return
    fields = spec.input.fields
    for name in ("x", "id", "label"):
        value = getattr(fields, name)
        if name in fields.model_fields_set and value is not None and not (name == "x" and value == "x"):
            shown = show(value) if isinstance(value, str) else f"[{', '.join(value)}]"
            problem = f"found {shown}, but a .txt file has no columns"
            expected = "none: each line is a record, and its number is the id"
            yield Finding(f"input.fields.{name}", problem, expected)


@rule("input.text.prompt", "input.text.prompt_name", "input.fields.x")
def _prompt(spec: JobSpec) -> Iterator[Finding]:
    if spec.input.text is None or not isinstance(spec.input.fields.x, tuple):
        return
    for name in ("prompt", "prompt_name"):
        if getattr(spec.input.text, name):
            yield Finding(f"input.text.{name}", "not allowed if input.fields.x names two columns", "no prompt")


@rule("input.text.buckets", "input.text.max_length")
def _buckets(spec: JobSpec) -> Iterator[Finding]:
    text = spec.input.text
    if text is None or text.buckets == "auto" or text.max_length is None:
        return
    for length in text.buckets:
        if length > text.max_length:
            problem = f"{length} is more than input.text.max_length {text.max_length}"
            yield Finding("input.text.buckets", problem, f"lengths up to {text.max_length}")


@rule("input.text.max_length", "input.text.tokens_per_batch", "input.text.buckets")
def _tokens(spec: JobSpec) -> Iterator[Finding]:
    text = spec.input.text
    if text is None:
        return
    longest = max(text.buckets) if text.buckets != "auto" else text.max_length
    if longest is not None and text.tokens_per_batch is not None and text.tokens_per_batch < longest:
        problem = f"found {text.tokens_per_batch}, but a record may have {longest} tokens"
        yield Finding("input.text.tokens_per_batch", problem, f"at least {longest}")


@rule("model.source", "input.format", "input.text.tokenizer", "input.text.max_length")
def _of_the_model(spec: JobSpec) -> Iterator[Finding]:
    """What only a folder of transformers says must otherwise be in the spec."""
    if spec.input.format not in TEXTS:
        return
    source, text = parse_source(spec.model.source), spec.input.text
    if source.scheme == "transformers":
        try:
            known = text_model(Path(source.target))
        except ModelError:  # `check_files` reports it
            return
        if text is not None and text.max_length and known.positions and text.max_length > known.positions:
            problem = f"found {text.max_length}, but the model has {known.positions} positions"
            yield Finding("input.text.max_length", problem, f"at most {known.positions}")
        if text is not None and text.buckets != "auto" and text.max_length is None and known.limit:
            for length in text.buckets:
                if length > known.limit:
                    problem = f"{length} is more than the {known.limit} tokens that the model takes"
                    yield Finding("input.text.buckets", problem, f"lengths up to {known.limit}")
        return
    if source.scheme in ("torchvision", "timm"):
        problem = f"found {spec.input.format}, but {source.scheme} has no models that take tokens"
        yield Finding("input.format", problem, "a model.source of transformers, python or exported")
        return
    at = "input.text" if text is not None else "input.format"
    if text is None or text.tokenizer is None:
        problem = f"missing, and {source.scheme} models bring no tokenizer"
        yield Finding("input.text.tokenizer", problem, "a tokenizer.json, or a folder with one", at=at)
    if text is None or text.max_length is None:
        problem = f"missing, and {source.scheme} models do not say how many tokens they take"
        yield Finding("input.text.max_length", problem, "a number of tokens", at=at)


def check_files(spec: JobSpec) -> Iterator[Finding]:
    """Report a tokenizer that does not exist, and a model that padding would disturb."""
    source, text = parse_source(spec.model.source), spec.input.text
    if text is not None and text.tokenizer is not None:
        yield from _tokenizer("input.text.tokenizer", text.tokenizer)
    if spec.input.format not in TEXTS:
        return
    if source.scheme == "transformers":
        try:
            config = {**read_settings(_folder(source.target) / "config.json"), **spec.model.args}
            limit = text_model(Path(source.target)).limit
        except ModelError as e:
            yield worded("model.source", str(e))
            return
        limit = (text.max_length if text is not None else None) or limit
        if problem := problem_of_padding(config, classifies=classifies(spec, config), limit=limit):
            yield Finding("model.source", *problem)
    named = text is not None and text.tokenizer is not None
    if not named and source.scheme == "transformers" and os.path.isdir(source.target):  # noqa: PTH112 - Path raises for odd names
        yield from _tokenizer("input.text.tokenizer", str(_folder(source.target)), of_model=True)


def _folder(path: str) -> Path:
    """Where the tokenizer of a model's folder lies."""
    try:
        return transformer_folder(Path(path))
    except ModelError:  # another check reports it
        return Path(path)


def _tokenizer(field: str, path: str, *, of_model: bool = False) -> Iterator[Finding]:
    if os.path.isfile(path):  # noqa: PTH113 - Path raises for odd names
        if not path.endswith(".json"):
            yield Finding(field, f"found {show(Path(path).name)}", "a tokenizer.json, or a folder with one")
    elif not os.path.isdir(path):  # noqa: PTH112 - as above
        yield Finding(field, f"no file or folder {path}", "a tokenizer.json, or a folder with one")
    elif not any(os.path.exists(os.path.join(path, name)) for name in _TOKENIZERS):  # noqa: PTH110, PTH118 - as above
        if of_model:
            problem = f"missing, and {path} holds no tokenizer"
            yield Finding(field, problem, "a tokenizer.json, or a folder with one", at="model.source")
        else:
            yield Finding(field, f"{path} holds no tokenizer", "a folder with a tokenizer.json")
