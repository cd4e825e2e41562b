"""A folder of transformers as a classifier of texts, whatever head its weights were saved with."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nimble_jobs.errors import ModelError
from nimble_jobs.models.classes import classes_of
from nimble_jobs.models.identity import missing_package, opened
from nimble_jobs.models.source import source_of, weights_file
from nimble_jobs.sentence import transformer_folder
from nimble_jobs.spec.model import ModelSpec


def as_classifier(spec: ModelSpec, classes: int) -> ModelSpec:
    """The same model with a head for so many classes of texts.

    Raises ModelError if transformers has no such head for the folder's kind of model.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(missing_package("transformers"))
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    kind = _config(spec).get("model_type")
    name = NAMES.get(str(kind))
    if name is None:
        raise ModelError(
            f"model.source: transformers cannot classify texts with a model of type {kind!r}; expected a text encoder"
        )
    return spec.model_copy(update={"args": {**spec.args, "architectures": [name], "num_labels": classes}})


def classes_of_head(spec: ModelSpec) -> tuple[str, ...]:
    """The classes of the head that a model's weights have, as config.json beside them names them; none if it does not.

    Raises ModelError for a configuration that is malformed.
    """
    weights = weights_file(spec)
    if weights is not None and (weights.parent / "config.json").is_file():
        spec = ModelSpec(source=f"transformers:{weights.parent}")
    classes = classes_of(spec)
    return () if classes is None else classes.said


def write_config(spec: ModelSpec, folder: Path, names: Sequence[str]) -> str:
    """Write config.json beside published weights, so that transformers can load the folder.

    `spec` is what `as_classifier` made, and `names` are those of the classes. Returns the name of the file.
    """
    own = _config(spec)
    args = {name: value for name, value in spec.args.items() if name != "num_labels"}
    for name, value in args.items():
        if isinstance(value, dict) and isinstance(own.get(name), dict):  # as transformers takes them
            args[name] = own[name] | value
    config: dict[str, Any] = {**own, **args, "problem_type": "single_label_classification"}
    config["id2label"] = {str(number): name for number, name in enumerate(names)}
    config["label2id"] = {name: number for number, name in enumerate(names)}
    config["dtype"] = "float32"  # of the weights, whatever the training computed in
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return "config.json"


def _config(spec: ModelSpec) -> dict[str, Any]:
    path = transformer_folder(Path(source_of(spec).target)) / "config.json"
    try:
        with opened(path) as file:
            found = json.load(file)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path}: not a model configuration: {e}") from e
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a model configuration; expected an object")
    return found
