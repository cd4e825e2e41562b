"""Reads the small files of a model's folder. A folder is data of somebody else, so nothing in it is trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from nimble_jobs.errors import ModelError
from nimble_jobs.regular import NotRegular, open_regular

MODULES = "modules.json"
_MOST_BYTES = 4 << 20  # of a file that says how sentence-transformers built its model
_MOST_SETTINGS_BYTES = 16 << 20  # of a configuration; thousands of added tokens take more than 1 MiB


def is_folder(folder: Path) -> bool:
    """Whether the folder says how sentence-transformers built its model."""
    return os.path.isfile(folder / MODULES)  # noqa: PTH113  # says no of a folder that may not be read


def transformer_folder(folder: Path) -> Path:
    """The folder with config.json, the tokenizer and the weights: often the model's own, or a folder in it.

    Raises ModelError if modules.json is malformed.
    """
    if os.path.exists(folder / "config.json") or not is_folder(folder):  # noqa: PTH110  # the same
        return folder
    first = modules_of(folder)[0]
    return inside(folder, first["path"], folder / MODULES)


def modules_of(folder: Path) -> list[dict[str, Any]]:
    """The entries of modules.json, each with texts for `type` and `path`. Raises ModelError."""
    path = folder / MODULES
    found = read_json(path)
    if not isinstance(found, list) or not found:
        raise ModelError(f"{path}: found {_kind(found)}; expected a list of modules")
    for index, entry in enumerate(found):
        if not isinstance(entry, dict):
            raise ModelError(f"{path}: module {index} is {_kind(entry)}; expected a mapping with type and path")
        for name in ("type", "path"):
            if not isinstance(entry.get(name), str):
                raise ModelError(f"{path}: module {index}: {name}: found {_kind(entry.get(name))}; expected text")
    return found


def inside(folder: Path, relative: str, said_by: Path) -> Path:
    """A folder within another. Raises ModelError if the path leaves it, also through a link, or is no folder."""
    part = PurePosixPath(relative)
    if part.is_absolute() or ".." in part.parts or "\\" in relative or "\0" in relative:
        raise ModelError(f"{said_by}: path {relative!r} leaves the model's folder; expected a folder in it")
    place = folder / part
    try:
        real = place.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise ModelError(f"{said_by}: path {relative!r} is a link that leaves the model's folder")
    except (OSError, RuntimeError) as e:  # RuntimeError: links in a circle
        raise ModelError(f"{said_by}: there is no folder {place}") from e
    if not real.is_dir():
        raise ModelError(f"{said_by}: {place} is not a folder")
    return place


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file. Raises ModelError."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ModelError(f"{path}: found {_kind(found)}; expected a mapping")
    return found


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises ModelError, naming the file, if it is missing, too large or no JSON."""
    try:
        with open_regular(path) as file:
            data = file.read(_MOST_BYTES + 1)
    except NotRegular as e:
        raise ModelError(f"{path}: {e}") from e
    except FileNotFoundError as e:
        raise ModelError(f"{path}: no such file") from e
    except OSError as e:
        raise ModelError(f"{path}: {e.strerror}") from e
    if len(data) > _MOST_BYTES:
        raise ModelError(f"{path}: larger than {_MOST_BYTES >> 20} MiB; expected a small JSON file")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path}: not JSON: {e}") from e


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; an empty one if the file is missing or holds no object. Raises ModelError if it is
    too large.
    """
    try:
        with open_regular(path) as file:
            data = file.read(_MOST_SETTINGS_BYTES + 1)
        found = json.loads(data) if len(data) <= _MOST_SETTINGS_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    if len(data) > _MOST_SETTINGS_BYTES:
        raise ModelError(f"{path}: larger than {_MOST_SETTINGS_BYTES >> 20} MiB; expected a small JSON file")
    return found if isinstance(found, dict) else {}


def typed(mapping: dict[str, Any], name: str, kind: type, default: Any, path: Path) -> Any:
    """The value under a name, or the default where there is none or null. Raises ModelError for another type."""
    value = mapping.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        expected = {bool: "true or false", int: "a whole number", str: "text", dict: "a mapping"}[kind]
        raise ModelError(f"{path}: {name}: found {_kind(value)}; expected {expected}")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
    return repr(value)[:60]
