"""Contradictions about what comes out of text models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nimble_jobs.errors import ModelError
from nimble_jobs.sentence import is_folder, read_folder
from nimble_jobs.spec.findings import Finding, Rule, register, worded
from nimble_jobs.spec.formats import LISTS, RECORDS, TEXTS, either
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.paths import is_file_of_weights, parse_source

_PER_TOKEN = frozenset({"tokens", "offsets", "token_labels", "token_probabilities"})
# Made of what a head returns. No base model of transformers returns anything of that kind.
_OF_CLASSES = frozenset({"top1", "top1_label", "top5", "probability", "probabilities", "score", "logits"})
_OF_HEAD = _OF_CLASSES | {"token_labels", "token_probabilities"}
_WAYS = "mean, cls, last or max"

RULES: list[Rule] = []
rule = register(RULES)


def pools(spec: JobSpec) -> bool:
    """Whether the job's `embedding` is pooled from tokens, and not the features under the last linear layer."""
    return "embedding" in spec.output.fields and (spec.input.format in TEXTS or spec.output.pooling is not None)


def leaves_out_head(spec: JobSpec) -> bool:
    """Whether the model runs without the head that its config.json names."""
    return pools(spec) and parse_source(spec.model.source).scheme == "transformers"


def classifies(spec: JobSpec, config: Mapping[str, Any]) -> bool:
    """Whether a model with this configuration gives each text a class."""
    names = config.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else ""
    return spec.kind == "finetune" or (named.endswith("ForSequenceClassification") and not leaves_out_head(spec))


@rule("output.pooling", "output.normalize", "output.fields", "input.format", "input.fields.x", "kind")
def _pooling(spec: JobSpec) -> Iterator[Finding]:
    for name, value in (("pooling", spec.output.pooling), ("normalize", spec.output.normalize)):
        if value is None:
            continue
        shown = str(value).lower()
        if spec.kind == "finetune":
            yield Finding(f"output.{name}", "not allowed if kind is finetune", f"kind: score, or no {name}")
        elif "embedding" not in spec.output.fields:
            problem = f"found {shown}, but output.fields has no embedding"
            yield Finding(f"output.{name}", problem, f"embedding in output.fields, or no {name}")
        elif spec.input.format not in TEXTS and not _has_mask(spec):
            problem = f"found {shown}, but the records have no attention_mask, as input.format is {spec.input.format}"
            yield Finding(f"output.{name}", problem, "format: text, or an attention_mask in input.fields.x")


@rule("output.pooling", "output.fields", "input.format", "model.source")
def _missing_pooling(spec: JobSpec) -> Iterator[Finding]:
    """Only a folder of transformers can say how to pool."""
    if pools(spec) and spec.output.pooling is None:
        source = parse_source(spec.model.source)
        if source.scheme != "transformers":
            problem = f"missing, and a {source.scheme} model does not say how its tokens are pooled"
            yield Finding("output.pooling", problem, _WAYS, at="output.fields")


@rule("output.fields", "output.pooling", "input.format", "model.source")
def _left_out_head(spec: JobSpec) -> Iterator[Finding]:
    """Only transformers' models lose their head to be pooled."""
    if not leaves_out_head(spec):
        return
    for index, name in enumerate(spec.output.fields):
        if name in _OF_HEAD:
            problem = f"{name} comes from the model's head, which is left out to pool tokens into embedding"
            yield Finding("output.fields", problem, f"one job for embedding, and another one for {name}", index=index)


@rule("output.fields", "model.source", "model.weights")
def _names_of_classes(spec: JobSpec) -> Iterator[Finding]:
    """Weights of the user's own may have the names beside them."""
    scheme = parse_source(spec.model.source).scheme
    own = spec.model.weights is not None and is_file_of_weights(spec.model.weights)
    if "top1_label" in spec.output.fields and scheme in ("torchvision", "timm") and not own:
        problem = f"top1_label needs names of classes, and a {scheme} model has none"
        at = spec.output.fields.index("top1_label")
        yield Finding("output.fields", problem, "top1, or a transformers model, whose config.json has them", index=at)


@rule("output.fields", "output.format", "input.format")
def _lists_of_tokens(spec: JobSpec) -> Iterator[Finding]:
    flat = set(RECORDS) - set(LISTS)
    for index, name in enumerate(spec.output.fields):
        if name in _PER_TOKEN and spec.output.format in flat and spec.input.format in TEXTS:
            problem = f"{name} is a list whose length differs from text to text, which {spec.output.format} cannot hold"
            yield Finding("output.fields", problem, f"format: {either(LISTS)}", index=index)


def check_files(spec: JobSpec) -> Iterator[Finding]:
    """Whether the spec or the model's folder says how to pool, and whether what the folder says is understood."""
    source = parse_source(spec.model.source)
    if source.scheme != "transformers" or not (pools(spec) or spec.input.format in TEXTS):
        return
    folder = Path(source.target)
    if is_folder(folder):
        yield from _sentence_model(spec, folder)
    elif pools(spec) and spec.output.pooling is None and folder.is_dir():
        problem = f"missing, and {folder} has no modules.json that says how to pool"
        yield Finding("output.pooling", problem, _WAYS, at="output.fields")


def _sentence_model(spec: JobSpec, folder: Path) -> Iterator[Finding]:
    """What a job over a folder of sentence-transformers would fail with, in the same words."""
    try:
        found = read_folder(folder)
    except ModelError as e:
        yield worded("model.source", str(e))
        return
    if found is None or not pools(spec):
        return
    for problem in found.problems:
        yield worded("output.fields", f"no embedding: {problem}")


def _has_mask(spec: JobSpec) -> bool:
    x: object = spec.input.fields.x
    return isinstance(x, dict) and "attention_mask" in x
