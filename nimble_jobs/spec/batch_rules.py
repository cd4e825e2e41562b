"""Contradictions about batch files of OpenAI's API, and about the prompts of models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nimble_jobs.errors import ModelError
from nimble_jobs.sentence import problem_of_prompt, prompt_of, read_texts_of
from nimble_jobs.spec.findings import Finding, Rule, register, worded
from nimble_jobs.spec.formats import RECORDS, TEXTS, either
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.paths import parse_source
from nimble_jobs.spec.pooling_rules import pools
from nimble_jobs.spec.text import TextSpec
from nimble_jobs.spec.units import show

PROMPTS = ("input.text", "input.text.prompt", "input.text.prompt_name")
_BATCH = "openai-batch"

RULES: list[Rule] = []
rule = register(RULES)


@rule("input.format", "output.format", "output.fields", "kind")
def _answers(spec: JobSpec) -> Iterator[Finding]:
    if spec.output.format != _BATCH or spec.kind == "finetune":
        return
    if spec.input.format != _BATCH:
        problem = f"found {_BATCH}, but input.format is {spec.input.format}, which holds no requests"
        yield Finding("output.format", problem, either(RECORDS))
    elif set(spec.output.fields) - {"id", "embedding"} or "embedding" not in spec.output.fields:
        problem = f"found {', '.join(spec.output.fields)}, but output.format is {_BATCH}"
        yield Finding("output.fields", problem, "[id, embedding]")


@rule("input.format", "input.fields")
def _no_columns(spec: JobSpec) -> Iterator[Finding]:
    if spec.input.format == _BATCH:
        for name in ("x", "id", "label"):
            if name in spec.input.fields.model_fields_set and getattr(spec.input.fields, name) not in (None, "x"):
                yield Finding(f"input.fields.{name}", f"not allowed if input.format is {_BATCH}", "none")


@rule("input.format", "input.only_new")
def _no_new_files(spec: JobSpec) -> Iterator[Finding]:
    if spec.input.format == _BATCH and spec.input.only_new is not None:
        yield Finding("input.only_new", f"not allowed if input.format is {_BATCH}, which is one file", "none")


@rule("input.text.prompt", "input.text.prompt_name", "model.source")
def _prompts(spec: JobSpec) -> Iterator[Finding]:
    text = spec.input.text
    if text is None or text.prompt_name is None:
        return
    scheme = parse_source(spec.model.source).scheme
    if text.prompt is not None:
        problem = f"found {show(text.prompt_name)}, but input.text.prompt is given too"
        yield Finding("input.text.prompt_name", problem, "one of them")
    elif scheme != "transformers":
        problem = f"found {show(text.prompt_name)}, but a {scheme} model has no prompts of its own"
        yield Finding("input.text.prompt_name", problem, "input.text.prompt, with the prompt's text")


def check_files(spec: JobSpec) -> Iterator[Finding]:
    """Whether the model has the prompt, and pools texts with one."""
    text, source = spec.input.text or TextSpec(), parse_source(spec.model.source)
    if source.scheme != "transformers" or (text.prompt_name is not None and text.prompt is not None):
        return
    try:
        found = read_texts_of(Path(source.target))
    except ModelError:  # another check reports it
        return
    prompt = prompt_of(found, text.prompt, text.prompt_name, alone=len(spec.input.fields.columns) == 1)
    if prompt is not None:
        # A column of a mapping may hold tokens instead, before which no prompt stands.
        if spec.input.format in TEXTS and pools(spec) and (problem := problem_of_prompt(found, prompt)):
            given = next((name for name in ("prompt_name", "prompt") if getattr(text, name) is not None), None)
            yield worded("input.text.prompt", problem, at=f"input.text.{given}" if given else "model.source")
    else:
        known = dict(found.prompts) if found is not None else {}
        expected = (
            f"one of {', '.join(known)}"
            if known
            else "input.text.prompt, with the prompt's text, because the model names no prompts"
        )
        yield Finding("input.text.prompt_name", f"found {show(text.prompt_name)}", expected)
