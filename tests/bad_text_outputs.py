"""Specs that contradict themselves about what comes out of text models, and the exact lines that each must give."""

# ruff: noqa: E501 - each message stands on one line, as it is printed

from __future__ import annotations

from tests.bad_specs import SCORE, BadSpec, edit

TEXTS = """\
version: 1
name: texts
kind: score
model:
  source: transformers:encoder
input:
  source: texts.jsonl
  format: text
  fields: {x: body}
output:
  path: ../out/texts
  fields: [id, embedding]
  pooling: mean
"""
BATCH = (
    TEXTS.replace("format: text", "format: openai-batch")
    .replace("  fields: {x: body}\n", "")
    .replace("output:\n", "output:\n  format: openai-batch\n")
)
OUTPUT = "  path: ../out/digits-score\n"


def output(*lines: str, base: str = SCORE) -> str:
    """The spec with more lines in its section `output`, from line 14 on."""
    return edit((OUTPUT, OUTPUT + "".join(f"  {line}\n" for line in lines)), base=base)


BAD_TEXT_OUTPUTS = [
    BadSpec(
        name="pooling without an embedding",
        text=output("pooling: mean"),
        messages=(
            "{file}:14: output.pooling: found mean, but output.fields has no embedding; expected embedding in output.fields, or no pooling",
        ),
    ),
    BadSpec(
        name="normalisation without an embedding",
        text=output("normalize: false"),
        messages=(
            "{file}:14: output.normalize: found false, but output.fields has no embedding; expected embedding in output.fields, or no normalize",
        ),
    ),
    BadSpec(
        name="pooling of records without tokens",
        text=output("fields: [embedding]", "pooling: cls", "normalize: true"),
        messages=(
            "{file}:15: output.pooling: found cls, but the records have no attention_mask, as input.format is npz; expected format: text, or an attention_mask in input.fields.x",
            "{file}:16: output.normalize: found true, but the records have no attention_mask, as input.format is npz; expected format: text, or an attention_mask in input.fields.x",
        ),
    ),
    BadSpec(
        name="an unknown way to pool",
        text=output("fields: [embedding]", "pooling: median"),
        messages=("{file}:15: output.pooling: found 'median'; expected mean, cls, last or max",),
    ),
    BadSpec(
        name="two ways to pool",
        text=output("fields: [embedding]", "pooling: [mean, cls]"),
        messages=("{file}:15: output.pooling: found a list; expected mean, cls, last or max",),
    ),
    BadSpec(
        name="normalisation by a word",
        text=output("fields: [embedding]", "normalize: l2"),
        messages=("{file}:15: output.normalize: found 'l2'; expected true or false",),
    ),
    BadSpec(
        name="names of classes that a model does not have",
        text=output("fields: [id, top1_label]"),
        messages=(
            "{file}:14: output.fields[1]: top1_label needs names of classes, and a torchvision model has none; expected top1, or a transformers model, whose config.json has them",
        ),
    ),
    BadSpec(
        name="no way to pool, and a model that does not say it",
        text=edit(("  pooling: mean\n", ""), base=TEXTS),
        messages=(
            "{file}:12: output.pooling: missing, and {dir}/encoder has no modules.json that says how to pool; expected mean, cls, last or max",
        ),
    ),
    BadSpec(
        name="no way to pool, and a model that cannot say it",
        text=edit(
            ("  pooling: mean\n", ""),
            ("transformers:encoder", "python:own.py:make"),
            ("{x: body}", "{x: body}\n  text: {tokenizer: encoder, max_length: 9}"),
            base=TEXTS,
        ),
        messages=(
            "{file}:13: output.pooling: missing, and a python model does not say how its tokens are pooled; expected mean, cls, last or max",
        ),
    ),
    BadSpec(
        name="classes of a model that is pooled",
        text=edit(("[id, embedding]", "[id, embedding, top1, probabilities, token_count]"), base=TEXTS),
        messages=(
            "{file}:12: output.fields[2]: top1 comes from the model's head, which is left out to pool tokens into embedding; expected one job for embedding, and another one for top1",
            "{file}:12: output.fields[3]: probabilities comes from the model's head, which is left out to pool tokens into embedding; expected one job for embedding, and another one for probabilities",
        ),
    ),
    BadSpec(
        name="lists of tokens in npy",
        text=edit(("[id, embedding]\n  pooling: mean", "[id, tokens, offsets]\n  format: npy"), base=TEXTS),
        messages=(
            "{file}:12: output.fields[1]: tokens is a list whose length differs from text to text, which npy cannot hold; expected format: parquet or jsonl",
            "{file}:12: output.fields[2]: offsets is a list whose length differs from text to text, which npy cannot hold; expected format: parquet or jsonl",
        ),
    ),
    BadSpec(
        name="a prompt and the name of one",
        text=edit(("{x: body}", "{x: body}\n  text: {prompt: 'query: ', prompt_name: query}"), base=TEXTS),
        messages=(
            "{file}:10: input.text.prompt_name: found 'query', but input.text.prompt is given too; expected one of them",
        ),
    ),
    BadSpec(
        name="the name of a prompt that the model does not have",
        text=edit(
            ("{x: body}", "{x: body}\n  text: {prompt_name: qwery}"),
            ("transformers:encoder", "transformers:sentence"),
            base=TEXTS,
        ),
        messages=("{file}:10: input.text.prompt_name: found 'qwery'; expected one of query, passage",),
    ),
    BadSpec(
        name="the name of a prompt for a model without prompts",
        text=edit(("{x: body}", "{x: body}\n  text: {prompt_name: query}"), base=TEXTS),
        messages=(
            "{file}:10: input.text.prompt_name: found 'query'; expected input.text.prompt, with the prompt's text, because the model names no prompts",
        ),
    ),
    BadSpec(
        name="the name of a prompt for a model that cannot have any",
        text=edit(
            ("{x: body}", "{x: body}\n  text: {prompt_name: query, tokenizer: encoder, max_length: 9}"),
            ("transformers:encoder", "python:own.py:make"),
            base=TEXTS,
        ),
        messages=(
            "{file}:10: input.text.prompt_name: found 'query', but a python model has no prompts of its own; expected input.text.prompt, with the prompt's text",
        ),
    ),
    BadSpec(
        name="answers to what are no requests",
        text=edit(("  pooling: mean\n", "  pooling: mean\n  format: openai-batch\n"), base=TEXTS),
        messages=(
            "{file}:14: output.format: found openai-batch, but input.format is text, which holds no requests; expected parquet, jsonl or npy",
        ),
    ),
    BadSpec(
        name="answers of other fields",
        text=edit(("  fields: [id, embedding]\n  pooling: mean\n", "  fields: [id, top1]\n"), base=BATCH),
        messages=(
            "{file}:12: output.fields: found id, top1, but output.format is openai-batch; expected [id, embedding]",
        ),
    ),
    BadSpec(
        name="columns of requests",
        text=edit(
            ("format: openai-batch\noutput", "format: openai-batch\n  fields: {x: body, id: custom_id}\noutput"),
            base=BATCH,
        ),
        messages=(
            "{file}:9: input.fields.x: not allowed if input.format is openai-batch; expected none",
            "{file}:9: input.fields.id: not allowed if input.format is openai-batch; expected none",
        ),
    ),
    BadSpec(
        name="new batch files only",
        text=edit(("format: openai-batch\noutput", "format: openai-batch\n  only_new: true\noutput"), base=BATCH),
        messages=(
            "{file}:9: input.only_new: not allowed if input.format is openai-batch, which is one file; expected none",
        ),
    ),
    BadSpec(
        name="requests to a model of pictures",
        text=edit(("transformers:encoder", "torchvision:resnet18"), base=BATCH),
        messages=(
            "{file}:8: input.format: found openai-batch, but torchvision has no models that take tokens; expected a model.source of transformers, python or exported",
        ),
    ),
    BadSpec(
        name="a batch file of another suffix",
        text=edit(("texts.jsonl", "texts.parquet"), base=BATCH),
        messages=("{file}:7: input.source: 'texts.parquet' is not openai-batch; expected .jsonl or .ndjson or .gz",),
    ),
    BadSpec(
        name="batches of a number of records",
        text=edit(("format: openai-batch\noutput", "format: openai-batch\n  batch_size: 8\noutput"), base=BATCH),
        messages=(
            "{file}:9: input.batch_size: found 8, but input.format is openai-batch, whose batches are counted in tokens; expected input.text.tokens_per_batch",
        ),
    ),
]
