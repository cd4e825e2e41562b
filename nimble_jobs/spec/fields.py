"""The types of fields that several sections of a spec share.

Validators raise `BadValue`, with the problem and what was expected. Relative paths become absolute if the validation
context holds `base`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

from nimble_jobs.argument_paths import PATH, check_paths
from nimble_jobs.spec import paths
from nimble_jobs.spec.formats import either
from nimble_jobs.spec.input_source import input_source
from nimble_jobs.spec.units import DEVICE_PATTERN, DURATION_PATTERN, BadValue, parse_device, parse_duration, show, wrong

_MOST_PIXELS = 65_536  # of height and width


def based(make: Callable[[str, Path | None], str]) -> AfterValidator:
    def validate(value: str, info: ValidationInfo) -> str:
        return make(value, (info.context or {}).get("base"))

    return AfterValidator(validate)


def _matching(pattern: str, expected: str) -> tuple[AfterValidator, WithJsonSchema]:
    compiled = re.compile(pattern)

    def validate(value: str) -> str:
        if not compiled.fullmatch(value):
            raise BadValue(wrong(value), expected)
        return value

    return AfterValidator(validate), WithJsonSchema({"type": "string", "pattern": f"^(?:{pattern})$"})


def _pair(value: object) -> object:
    sizes = value if isinstance(value, list | tuple) else [value, value]
    if len(sizes) != 2 or not all(type(n) is int and 1 <= n <= _MOST_PIXELS for n in sizes):
        raise BadValue(wrong(value), f"a size in pixels from 1 to {_MOST_PIXELS}, or [height, width]")
    return tuple(sizes)


def _auto_or_count(value: object) -> object:
    if value == "auto" or (type(value) is int and 1 <= value <= 1024):
        return value
    raise BadValue(wrong(value), "auto or a whole number from 1 to 1024")


def _all_or_count(value: object) -> object:
    if value == "all" or (type(value) is int and 1 <= value <= 1024):
        return value
    raise BadValue(wrong(value), "all or a whole number from 1 to 1024")


def _auto_or_flag(value: object) -> object:
    if value == "auto" or type(value) is bool:
        return value
    raise BadValue(wrong(value), "auto, true or false")


def _limit_or_off(value: object) -> object:
    if value == "off":
        return value
    try:
        seconds = parse_duration(value)
    except BadValue as e:
        raise BadValue(e.problem, f"off, {e.expected}") from e
    if seconds == 0:
        raise BadValue("found 0", "more than 0, or off")
    return seconds


def _columns(value: object) -> object:
    """A name, a mapping from the model's arguments to names, or a list of names of columns of text."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    if not isinstance(value, dict):
        expected = "text that is not empty" if value == "" else "text, or a mapping from the model's arguments to names"
        raise BadValue(wrong(value), expected)
    if not value:
        raise BadValue("found an empty mapping", "the model's arguments, each with an array or a column")
    for argument, name in value.items():
        if not isinstance(name, str) or not name:
            raise BadValue(f"{argument}: {wrong(name)}", "the name of an array or a column")
    try:
        check_paths(list(value))
    except ValueError as e:
        problem, _, expected = str(e).partition("; expected ")
        raise BadValue(problem, expected or "each argument once") from e
    return value


def listed(value: object) -> object:
    """A tuple as a list, for JSON; anything else as it is."""
    return list(value) if isinstance(value, tuple) else value


def or_defaults(value: object) -> object:
    """`true` stands for a mapping without fields, `false` for none."""
    if value is True:
        return {}
    return None if value is False else value


NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAME_EXPECTED = "1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit"
KNOWN_OUTPUTS = (
    *("id", "label", "top1", "top1_label", "top5", "probability", "probabilities", "score", "logits", "embedding"),
    *("token_count", "tokens", "offsets", "token_labels", "token_probabilities"),
)

_NameCheck, _NameSchema = _matching(NAME, NAME_EXPECTED)
_FieldCheck, _FieldSchema = _matching(
    r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*",
    f"{', '.join(KNOWN_OUTPUTS)}, or the name of one of the model's outputs",
)
Whole = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Name = Annotated[str, _NameCheck, _NameSchema]
Device = Annotated[
    str, AfterValidator(parse_device), WithJsonSchema({"type": "string", "pattern": f"^(?:{DEVICE_PATTERN})$"})
]
OutputField = Annotated[str, _FieldCheck, _FieldSchema]
Seconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": DURATION_PATTERN}]}),
]
LimitOrOff = Annotated[
    Literal["off"] | float,
    PlainValidator(_limit_or_off),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "off"},
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": DURATION_PATTERN},
            ]
        }
    ),
]
HeightWidth = Annotated[
    tuple[int, int],
    BeforeValidator(_pair),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 2, "maxItems": 2},
            ]
        }
    ),
]
AutoOrCount = Annotated[
    Literal["auto"] | int,
    PlainValidator(_auto_or_count),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": 1024}]}),
]
AllOrCount = Annotated[
    Literal["all"] | int,
    PlainValidator(_all_or_count),
    WithJsonSchema({"anyOf": [{"const": "all"}, {"type": "integer", "minimum": 1, "maximum": 1024}]}),
]
AutoOrFlag = Annotated[
    Literal["auto"] | bool,
    PlainValidator(_auto_or_flag),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "boolean"}]}),
]
Columns = Annotated[
    str | dict[str, str] | tuple[str, ...],
    PlainValidator(_columns),
    PlainSerializer(listed, return_type=str | dict[str, str] | list[str]),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "object",
                    "propertyNames": {"pattern": f"^(?:{PATH.pattern})$"},
                    "additionalProperties": {"type": "string", "minLength": 1},
                    "minProperties": 1,
                },
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            ]
        }
    ),
]
WeightsFile = Annotated[str, based(paths.weights_file)]
DataPath = Annotated[str, based(input_source)]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class AfterSpec(Frozen):
    """Another job, and the end of it that a job waits for."""

    job: str
    when: Literal["failure", "done"]  # a job that must succeed is written as its name alone


_WHENS = ("success", "failure", "done")


def _after(value: object) -> object:
    if isinstance(value, AfterSpec):
        return value
    if isinstance(value, str):
        return _named(value)
    if not isinstance(value, dict) or set(value) - {"job", "when"} or not isinstance(value.get("job"), str):
        shown = f"{{{', '.join(map(str, value))}}}" if isinstance(value, dict) else show(value)
        raise BadValue(f"found {shown}", f"a job's id or name, or {{job: NAME, when: {' | '.join(_WHENS)}}}")
    job, when = _named(value["job"]), value.get("when", "success")
    if when not in _WHENS:
        raise BadValue(f"when: found {show(when)}", either(_WHENS))
    return job if when == "success" else AfterSpec(job=job, when=when)


def _named(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise BadValue(f"found {show(name)}", NAME_EXPECTED)
    return name


def _after_dumped(value: str | AfterSpec) -> str | dict[str, str]:
    return value if isinstance(value, str) else {"job": value.job, "when": value.when}


AfterItem = Annotated[
    str | AfterSpec,
    PlainValidator(_after),
    PlainSerializer(_after_dumped, return_type=str | dict[str, str]),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": f"^(?:{NAME})$"},
                {
                    "type": "object",
                    "title": "AfterSpec",
                    "description": "Another job, and how it must end before this job starts.",
                    "properties": {
                        "job": {
                            "type": "string",
                            "pattern": f"^(?:{NAME})$",
                            "title": "Job",
                            "description": "Id or name of a job, or id of an array.",
                        },
                        "when": {
                            "enum": list(_WHENS),
                            "default": "success",
                            "title": "When",
                            "description": "How that job must end.",
                        },
                    },
                    "required": ["job"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
