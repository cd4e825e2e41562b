"""What can be told about a folder of transformers without building its model: what is understood, and what is not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nimble_jobs.errors import ModelError
from nimble_jobs.models.classes import classes_of
from nimble_jobs.models.identity import FOLDER_WEIGHTS, missing_package
from nimble_jobs.models.tokenizer_file import whole_config
from nimble_jobs.sentence import (
    Pooling,
    SentenceFolder,
    is_folder,
    problem_of_prompt,
    prompt_of,
    read_folder,
    strangers,
    transformer_folder,
)
from nimble_jobs.sentence.sources import MODULES, read_mapping
from nimble_jobs.spec.model import ModelSpec
from nimble_jobs.spec.text_model import problem_of_padding, text_model

_NOT_TEXT = frozenset({"pixel_values", "pixel_values_videos", "input_features", "input_values"})  # pictures and sound
_SHOWN = 10  # names of classes, prompts or arguments


@dataclass(frozen=True, kw_only=True)
class Trait:
    """One thing about a model."""

    name: str
    detail: str
    status: Literal["ok", "note", "problem"] = "ok"


def examine(folder: Path) -> Iterator[Trait]:
    """Everything that a job would take from the folder. What would make jobs fail is a problem, never an exception."""
    try:
        inner = transformer_folder(folder)
        config = read_mapping(inner / "config.json")
    except ModelError as e:
        yield from _without_model(folder, e)
        return
    yield from _model(inner, config)
    yield from _padding(inner, config)
    yield from _weights(inner)
    arguments, trait = _arguments(folder)
    try:
        found = read_folder(folder)
    except ModelError as e:
        yield Trait(name="modules", detail=str(e), status="problem")
    else:
        if found is not None:
            yield from _sentence(found, _positions(inner))
        elif _is_encoder(config, arguments):
            detail = f"there is no {MODULES}, so embeddings of texts need output.pooling"
            yield Trait(name="embedding", detail=detail, status="note")
    if _has_classes(config):
        yield _classes(folder)
    yield trait


def _without_model(folder: Path, error: ModelError) -> Iterator[Trait]:
    """Models that are no Transformer, such as StaticEmbedding, have no config.json where it would be."""
    strange: list[str] = []
    if is_folder(folder):
        with suppress(ModelError):  # a malformed modules.json is `error`
            strange = strangers(folder)
    for problem in strange:
        yield Trait(name="modules", detail=problem, status="problem")
    if not strange:
        yield Trait(name="model", detail=str(error), status="problem")


def _model(inner: Path, config: dict[str, Any]) -> Iterator[Trait]:
    named = config.get("architectures")
    architecture = (
        named[0]
        if isinstance(named, list) and named
        else "config.json names no architecture, so the base model without a head"
    )
    yield Trait(name="model", detail=f"{architecture}; model_type {config.get('model_type')}")
    if config.get("auto_map"):
        yield Trait(
            name="code",
            detail="config.json names code of its own, which nimble-jobs never runs; only models of transformers work",
            status="note",
        )
    if not (inner / "tokenizer.json").is_file():
        detail = "there is no tokenizer.json; to score texts, name one under input.text.tokenizer"
        yield Trait(name="tokenizer", detail=detail, status="note")


def _padding(inner: Path, config: dict[str, Any]) -> Iterator[Trait]:
    """Why jobs over texts refuse the model; or only those that take classes from it, which is a note."""
    try:
        limit = text_model(inner).limit
    except ModelError as e:
        yield Trait(name="padding", detail=str(e), status="problem")
        return
    if always := problem_of_padding(config, classifies=False, limit=limit):
        detail = f"jobs over texts refuse the model: {always[0]}; expected {always[1]}"
        yield Trait(name="padding", detail=detail, status="problem")
    elif classes := problem_of_padding(config, classifies=True, limit=limit):
        detail = f"jobs refuse to take classes of texts from the model: {classes[0]}; expected {classes[1]}"
        of_texts = any(name.endswith("ForSequenceClassification") for name in _architectures(config))
        yield Trait(name="padding", detail=detail, status="problem" if of_texts else "note")


def _weights(inner: Path) -> Iterator[Trait]:
    there = [name for name in FOLDER_WEIGHTS if (inner / name).is_file()]
    if not there:
        detail = f"found none of {', '.join(FOLDER_WEIGHTS)}; unless model.weights names a file, weights are random"
        yield Trait(name="weights", detail=detail, status="note")
    elif there[0].startswith("pytorch"):
        yield Trait(name="weights", detail=f"{there[0]}, a pickle, from which only plain tensors are read")
    else:
        yield Trait(name="weights", detail=there[0])


def _positions(inner: Path) -> int | None:
    """Most tokens that the model takes, with the default of its kind if transformers can tell that."""
    config = None
    if importlib.util.find_spec("transformers") is not None:
        with suppress(ModelError):  # `_arguments` reports it
            config = whole_config(inner)
    return text_model(inner, config).positions


def _sentence(found: SentenceFolder, positions: int | None) -> Iterator[Trait]:
    for problem in found.problems:
        yield Trait(name="modules", detail=problem, status="problem")
    if found.pooling is not None:
        yield Trait(name="embedding", detail=_words(found.pooling))
    limit = min((n for n in (found.max_length, positions) if n is not None), default=None)
    told = [] if limit is None else [f"up to {limit} tokens"]
    told += ["made lower case"] if found.lower_case else []
    told += [f"compared by {found.similarity}"] if found.similarity else []
    if told:
        yield Trait(name="texts", detail=", ".join(told))
    prompts = [f"{name} {prompt!r}" for name, prompt in found.prompts.items() if prompt]
    if prompts:
        default = f"; {found.default_prompt} is the default" if found.default_prompt else ""
        yield Trait(name="prompts", detail=_listed(prompts) + default)
    without = problem_of_prompt(found, prompt_of(found, None, None, alone=True) or "")
    if without is not None:
        yield Trait(name="prompts", detail=without, status="problem")
    elif found.prompt_left_out:
        detail = f"{found.prompt_left_out}: include_prompt is false, so jobs that give a prompt fail"
        yield Trait(name="prompts", detail=detail, status="note")


def _words(pooling: Pooling) -> str:
    steps = [" and ".join(mode.replace("_", " ") for mode in pooling.modes) + " of the tokens"]
    steps += [f"Dense {d.in_features} to {d.out_features} with {d.activation}" for d in pooling.layers]
    return ", ".join(steps + (["scaled to length 1"] if pooling.normalize else []))


def _is_encoder(config: dict[str, Any], arguments: tuple[str, ...]) -> bool:
    """Whether a job would take embeddings of texts from the model: it takes texts alone, and has no classes."""
    return {"input_ids", "attention_mask"} <= set(arguments) and not (
        _NOT_TEXT & set(arguments) or _has_classes(config)
    )


def _has_classes(config: dict[str, Any]) -> bool:
    return any("Classification" in name for name in _architectures(config))


def _architectures(config: dict[str, Any]) -> list[str]:
    named = config.get("architectures")
    return list(map(str, named)) if isinstance(named, list) else []


def _classes(folder: Path) -> Trait:
    try:
        classes = classes_of(ModelSpec(source=f"transformers:{folder}"))
    except ModelError as e:
        return Trait(name="classes", detail=str(e), status="problem")
    assert classes is not None
    if classes.unnamed is not None:
        return Trait(name="classes", detail=classes.unnamed, status="problem")
    kind = "of which a text may have several: " if classes.multi_label else ""
    return Trait(name="classes", detail=f"{len(classes.names)}, {kind}{_listed(classes.names)}")


def _arguments(folder: Path) -> tuple[tuple[str, ...], Trait]:
    """The model's arguments, if they can be told, and what to say of them."""
    if importlib.util.find_spec("transformers") is None:
        return (), Trait(name="arguments", detail=missing_package("transformers"), status="note")
    from nimble_jobs.models.from_transformers import arguments_of  # torch and transformers take seconds to import

    try:
        arguments = arguments_of(folder, {})
    except ModelError as e:
        return (), Trait(name="arguments", detail=str(e), status="problem")
    return arguments, Trait(name="arguments", detail=_listed(arguments))


def _listed(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
