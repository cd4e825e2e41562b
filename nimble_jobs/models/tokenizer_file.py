"""The tokenizer of a text model, as the bytes of a tokenizer.json."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nimble_jobs.errors import ModelError, first_line
from nimble_jobs.models.identity import existing, missing_package
from nimble_jobs.models.tokenizer_settings import overruled
from nimble_jobs.regular import read_regular
from nimble_jobs.sentence import read_settings

FILE = "tokenizer.json"
_LARGEST = 256 << 20  # bytes


def tokenizer_json(place: Path, model: Path | None = None) -> bytes:
    """The tokenizer.json at `place`, a file or a folder. A folder with vocabulary files only is converted, and so is
    one whose tokenizer_config.json says something else, as transformers does it.

    `model` is the folder of the model, whose configuration tells the kind of tokenizer if its own folder does not. No
    code of the folder runs, and nothing is downloaded. Raises ModelError.
    """
    path = place if place.is_file() else place / FILE
    if path.exists():
        data = read_regular(existing(path))
        if len(data) > _LARGEST:
            raise ModelError(f"{path}: has {len(data)} bytes; expected a tokenizer")
        if place == path or not overruled(data, place):
            return data
    return _converted(place, model)


def gives_token_types(place: Path, model: Path) -> bool:
    """Whether transformers gives `token_type_ids` with the tokens of a pair.

    `place` is the tokenizer, a file or a folder; a file is judged by `model`, the folder of the model. A folder says so
    with `model_input_names` in its tokenizer_config.json, or else by the class of its tokenizer, for which transformers
    is asked. True if transformers cannot open it, for instance because a package is missing.
    """
    folder = place if place.is_dir() else model
    named = read_settings(folder / "tokenizer_config.json").get("model_input_names")
    if not isinstance(named, list):
        try:
            named = _opened(folder, folder if (folder / "config.json").exists() else model).model_input_names
        except ModelError:
            return True
    return "token_type_ids" in named


def _converted(folder: Path, model: Path | None) -> bytes:
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such tokenizer; expected a {FILE}, or a folder with one")
    made = _opened(folder, None if (folder / "config.json").exists() else model)
    if not getattr(made, "is_fast", False):
        raise ModelError(
            f"{folder}: its tokenizer is written in Python; expected one that can be saved as {FILE}{_or_file(folder)}"
        )
    text = made.backend_tokenizer.to_str()
    assert isinstance(text, str)
    return text.encode()


def _or_file(folder: Path) -> str:
    """What helps if transformers cannot say what it makes of a folder's tokenizer.json."""
    return f"; to take its {FILE} as it is, name that file as input.text.tokenizer" if (folder / FILE).exists() else ""


def _opened(folder: Path, model: Path | None = None) -> Any:
    """The tokenizer in a folder as transformers opens it, with the configuration in the folder `model`, if given."""
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(missing_package("transformers") + _or_file(folder))
    for member in folder.iterdir():  # the library opens them by name, and would wait forever on a named pipe
        if member.exists() and not member.is_dir():
            existing(member)
    import transformers

    level = logging.getLogger("transformers").level
    given: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config: dict[str, Any] = {}
        if model is not None:
            config["config"] = transformers.AutoConfig.from_pretrained(model, **given)
        elif not (folder / "config.json").exists():  # then the class that tokenizer_config.json names decides
            config["config"] = transformers.PretrainedConfig()
        return transformers.AutoTokenizer.from_pretrained(folder, use_fast=True, **config, **given)
    except Exception as e:  # whatever the library raises for files that it does not like
        expected = _or_file(folder) or f"; expected a {FILE}"
        raise ModelError(f"{folder}: transformers cannot read its tokenizer: {first_line(e)}{expected}") from e
    finally:
        logging.getLogger("transformers").setLevel(level)


def whole_config(folder: Path, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A model's configuration with the defaults of its kind, which config.json may leave out, and with `model.args`.

    Raises ModelError.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(missing_package("transformers"))
    existing(folder / "config.json")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **(args or {})
        )
    except Exception as e:  # whatever the library raises for a configuration that it does not like
        raise ModelError(f"{folder}: transformers cannot read the configuration: {type(e).__name__}: {e}") from e
    found: dict[str, Any] = config.to_dict()
    return found
