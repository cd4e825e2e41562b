"""Specs that contradict themselves about what comes out of text models, and the exact lines that each must give."""

# ruff: noqa: E501 - each message stands on one line, as it is printed

from __future__ import annotations

from tests.bad_specs import SCORE, BadSpec, edit

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
]
