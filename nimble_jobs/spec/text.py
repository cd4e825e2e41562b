"""The part of a spec that says how texts become tokens, and in which lengths these reach the model."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from nimble_jobs.spec import paths
from nimble_jobs.spec.fields import Frozen, based, listed
from nimble_jobs.spec.units import BadValue, show, wrong

LONGEST = 131_072  # tokens
MOST_BUCKETS = 64
TOKENS_PER_BATCH, TOKENS_ON_CPU = 16_384, 4096  # by default


def _buckets(value: object) -> object:
    if value == "auto":
        return value
    expected = "auto, or a list of lengths in tokens, such as [32, 64, 128]"
    if not isinstance(value, list | tuple):
        raise BadValue(wrong(value), expected)
    if not value:
        raise BadValue("found an empty list", expected)
    if len(value) > MOST_BUCKETS:
        raise BadValue(f"found {len(value)} lengths", f"at most {MOST_BUCKETS}")
    for length in value:
        if type(length) is not int or not 1 <= length <= LONGEST:
            raise BadValue(f"holds {show(length)}", f"whole numbers of tokens from 1 to {LONGEST:,}")
    for before, after in pairwise(value):
        if after <= before:
            raise BadValue(f"{after} follows {before}", "lengths in ascending order, each once")
    return tuple(value)


Buckets = Annotated[
    Literal["auto"] | tuple[int, ...],
    PlainValidator(_buckets),
    PlainSerializer(listed, return_type=str | list[int]),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "auto"},
                {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 1, "maximum": LONGEST},
                    "minItems": 1,
                    "maxItems": MOST_BUCKETS,
                },
            ]
        }
    ),
]


class TextSpec(Frozen):
    """How texts become tokens."""

    tokenizer: Annotated[str, based(lambda text, base: paths.absolute(text, base))] | None = Field(
        default=None,
        min_length=1,
        description="A tokenizer.json, or a folder with one; by default the folder of model.source.",
    )
    max_length: int | None = Field(
        default=None,
        ge=1,
        le=LONGEST,
        description="Most tokens of one record, special tokens included; by default as many as the model takes.",
    )
    truncate: Literal["end", "start", "error"] | None = Field(
        default=None,
        description="Which end of a text that is too long is cut, or error: it is a bad record. Default: as the "
        "tokenizer says; openai-batch: error.",
    )
    prompt: str | None = Field(
        default=None,
        max_length=10_000,
        description="Text put before each record, such as 'query: ' for E5; by default the model's own, if any.",
    )
    prompt_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name of one of the model's own prompts, put before each record, such as query.",
    )
    buckets: Buckets = Field(
        default="auto",
        description="Lengths in tokens to which texts are padded; each has its own schedule. auto: chosen from the "
        "lengths of the input's texts.",
    )
    tokens_per_batch: int | None = Field(
        default=None,
        ge=1,
        le=1 << 24,
        description="Tokens in a batch, padding included: texts padded to N tokens form batches of this number over N. "
        f"Default: {TOKENS_PER_BATCH:,}; scoring on a CPU {TOKENS_ON_CPU:,}.",
    )
