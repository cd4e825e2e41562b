"""The names of a model's classes, and how its scores are to be read, from JSON files. Nothing is built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimble_jobs.errors import ModelError
from nimble_jobs.models.identity import opened
from nimble_jobs.models.source import source_of, weights_file
from nimble_jobs.sentence import transformer_folder
from nimble_jobs.sentence.sources import read_mapping
from nimble_jobs.spec.model import ModelSpec

CLASSES = "classes.json"  # beside weights: the names of the classes, in the order of their numbers
_DEFAULT = 2  # classes of a configuration that names none


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes of a model with a head for classification or regression."""

    names: tuple[str, ...]  # none if they cannot be read, as `unnamed` says
    multi_label: bool = False  # each class is true or false by itself
    unnamed: str | None = None
    file: str = "config.json"  # which names them

    @property
    def said(self) -> tuple[str, ...]:
        """The names that somebody gave the classes: none if they are those that transformers makes up."""
        made_up = all(name == f"LABEL_{i}" for i, name in enumerate(self.names))
        return () if made_up else self.names


def classes_of(spec: ModelSpec) -> Classes | None:
    """The classes that classes.json beside the weights names; or that a transformers folder's config.json does, after
    `model.args` replaced entries of it.

    None for other models. Raises ModelError for a configuration that is malformed.
    """
    beside = classes_beside(spec)
    if beside is not None:
        return beside
    source = source_of(spec)
    if source.scheme != "transformers":
        return None
    path = transformer_folder(Path(source.target)) / "config.json"
    held = read_mapping(path)
    names, unnamed = _names(spec.args.get("id2label") or held.get("id2label"))
    count = spec.args.get("num_labels") or held.get("num_labels") or len(names) or _DEFAULT
    if type(count) is not int or not 1 <= count <= 1 << 20:
        raise ModelError(f"{path}: num_labels: found {count!r}; expected a whole number from 1 to 1048576")
    if unnamed is None and len(names) != count:  # as transformers names them then
        names = tuple(f"LABEL_{i}" for i in range(count))
    problem = spec.args.get("problem_type") or held.get("problem_type")
    multi_label = problem == "multi_label_classification"
    return Classes(names=names, multi_label=multi_label, unnamed=unnamed and f"{path}: id2label: {unnamed}")


def classes_beside(spec: ModelSpec) -> Classes | None:
    """The classes that classes.json beside `model.weights` names; None if there is no such file."""
    weights = weights_file(spec)
    path = weights.parent / CLASSES if weights is not None else None
    if path is None or not path.is_file():
        return None
    try:
        with opened(path) as file:
            names = json.load(file)
    except (ValueError, RecursionError) as e:
        return Classes(names=(), unnamed=f"{path}: not JSON: {e}", file=CLASSES)
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
        return Classes(names=(), unnamed=f"{path}: expected a list of different names", file=CLASSES)
    return Classes(names=tuple(names), file=CLASSES)


def write_classes(folder: Path, names: Sequence[str]) -> str:
    """Write classes.json beside published weights. Returns the name of the file. JSON has escapes for bytes of a
    folder's name that are no UTF-8.
    """
    text = json.dumps(list(names), indent=2, ensure_ascii=False) + "\n"
    (folder / CLASSES).write_bytes(text.encode("utf-8", "backslashreplace"))
    return CLASSES


def _names(said: Any) -> tuple[tuple[str, ...], str | None]:
    """The names in order, or none and why they cannot be read."""
    if said is None:
        return (), None
    if not isinstance(said, dict) or not all(isinstance(name, str) for name in said.values()):
        return (), "expected a mapping of numbers to names"
    by_number = {str(number): name for number, name in said.items()}
    if set(by_number) != {str(i) for i in range(len(by_number))}:
        return (), f"its numbers are not 0 to {len(by_number) - 1}"
    return tuple(by_number[str(i)] for i in range(len(by_number))), None
