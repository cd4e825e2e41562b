"""The settings of a folder of sentence-transformers, from its JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimble_jobs.errors import ModelError
from nimble_jobs.sentence.pooling import ACTIVATIONS, MODES, Dense, Pooling
from nimble_jobs.sentence.sources import (
    MODULES,
    inside,
    is_folder,
    modules_of,
    read_mapping,
    transformer_folder,
    typed,
)

UNDERSTOOD = "a Transformer, then Pooling, then any of Dense, Dropout and Normalize"
_PACKAGE = "sentence_transformers."
_SETTINGS = "config_sentence_transformers.json"
_TRANSFORMER_SETTINGS = tuple(  # the first that is there counts
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# All that sentence-transformers takes from the settings of a Pooling; it refuses any other.
_SETTINGS_OF_POOLING = ("word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt", *_FLAGS)
_OUTPUT = "last_hidden_state"  # of the transformer, which the pooling works on
_INPUT = "sentence_embedding"  # what modules after the pooling work on


@dataclass(frozen=True, kw_only=True)
class SentenceFolder:
    """What the folder says. `problems` are the reasons why its embedding cannot be computed; then `pooling` is None."""

    transformer: Path  # the folder with config.json, the tokenizer and the weights
    pooling: Pooling | None
    problems: tuple[str, ...] = ()
    max_length: int | None = None  # tokens of a text, special ones included
    lower_case: bool = False  # texts are made lower case before anything else
    prompts: Mapping[str, str]  # by name; a prompt stands before the text
    default_prompt: str | None = None  # the name of the prompt that is used unless another one is asked for
    prompt_left_out: Path | None = None  # the file that says that the prompt's tokens are not pooled
    similarity: str | None = None  # what the model was trained to compare with: cosine, dot, euclidean, manhattan


def read_folder(folder: Path) -> SentenceFolder | None:
    """The settings of a folder with a modules.json; None without one.

    Raises ModelError, naming the file, for what is malformed. A module of another kind is listed in `problems`.
    """
    if not is_folder(folder):
        return None
    entries = modules_of(folder)
    transformer = transformer_folder(folder)
    problems = strangers(folder)
    own, settings = _transformer_settings(transformer)
    path, overall = folder / _SETTINGS, {}
    if path.exists():
        overall = read_mapping(path)
    task = typed(settings, "transformer_task", str, "feature-extraction", own)
    if task != "feature-extraction":
        problems.append(f"{own}: transformer_task is {task!r}; expected feature-extraction")
    output = _output_of_texts(settings, own)
    if output != _OUTPUT:
        problems.append(f"{own}: modality_config.text gives {output!r}; expected {_OUTPUT}")
    kind = typed(overall, "model_type", str, "SentenceTransformer", path)
    if kind != "SentenceTransformer":
        problems.append(f"{path}: model_type is {kind!r}; expected SentenceTransformer")
    cut = typed(overall, "truncate_dim", int, None, path)
    if cut is not None:
        problems.append(f"{path}: truncate_dim is {cut}; expected null, as embeddings keep all their features")
    pooling, left_out = None, None
    if not problems:
        pooling, left_out = _pooling(folder, entries, problems)
    prompts, default = _prompts(overall, path)
    return SentenceFolder(
        transformer=transformer,
        pooling=None if problems else pooling,
        problems=tuple(problems),
        max_length=_max_length(transformer, settings, own),
        lower_case=typed(settings, "do_lower_case", bool, False, own),
        prompts=prompts,
        default_prompt=default,
        prompt_left_out=left_out,
        similarity=typed(overall, "similarity_fn_name", str, None, path),
    )


def read_texts_of(folder: Path) -> SentenceFolder | None:
    """As `read_folder`; of a folder without a modules.json, such as a classifier's, the prompts alone."""
    path = folder / _SETTINGS
    if is_folder(folder) or not os.path.isfile(path):  # noqa: PTH113 - Path raises for odd names
        return read_folder(folder)
    prompts, default = _prompts(read_mapping(path), path)
    return SentenceFolder(transformer=folder, pooling=None, prompts=prompts, default_prompt=default)


def write_prompt(folder: Path, prompt: str) -> str:
    """Make this the default prompt of a model's folder. Returns the name of the file."""
    settings = {"prompts": {"default": prompt}, "default_prompt_name": "default"}
    (folder / _SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return _SETTINGS


def resolve(folder: Path | None, mode: str | None, normalize: bool | None) -> Pooling:
    """How the folder's embedding is pooled, where a spec may say otherwise: `mode` replaces the way to pool, not the
    layers after it, and `normalize` whether the result is scaled to length 1.

    Raises ModelError if neither says how to pool, or if the folder holds what is not understood.
    """
    found = read_folder(folder) if folder is not None else None
    if found is not None and found.problems:
        raise ModelError(f"output.fields: no embedding: {found.problems[0]}")
    said = found.pooling if found is not None else None
    if mode is None and said is None:
        raise ModelError(
            f"output.pooling: missing, and the model has no {MODULES} that says how to pool; "
            "expected mean, cls, last or max"
        )
    base = said or Pooling(modes=())
    return Pooling(
        modes=base.modes if mode is None else (mode,),
        layers=base.layers,
        normalize=base.normalize if normalize is None else normalize,
    )


def strangers(folder: Path) -> list[str]:
    """Modules of a kind that is not understood, or at a place where they cannot be. Raises ModelError."""
    entries, problems = modules_of(folder), []
    for index, entry in enumerate(entries):
        name = _name(entry["type"])
        expected = {0: ("Transformer",), 1: ("Pooling",)}.get(index, ("Dense", "Dropout", "Normalize"))
        if name not in expected:
            why = "" if name else ", which is Python code in the folder, and nimble-jobs runs none of it"
            problems.append(f"{folder / MODULES}: module {index} is {entry['type']}{why}; expected {UNDERSTOOD}")
    if len(entries) == 1 and not problems:
        problems.append(f"{folder / MODULES}: there is no Pooling; expected {UNDERSTOOD}")
    return problems


def _name(type_: str) -> str:
    """`Pooling` of `sentence_transformers.models.Pooling`; empty for classes of others."""
    return type_.rpartition(".")[2] if type_.startswith(_PACKAGE) else ""


def _pooling(folder: Path, entries: list[dict[str, Any]], problems: list[str]) -> tuple[Pooling, Path | None]:
    """The pooling, and the file that excludes the prompt's tokens from it, if one does."""
    path = inside(folder, entries[1]["path"], folder / MODULES) / "config.json"
    settings = read_mapping(path)
    layers: list[Dense] = []
    normalized_at = None
    for index, entry in enumerate(entries[2:]):
        name, place = _name(entry["type"]), entry["path"]
        if name == "Dense":
            layers.append(_dense(folder, place, problems))
        elif name == "Normalize":
            own = folder / place / "config.json"
            _check_input(read_mapping(own) if own.exists() else {}, own, problems)
            normalized_at = index if normalized_at is None else normalized_at
        if normalized_at is not None and name == "Dense":
            problems.append(f"{folder / MODULES}: Normalize stands before Dense; expected {UNDERSTOOD}")
    modes = tuple(MODES[mode] for mode in _modes(settings, path, problems))
    pooling = Pooling(modes=modes, layers=tuple(layers), normalize=normalized_at is not None)
    return pooling, None if typed(settings, "include_prompt", bool, True, path) else path


def _modes(settings: dict[str, Any], path: Path, problems: list[str]) -> list[str]:
    """The ways to pool. An unknown setting may be a way that a newer version has, so it is a problem."""
    for name in settings:
        if name not in _SETTINGS_OF_POOLING:
            known = ", ".join(("pooling_mode", *_FLAGS))
            problems.append(f"{path}: {name[:60]!r} is not understood; expected any of {known}")
    if "pooling_mode" not in settings:
        # sentence-transformers takes the mean if all known flags are false, and if there are none.
        return [mode for flag, mode in _FLAGS.items() if typed(settings, flag, bool, False, path)] or ["mean"]
    said = settings["pooling_mode"]
    modes = [said] if isinstance(said, str) else said
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        raise ModelError(f"{path}: pooling_mode: found {said!r}; expected one of {', '.join(MODES)}, or a list of them")
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        problems.append(f"{path}: pooling_mode is {unknown[0]!r}; expected one of {', '.join(MODES)}")
    return [mode for mode in modes if mode in MODES]


def _dense(folder: Path, place: str, problems: list[str]) -> Dense:
    inside(folder, place, folder / MODULES)
    path = folder / place / "config.json"
    settings = read_mapping(path)
    sizes = {}
    for name in ("in_features", "out_features"):
        sizes[name] = typed(settings, name, int, 0, path)
        if not 1 <= sizes[name] <= 1 << 20:
            raise ModelError(f"{path}: {name}: found {settings.get(name)!r}; expected a whole number from 1 to 1048576")
    said = typed(settings, "activation_function", str, "torch.nn.modules.activation.Tanh", path)
    activation = said.rpartition(".")[2]
    if not said.startswith("torch.nn.") or activation not in ACTIVATIONS:
        expected = ", ".join(ACTIVATIONS)
        problems.append(f"{path}: activation_function is {said!r}; expected one of torch.nn: {expected}")
    _check_input(settings, path, problems)
    return Dense(
        folder=place,
        **sizes,
        bias=typed(settings, "bias", bool, True, path),
        activation=activation,
        residual=typed(settings, "use_residual", bool, False, path),
    )


def _check_input(settings: dict[str, Any], path: Path, problems: list[str]) -> None:
    for name in ("module_input_name", "module_output_name"):
        said = typed(settings, name, str, _INPUT, path)
        if said != _INPUT:
            problems.append(f"{path}: {name} is {said!r}; expected {_INPUT}")


def _transformer_settings(transformer: Path) -> tuple[Path, dict[str, Any]]:
    for name in _TRANSFORMER_SETTINGS:
        if (transformer / name).exists():
            return transformer / name, read_mapping(transformer / name)
    return transformer / _TRANSFORMER_SETTINGS[0], {}


def _output_of_texts(settings: dict[str, Any], own: Path) -> str:
    """The output of the transformer that texts are pooled from."""
    kinds = typed(settings, "modality_config", dict, {}, own)
    output = typed(typed(kinds, "text", dict, {}, own), "method_output_name", str, _OUTPUT, own)
    assert isinstance(output, str)
    return output


def _max_length(transformer: Path, settings: dict[str, Any], own: Path) -> int | None:
    """The limit in sentence-transformers: its own setting, else the tokenizer's, within the model's positions."""
    said = typed(settings, "max_seq_length", int, None, own)
    if said is None:
        known = [
            value
            for file, name in (
                ("tokenizer_config.json", "model_max_length"),
                ("config.json", "max_position_embeddings"),
            )
            if (transformer / file).exists()
            and type(value := read_mapping(transformer / file).get(name)) is int
            and 1 <= value <= 1 << 24  # tokenizers without a limit say 10^30
        ]
        return min(known, default=None)
    if said < 1:
        raise ModelError(f"{own}: max_seq_length: found {said}; expected at least 1")
    assert isinstance(said, int)
    return said


def _prompts(overall: dict[str, Any], path: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the default one."""
    prompts = typed(overall, "prompts", dict, {}, path)
    for name, prompt in prompts.items():
        if prompt is not None and not isinstance(prompt, str):
            raise ModelError(f"{path}: prompts.{name}: found {prompt!r}; expected text")
    default = typed(overall, "default_prompt_name", str, None, path)
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name: there is no prompt {default!r}; expected one of prompts")
    return {name: prompt or "" for name, prompt in prompts.items()}, default
