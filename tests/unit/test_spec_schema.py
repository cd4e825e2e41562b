"""The JSON Schema: whole, described, and in agreement with the parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from nimble_jobs import spec
from nimble_jobs.spec.formats import SUFFIXES, InputFormat
from nimble_jobs.spec.tree import parse
from tests.bad_specs import FINETUNE, SCORE
from tests.unit.test_spec_good import FULL_SCORE, FULL_TRAIN

SCHEMA = spec.json_schema()
NUMBER = (int, float)
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": NUMBER,
}
SILENT = {"title", "description", "default", "examples", "$defs", "$schema"}
CHECKS: dict[str, Callable[[Any, Any, dict[str, Any]], bool]] = {
    "type": lambda v, want, _: isinstance(v, TYPES[want]) and (want == "boolean" or not isinstance(v, bool)),
    "$ref": lambda v, want, _: fits(v, SCHEMA["$defs"][want.removeprefix("#/$defs/")]),
    "anyOf": lambda v, want, _: any(fits(v, option) for option in want),
    "enum": lambda v, want, _: v in want,
    "const": lambda v, want, _: v == want,
    "properties": lambda v, want, _: all(fits(v[k], inner) for k, inner in want.items() if k in v),
    "additionalProperties": lambda v, want, schema: want is True or set(v) <= set(schema["properties"]),
    "required": lambda v, want, _: set(want) <= set(v),
    "items": lambda v, want, _: all(fits(item, want) for item in v),
    "minItems": lambda v, want, _: len(v) >= want,
    "maxItems": lambda v, want, _: len(v) <= want,
    "minLength": lambda v, want, _: len(v) >= want,
    "pattern": lambda v, want, _: re.search(want, v) is not None,
    "minimum": lambda v, want, _: v >= want,
    "exclusiveMinimum": lambda v, want, _: v > want,
    "maximum": lambda v, want, _: v <= want,
    "exclusiveMaximum": lambda v, want, _: v < want,
}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """The part of JSON Schema that ours uses. A keyword without a check is an error, so none is left out."""
    ordered = [k for k in CHECKS if k in schema]  # type first: the others take it for granted
    assert set(schema) <= SILENT | set(ordered)
    return all(CHECKS[k](value, schema[k], schema) for k in ordered)


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for inner in schema.values():
            yield from nodes(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from nodes(inner)


@pytest.mark.parametrize(
    "text", [SCORE, FULL_SCORE, FINETUNE, FULL_TRAIN], ids=["score", "full", "train", "full-train"]
)
def test_good_specs_fit(text: str) -> None:
    """What the parser accepts as it is written, the schema accepts: durations as texts, one number for a square."""
    assert fits(parse(text, "f").value, SCHEMA)


@pytest.mark.parametrize("text", [SCORE, FULL_SCORE, FULL_TRAIN], ids=["score", "full", "full-train"])
def test_stored_specs_fit(text: str) -> None:
    """What `show --json` prints can be fed back."""
    assert fits(spec.dump(spec.loads(text, "f", Path("/nowhere"), check_files=False)), SCHEMA)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("version: 1", "version: 2"),
        ("name: digits-score", "name: a/b"),
        ("kind: score", "kind: scores"),
        ("timeout: 2h", "timeout: 2 hours"),
        ("resize: 32", "resize: [1, 2, 3]"),
        ("batch_size: 64", "batch_size: 0"),
        ("streams: auto", "streams: many"),
        ("device: cuda:1", "device: gpu"),
        ("seed: 3", "sed: 3"),
    ],
)
def test_bad_specs_do_not(old: str, new: str) -> None:
    """Mistakes in one field show in the editor."""
    assert old in FULL_SCORE
    assert not fits(parse(FULL_SCORE.replace(old, new), "f").value, SCHEMA)


def test_everything_is_described() -> None:
    """Each field has a title and one short sentence; each section refuses unknown fields."""
    json.dumps(SCHEMA, allow_nan=False)
    sections = [n for n in nodes(SCHEMA) if "properties" in n and n.get("type") == "object"]
    assert len(sections) == 24
    for section in sections:
        assert section["additionalProperties"] is False
        assert section["title"]
        for name, field in section["properties"].items():
            target = SCHEMA["$defs"].get(field.get("$ref", "").removeprefix("#/$defs/"), {})
            description = field.get("description") or target["description"]
            assert description.endswith("."), name
            assert len(description) < 140, name
            assert field.get("title") or target.get("title") or "anyOf" in field, name


def test_every_reference_is_there() -> None:
    """No reference points nowhere."""
    for node in nodes(SCHEMA):
        if isinstance(reference := node.get("$ref"), str):
            assert reference.removeprefix("#/$defs/") in SCHEMA["$defs"]


def test_every_input_format_has_suffixes() -> None:
    """Files of each format can be found in a folder."""
    assert set(SUFFIXES) == set(get_args(InputFormat))
