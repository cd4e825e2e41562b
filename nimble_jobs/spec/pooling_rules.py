"""Contradictions about what comes out of text models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nimble_jobs.sentence import is_folder
from nimble_jobs.spec.findings import Finding, Rule, register
from nimble_jobs.spec.formats import LISTS, RECORDS, TEXTS, either
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.paths import parse_source

_PER_TOKEN = frozenset({"tokens", "offsets", "token_labels", "token_probabilities"})
_WAYS = "mean, cls, last or max"

RULES: list[Rule] = []
rule = register(RULES)


def pools(spec: JobSpec) -> bool:
    """Whether the job's `embedding` is pooled from tokens, and not the features under the last linear layer."""
    return "embedding" in spec.output.fields and (spec.input.format in TEXTS or spec.output.pooling is not None)


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


@rule("output.fields", "model.source")
def _names_of_classes(spec: JobSpec) -> Iterator[Finding]:
    scheme = parse_source(spec.model.source).scheme
    if "top1_label" in spec.output.fields and scheme in ("torchvision", "timm"):
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
    """Whether the spec or the model's folder says how to pool."""
    source = parse_source(spec.model.source)
    if pools(spec) and spec.output.pooling is None and source.scheme == "transformers":
        folder = Path(source.target)
        if folder.is_dir() and not is_folder(folder):
            problem = f"missing, and {folder} has no modules.json that says how to pool"
            yield Finding("output.pooling", problem, _WAYS, at="output.fields")


def _has_mask(spec: JobSpec) -> bool:
    x: object = spec.input.fields.x
    return isinstance(x, dict) and "attention_mask" in x
