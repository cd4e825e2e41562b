"""The files by which a trained model gets its texts as it got them in training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from nimble_jobs.models.tokenizer_file import FILE
from nimble_jobs.models.tokenizer_settings import CONFIG
from nimble_jobs.sentence import read_settings, write_prompt
from nimble_jobs.workloads.text.setup import TextSetup

_NAMES = ("special_tokens_map.json", "added_tokens.json")
# For tokenizers that transformers does not make from tokenizer.json.
_VOCABULARIES = (
    *("vocab.txt", "vocab.json", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)


def write_tokenizer(setup: TextSetup, folder: Path) -> list[str]:
    """Write the tokenizer of a training, its limit and its prompt beside published weights. Returns the files' names.

    transformers and `set_up` make the same tokens with these files, if no setting says otherwise.
    """
    rules, place, padding = setup.tokenizer.rules, setup.place, setup.tokenizer.pad_token
    (folder / FILE).write_bytes(setup.tokenizer.to_json())
    written = [FILE, CONFIG]
    as_it_was = setup.of_model and not rules.lower_case
    for name in (*_NAMES, *(_VOCABULARIES if as_it_was else ())):
        if (place / name).is_file():
            shutil.copyfile(place / name, folder / name)
            written.append(name)
    settings: dict[str, Any] = read_settings(place / CONFIG)
    settings["model_max_length"] = rules.limit
    settings["truncation_side"] = "left" if setup.cuts_start else "right"
    if not as_it_was:  # classes of the library would replace what splits texts by something of their own
        settings.pop("auto_map", None)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        types = ["token_type_ids"] if rules.types else []
        settings.setdefault("model_input_names", ["input_ids", *types, "attention_mask"])
    if padding != rules.pad_token and not (as_it_was and rules.pad_token is None):  # else the class knows it
        settings["pad_token"] = padding
        (folder / _NAMES[0]).unlink(missing_ok=True)  # would name the other one
        written = [name for name in written if name != _NAMES[0]]
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    if rules.prompt:
        written.append(write_prompt(folder, rules.prompt))
    return written
