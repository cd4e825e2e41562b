"""Specs of texts with mistakes, and the exact lines that each must give."""

# ruff: noqa: E501 - each message stands on one line, as it is printed

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TEXTS = """\
version: 1
name: reviews
kind: score
model:
  source: transformers:bert
input:
  source: reviews.parquet
  format: text
  fields: {x: body, id: id}
  text: {max_length: 64}
output:
  path: ../out/reviews
  fields: [id, logits]
"""


@dataclass(frozen=True, kw_only=True)
class BadText:
    """One spec: replacements in TEXTS, and the lines that it gives, below `job.yaml:`."""

    name: str
    edits: tuple[tuple[str, str], ...]
    messages: tuple[str, ...]

    def write(self, folder: Path) -> Path:
        lay_out(folder)
        text = TEXTS
        for old, new in self.edits:
            assert old in text
            text = text.replace(old, new)
        path = folder / "job.yaml"
        path.write_text(text)
        return path

    def lines(self, path: Path) -> list[str]:
        return [f"{path}:{m.replace('{dir}', str(path.parent))}" for m in self.messages]


def lay_out(folder: Path) -> None:
    """The files that the specs name. They are looked at, and not read."""
    for name in ("reviews.parquet", "lines.txt", "digits.npz", "net.py", "empty/config.json", "wide/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name, config in (
        ("bert", {"model_type": "bert", "max_position_embeddings": 128, "vocab_size": 100}),
        ("roberta", {"model_type": "roberta", "max_position_embeddings": 130, "pad_token_id": 1}),
    ):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "tokenizer.json").write_text("{}")


def text(
    old: str, new: str, *messages: str, name: str | None = None, more: tuple[tuple[str, str], ...] = ()
) -> BadText:
    return BadText(name=name or new.strip(), edits=((old, new), *more), messages=messages)


FORMAT, LIMIT, FIELDS = "  format: text\n", "{max_length: 64}", "fields: {x: body, id: id}"
_BUCKETS = "expected auto, or a list of lengths in tokens, such as [32, 64, 128]"

BAD_TEXTS = [
    text(
        FORMAT,
        FORMAT + "  batch_size: 64\n",
        "9: input.batch_size: found 64, but input.format is text, whose batches are counted in tokens; expected input.text.tokens_per_batch",
    ),
    text(
        FORMAT,
        FORMAT + "  transform: {resize: 32, scale: 2}\n",
        "9: input.transform.resize: not allowed if input.format is text; expected none",
        "9: input.transform.scale: not allowed if input.format is text; expected none",
    ),
    text(
        FORMAT,
        FORMAT + "  decode: gpu\n",
        "9: input.decode: found gpu, but input.format is text, which holds no pictures; expected no decode",
    ),
    text(
        FORMAT, FORMAT + "  allow_nan: true\n", "9: input.allow_nan: not allowed if input.format is text; expected none"
    ),
    text(
        "format: text",
        "format: parquet",
        "10: input.text: not allowed if input.format is parquet; expected format: text",
    ),
    text(
        "format: text\n  fields: {x: body, id: id}\n  text: {max_length: 64}",
        "format: parquet\n  fields: {x: {pixel_values: image, input_ids: body}, id: id}\n"
        "  text: {max_length: 64, buckets: [32, 64], tokens_per_batch: 640}",
        "10: input.text.buckets: not allowed if input.fields.x is a mapping, whose texts all have one length; expected max_length alone",
        "10: input.text.tokens_per_batch: not allowed if input.fields.x is a mapping, whose texts all have one length; expected input.batch_size",
    ),
    text(
        "format: text\n  fields: {x: body, id: id}",
        "format: parquet\n  fields: {x: {pixel_values: image, tokens: body}, id: id}",
        "10: input.text: not allowed if input.format is parquet; expected format: text",
    ),
    text(
        LIMIT,
        "{max_length: 129}",
        "10: input.text.max_length: found 129, but the model has 128 positions; expected at most 128",
    ),
    text(
        LIMIT,
        "{max_length: 129} ",
        "10: input.text.max_length: found 129, but the model has 128 positions; expected at most 128",
        name="positions behind the padding's",
        more=(("transformers:bert", "transformers:roberta"),),
    ),
    text(LIMIT, "{max_length: 0}", "10: input.text.max_length: found 0; expected at least 1"),
    text(LIMIT, "{max_length: many}", "10: input.text.max_length: found 'many'; expected a whole number"),
    text(LIMIT, "{max_lenght: 64}", "10: input.text.max_lenght: unknown field, did you mean max_length?"),
    text(LIMIT, "{truncate: middle}", "10: input.text.truncate: found 'middle'; expected end, start or error"),
    text(LIMIT, "{buckets: none}", f"10: input.text.buckets: found 'none'; {_BUCKETS}"),
    text(LIMIT, "{buckets: []}", f"10: input.text.buckets: found an empty list; {_BUCKETS}"),
    text(LIMIT, "{buckets: 64}", f"10: input.text.buckets: found 64; {_BUCKETS}"),
    text(
        LIMIT,
        "{buckets: [64, 32]}",
        "10: input.text.buckets: 32 follows 64; expected lengths in ascending order, each once",
    ),
    text(
        LIMIT,
        "{buckets: [32, 32]}",
        "10: input.text.buckets: 32 follows 32; expected lengths in ascending order, each once",
    ),
    text(
        LIMIT,
        "{buckets: [0, 32]}",
        "10: input.text.buckets: holds 0; expected whole numbers of tokens from 1 to 131,072",
    ),
    text(
        LIMIT,
        "{buckets: [32, long]}",
        "10: input.text.buckets: holds 'long'; expected whole numbers of tokens from 1 to 131,072",
    ),
    text(
        LIMIT,
        "{max_length: 64, buckets: [32, 96]}",
        "10: input.text.buckets: 96 is more than input.text.max_length 64; expected lengths up to 64",
    ),
    text(
        LIMIT,
        "{buckets: [32, 192]}",
        "10: input.text.buckets: 192 is more than the 128 tokens that the model takes; expected lengths up to 128",
    ),
    text(
        LIMIT,
        "{max_length: 64, tokens_per_batch: 32}",
        "10: input.text.tokens_per_batch: found 32, but a record may have 64 tokens; expected at least 64",
    ),
    text(LIMIT, "{tokens_per_batch: 0}", "10: input.text.tokens_per_batch: found 0; expected at least 1"),
    text(LIMIT, "{prompt: 7}", "10: input.text.prompt: found 7; expected text, in quotes"),
    text(
        LIMIT,
        "{tokenizer: none.json}",
        "10: input.text.tokenizer: no file or folder {dir}/none.json; expected a tokenizer.json, or a folder with one",
    ),
    text(
        LIMIT,
        "{tokenizer: net.py}",
        "10: input.text.tokenizer: found 'net.py'; expected a tokenizer.json, or a folder with one",
    ),
    text(
        LIMIT,
        "{tokenizer: empty}",
        "10: input.text.tokenizer: {dir}/empty holds no tokenizer; expected a folder with a tokenizer.json",
    ),
    text(
        FIELDS,
        "fields: {x: [a, b, c]}",
        "9: input.fields.x: found 3 columns; expected one column, or two that make a pair",
    ),
    text(FIELDS, "fields: {x: [a, a]}", "9: input.fields.x: 'a' is given twice; expected two different columns"),
    text(
        FIELDS,
        "fields: {x: [a, id], id: id}",
        "9: input.fields.id: 'id' is given twice; expected different arrays or columns",
    ),
    text(
        FIELDS,
        "fields: {x: {input_ids: a}}",
        "9: input.fields.x: found a mapping, but input.format is text; expected one column, or a list of two",
    ),
    text(
        FIELDS,
        "fields: {x: [a, b]}",
        "10: input.text.prompt: not allowed if input.fields.x names two columns; expected no prompt",
        name="a prompt for pairs",
        more=((LIMIT, "{prompt: 'query: '}"),),
    ),
    text(
        FIELDS,
        "fields: {x: [a, b]}",
        "10: input.text.prompt_name: not allowed if input.fields.x names two columns; expected no prompt",
        "10: input.text.prompt_name: found 'query'; expected input.text.prompt, with the prompt's text, because the model names no prompts",
        name="the name of a prompt for pairs",
        more=((LIMIT, "{prompt_name: query}"),),
    ),
    text(
        "reviews.parquet",
        "lines.txt",
        "9: input.fields.x: found 'body', but a .txt file has no columns; expected none: each line is a record, and its number is the id",
        "9: input.fields.id: found 'id', but a .txt file has no columns; expected none: each line is a record, and its number is the id",
    ),
    text(
        "reviews.parquet",
        "digits.npz",
        "7: input.source: 'digits.npz' is not text; expected .parquet or .pq or .csv or .jsonl or .ndjson or .txt or .gz",
    ),
    text(
        "transformers:bert",
        "transformers:empty",
        "5: input.text.tokenizer: missing, and {dir}/empty holds no tokenizer; expected a tokenizer.json, or a folder with one",
    ),
    text(
        "transformers:bert",
        "torchvision:resnet18",
        "8: input.format: found text, but torchvision has no models that take tokens; expected a model.source of transformers, python or exported",
    ),
    text(
        "transformers:bert",
        "python:net.py:make",
        "10: input.text.tokenizer: missing, and python models bring no tokenizer; expected a tokenizer.json, or a folder with one",
    ),
    text(
        "  text: {max_length: 64}\n",
        "",
        "8: input.text.tokenizer: missing, and python models bring no tokenizer; expected a tokenizer.json, or a folder with one",
        "8: input.text.max_length: missing, and python models do not say how many tokens they take; expected a number of tokens",
        name="a python model without settings",
        more=(("transformers:bert", "python:net.py:make"),),
    ),
]
