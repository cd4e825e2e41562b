"""Specs with mistakes about several devices, and the exact lines that each must give."""

# ruff: noqa: E501 - each message stands on one line, as it is printed

from __future__ import annotations

from tests.bad_specs import FINETUNE, BadSpec, edit

BAD_DEVICES = (
    BadSpec(
        name="no device at all",
        text=edit(("device: auto", "gpus: 0")),
        messages=("{file}:15: run.gpus: found 0; expected all or a whole number from 1 to 1024",),
    ),
    BadSpec(
        name="a word for a number of devices",
        text=edit(("device: auto", "gpus: some")),
        messages=("{file}:15: run.gpus: found 'some'; expected all or a whole number from 1 to 1024",),
    ),
    BadSpec(
        name="several devices, one of them named",
        text=edit(("device: auto", "device: cuda:1\n  gpus: 2")),
        messages=(
            "{file}:16: run.gpus: found 2, but run.device is cuda:1, which is one device; expected 1, or run.device: auto, cpu or cuda",
        ),
    ),
    BadSpec(
        name="shards that fail alone on one device",
        text=edit(("device: auto", "max_failed_shards: 2")),
        messages=(
            "{file}:15: run.max_failed_shards: found 2, but run.gpus is 1: shards fail alone only if several devices score; expected 0, or more than one in run.gpus",
        ),
    ),
    BadSpec(
        name="fewer than no failed shards",
        text=edit(("device: auto", "gpus: all\n  max_failed_shards: -1")),
        messages=("{file}:16: run.max_failed_shards: found -1; expected at least 0",),
    ),
    BadSpec(
        name="a fine-tuning on several devices",
        text=FINETUNE.replace("device: auto", "gpus: all"),
        messages=(
            "{file}:15: run.gpus: found all, but kind is finetune: how a training divides its batches must not depend on what is free; expected a whole number",
        ),
    ),
    BadSpec(
        name="batches that devices cannot share equally",
        text=FINETUNE.replace("device: auto", "gpus: 3").replace("batch_size: 64", "batch_size: 32"),
        messages=(
            "{file}:15: run.gpus: found 3, but input.batch_size is 32: each device takes an equal share, of at least 4; expected a divisor of 32 that is at most 8",
        ),
    ),
    BadSpec(
        name="shares that are too small",
        text=FINETUNE.replace("device: auto", "gpus: 4").replace("batch_size: 64", "batch_size: 8"),
        messages=(
            "{file}:15: run.gpus: found 4, but input.batch_size is 8: each device takes an equal share, of at least 4; expected a divisor of 8 that is at most 2",
        ),
    ),
    BadSpec(
        name="batches that no two devices can share",
        text=FINETUNE.replace("device: auto", "gpus: 2").replace("batch_size: 64", "batch_size: 7"),
        messages=(
            "{file}:15: run.gpus: found 2, but input.batch_size is 7: each device takes an equal share, of at least 4; expected 1, or another input.batch_size",
        ),
    ),
    BadSpec(
        name="a fine-tuning on several devices, one of which is named",
        text=FINETUNE.replace("device: auto", "gpus: 2\n  device: cuda:1"),
        messages=(
            "{file}:15: run.gpus: found 2, but run.device is cuda:1, which is one device; expected 1, or run.device: auto, cpu or cuda",
        ),
    ),
    BadSpec(
        name="failed shards of a fine-tuning",
        text=FINETUNE.replace("device: auto", "gpus: 2\n  max_failed_shards: 1"),
        messages=("{file}:16: run.max_failed_shards: found 1, but kind is finetune; expected 0",),
    ),
)
