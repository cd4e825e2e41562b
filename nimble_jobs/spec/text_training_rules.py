"""Contradictions in the spec of a training on texts."""

from __future__ import annotations

from collections.abc import Iterator

from nimble_jobs.spec.findings import Finding, Rule, register
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.paths import parse_source
from nimble_jobs.spec.text import TOKENS_PER_BATCH
from nimble_jobs.spec.training import AugmentSpec
from nimble_jobs.spec.units import show

RULES: list[Rule] = []
rule = register(RULES)


def _on_texts(spec: JobSpec) -> bool:
    return spec.kind == "finetune" and spec.input.format == "text"


@rule("kind", "input.format", "model.source")
def _model(spec: JobSpec) -> Iterator[Finding]:
    """Other sources say neither what their head is, nor how to write a folder that transformers loads."""
    scheme = parse_source(spec.model.source).scheme
    if _on_texts(spec) and scheme in ("python", "exported"):
        problem = f"found {scheme}, but input.format is text and kind is finetune"
        yield Finding("model.source", problem, "transformers:DIR")


@rule("kind", "input.format", "model.args")
def _args(spec: JobSpec) -> Iterator[Finding]:
    """Entries of the configuration that follow from the labels."""
    if not _on_texts(spec):
        return
    for name in ("num_labels", "id2label", "label2id", "architectures", "problem_type"):
        if name in spec.model.args:
            problem = "not allowed if kind is finetune and input.format is text"
            yield Finding(f"model.args.{name}", problem, "none, because it follows from the labels")


@rule("kind", "input.format", "train.loss")
def _loss(spec: JobSpec) -> Iterator[Finding]:
    if _on_texts(spec) and spec.train is not None and spec.train.loss != "cross_entropy":
        yield Finding("train.loss", f"found {show(spec.train.loss)}, but input.format is text", "cross_entropy")


@rule("kind", "input.format", "train.augment")
def _augment(spec: JobSpec) -> Iterator[Finding]:
    if not _on_texts(spec) or spec.train is None:
        return
    for name in AugmentSpec.model_fields:
        if getattr(spec.train.augment, name):
            yield Finding(f"train.augment.{name}", "not allowed if input.format is text", "images")


@rule("kind", "input.format", "input.batch_size", "input.text.tokens_per_batch")
def _batches(spec: JobSpec) -> Iterator[Finding]:
    """Buckets whose batches would hold a single text."""
    text = spec.input.text
    if not _on_texts(spec) or text is None:
        return
    longest = max(text.buckets) if text.buckets != "auto" else text.max_length
    tokens = text.tokens_per_batch or TOKENS_PER_BATCH
    if longest is not None and longest <= tokens < 2 * longest:
        problem = f"found {tokens}, which is one text of {longest} tokens"
        yield Finding("input.text.tokens_per_batch", problem, f"at least {2 * longest}, for batches of two")


@rule("kind", "input.format", "train.checkpoint.best")
def _best(spec: JobSpec) -> Iterator[Finding]:
    if spec.train is not None and spec.train.checkpoint is not None:
        yield from _f1(spec, "train.checkpoint.best", spec.train.checkpoint.best)


@rule("kind", "input.format", "train.early_stopping.metric")
def _stopping(spec: JobSpec) -> Iterator[Finding]:
    if spec.train is not None and spec.train.early_stopping is not None:
        yield from _f1(spec, "train.early_stopping.metric", spec.train.early_stopping.metric)


def _f1(spec: JobSpec, field: str, metric: str | None) -> Iterator[Finding]:
    if metric == "val_f1" and spec.input.format != "text":
        yield Finding(field, f"val_f1 needs texts, but input.format is {spec.input.format}", "val_accuracy or val_loss")
