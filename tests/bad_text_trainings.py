"""Specs of trainings on texts that contradict themselves, and the exact lines that each must give."""

# ruff: noqa: E501 - each message stands on one line, as it is printed

from __future__ import annotations

from tests.bad_specs import BadSpec

_TRAIN = """\
version: 1
name: reviews
kind: finetune
model: {source: "transformers:bert"}
input:
  source: reviews.parquet
  format: text
  fields: {x: body, label: stars}
  batch_size: 16
  text: {max_length: 64}
output:
  path: ../out/reviews
train:
  epochs: 2
"""


def changed(old: str, new: str) -> str:
    assert old in _TRAIN
    return _TRAIN.replace(old, new)


def train(*lines: str) -> str:
    """With more lines in the section `train`, from line 15 on."""
    return _TRAIN + "".join(f"  {line}\n" for line in lines)


TRAINING_ON_TEXTS = _TRAIN
BAD_TEXT_TRAININGS = [
    BadSpec(
        name="texts without labels",
        text=changed(", label: stars", ""),
        messages=(
            "{file}:8: input.fields.label: missing; expected the array or column of labels, because kind is finetune",
        ),
    ),
    BadSpec(
        name="labels that are the texts",
        text=changed("label: stars", "label: body"),
        messages=("{file}:8: input.fields.label: 'body' is given twice; expected different arrays or columns",),
    ),
    BadSpec(
        name="a training on texts over several devices",
        text=changed("train:", "run: {gpus: 2}\ntrain:"),
        messages=("{file}:13: run.gpus: found 2, which is not supported yet for trainings on texts; expected 1",),
    ),
    BadSpec(
        name="a loss for numbers over texts",
        text=train("loss: mse"),
        messages=("{file}:15: train.loss: found 'mse', but input.format is text; expected cross_entropy",),
    ),
    BadSpec(
        name="texts that are flipped",
        text=train("augment: {flip: horizontal}"),
        messages=("{file}:15: train.augment.flip: not allowed if input.format is text; expected images",),
    ),
    BadSpec(
        name="texts that are cropped",
        text=train("augment: {crop_padding: 4}"),
        messages=("{file}:15: train.augment.crop_padding: not allowed if input.format is text; expected images",),
    ),
    BadSpec(
        name="a number of classes beside labels",
        text=changed('source: "transformers:bert"', 'source: "transformers:bert", args: {num_labels: 3}'),
        messages=(
            "{file}:4: model.args.num_labels: not allowed if kind is finetune and input.format is text; expected none, because it follows from the labels",
        ),
    ),
    BadSpec(
        name="names of classes beside labels",
        text=changed('source: "transformers:bert"', 'source: "transformers:bert", args: {id2label: {"0": "bad"}}'),
        messages=(
            "{file}:4: model.args.id2label: not allowed if kind is finetune and input.format is text; expected none, because it follows from the labels",
        ),
    ),
    BadSpec(
        name="another architecture than a classifier",
        text=changed(
            'source: "transformers:bert"', 'source: "transformers:bert", args: {architectures: [BertForMaskedLM]}'
        ),
        messages=(
            "{file}:4: model.args.architectures: not allowed if kind is finetune and input.format is text; expected none, because it follows from the labels",
        ),
    ),
    BadSpec(
        name="batches of one text",
        text=changed("max_length: 64", "max_length: 64, tokens_per_batch: 100"),
        messages=(
            "{file}:10: input.text.tokens_per_batch: found 100, which is one text of 64 tokens; expected at least 128, for batches of two",
        ),
    ),
    BadSpec(
        name="F1 without held-out texts",
        text=train("checkpoint: {best: val_f1}"),
        messages=(
            "{file}:15: train.checkpoint.best: val_f1 needs validation data; expected train.validation, or another metric",
        ),
    ),
    BadSpec(
        name="stopping by F1 without held-out texts",
        text=train("early_stopping: {metric: val_f1, patience: 1}"),
        messages=(
            "{file}:15: train.early_stopping.metric: val_f1 needs validation data; expected train.validation, or another metric",
        ),
    ),
    BadSpec(
        name="columns of a result over a training on texts",
        text=changed("  path: ../out/reviews\n", "  path: ../out/reviews\n  fields: [id, top1]\n"),
        messages=("{file}:13: output.fields: not allowed if kind is finetune; expected kind: score, or no fields",),
    ),
    BadSpec(
        name="pictures' mean over texts of a training",
        text=changed("  batch_size: 16\n", "  batch_size: 16\n  transform: {resize: 32}\n"),
        messages=("{file}:10: input.transform.resize: not allowed if input.format is text; expected none",),
    ),
]
