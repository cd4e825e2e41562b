"""A first look at what a spec names: its input, its device and its model, and whether they fit together.

Nothing is built or trained, and no weights are made: the model is on the meta device, which knows shapes and types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs.data import Reader, open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import DataError, ModelError, UsageError, first_line
from nimble_jobs.models.build import shapes_only
from nimble_jobs.models.pictures import with_model_transform
from nimble_jobs.models.source import source_of
from nimble_jobs.spec import JobSpec
from nimble_jobs.spec.formats import TEXTS
from nimble_jobs.spec.pooling_rules import leaves_out_head, pools
from nimble_jobs.workloads import decode as decodes
from nimble_jobs.workloads.first_batch import of_meta, tried
from nimble_jobs.workloads.heads import heads_of
from nimble_jobs.workloads.text.setup import ColumnOfText, TextSetup, set_up
from nimble_jobs.workloads.training.batches.augment import Augment
from nimble_jobs.workloads.training.step.losses import targets


@dataclass(kw_only=True)
class Look:
    """Facts about the spec, by name, and what is wrong with it."""

    found: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def look(spec: JobSpec, allowed_python: Sequence[Path] = ()) -> Look:
    """Open the input, read one record, and compare it with device and model. A user's mistakes become `problems`."""
    seen = Look()
    spec = with_model_transform(spec)
    reader: Reader | None = None
    column = ColumnOfText(spec)
    try:
        wanted = targets(spec.train.loss) if spec.train is not None else "classes"
        reader = open_reader(spec.input, targets=wanted, tokens=column)
        _input(reader, seen)
        if spec.train is not None:
            Augment(spec.train.augment, reader.signature, seed=spec.model.seed, decodes=reader.decodes)
    except (DataError, ModelError) as e:
        seen.problems.append(str(e))
    try:
        device = devices.resolve(spec.run.device)
        seen.found["device"] = devices.describe(device)
        if reader is not None:
            decodes.check(spec, reader, device)
    except UsageError as e:
        seen.problems.append(str(e))
    trouble, setup = None, column.setup
    if spec.input.format in TEXTS:
        try:
            setup = set_up(spec)
        except ModelError as e:
            trouble = str(e)
    try:
        own = spec if setup is None else spec.model_copy(update={"model": setup.model(spec.model)})
        _model(own, allowed_python, reader, setup if spec.kind == "score" else None, seen)
    except ModelError as e:
        trouble = str(e)
    if trouble is not None:
        seen.problems.append(trouble)
    elif setup is not None and setup is not column.setup:
        seen.found["tokens"] = f"at most {setup.limit:,} per record; the vocabulary has {setup.tokenizer.vocabulary:,}"
    if reader is not None:
        reader.close()
    return seen


def _input(reader: Reader, seen: Look) -> None:
    signature = reader.signature
    if signature.dtype == "text":
        seen.found |= {"records": reader.total, "record": "text"}
        (texts,) = reader.texts([(0, 1)])
        seen.found["first"] = f"{reader.id(0)} ({reader.place(0)})" + "".join(f": {why}" for why in texts.bad.values())
        return
    record = f"{signature.dtype} {list(signature.shape)}" if reader.packing is None else reader.packing.text
    seen.found |= {"records": reader.total, "record": record}
    if reader.label_names is not None:
        seen.found["classes"] = len(reader.label_names)
    first = reader.take(np.array([0]))
    seen.found["first"] = f"{reader.id(0)} ({reader.place(0)})"
    if first.bad:
        seen.found["first"] += f": {first.bad[0].reason}"
    elif first.labels is not None:
        seen.found["label"] = first.labels[0].tolist()


def _model(
    spec: JobSpec, allowed_python: Sequence[Path], reader: Reader | None, setup: TextSetup | None, seen: Look
) -> None:
    if source_of(spec.model).scheme == "exported":
        seen.found["shapes"] = "not checked: an exported program is checked when it runs"
        return
    try:
        module = shapes_only(spec.model, allowed_python=allowed_python, headless=leaves_out_head(spec))
    except ModelError as e:
        if not of_meta(e):
            raise
        seen.found["shapes"] = f"not checked: the model cannot be made without weights: {first_line(e)}"
        return
    seen.found["parameters"] = sum(p.numel() for p in module.parameters())
    if reader is not None:
        _shapes(spec, module, reader, setup, seen)


def _shapes(spec: JobSpec, module: nn.Module, reader: Reader, setup: TextSetup | None, seen: Look) -> None:
    call = tried(spec, module, reader, setup)
    if call.problem is not None:
        seen.problems.append(call.problem)
        return
    texts, pooled = spec.input.format in TEXTS, pools(spec)  # pooling works on another module than this
    if call.outputs is not None and not (texts and pooled):
        shapes = {name: "" if texts else f" {list(t.shape)}" for name, t in call.outputs.items()}
        seen.found["outputs"] = ", ".join(f"{name}{shape}" for name, shape in shapes.items())
    elif texts:
        seen.found["shapes"] = "not checked: the shapes of texts are known only once they are tokenized"
    else:
        seen.found["shapes"] = f"not checked: {call.unchecked}"
    if call.outputs is not None and spec.kind == "score" and not pooled:
        _fields(spec, call.outputs, seen)


def _fields(spec: JobSpec, outputs: Mapping[str, torch.Tensor], seen: Look) -> None:
    """Whether the output's fields can be made of the model's outputs, with a row for each record.

    Not `embedding`, which is taken from inside of the model.
    """
    heads = heads_of(spec)
    try:
        made = replace(heads, fields=tuple(name for name in heads.fields if name != "embedding"))(outputs)
    except ModelError as e:
        seen.problems.append(str(e))
        return
    for name, tensor in made.items():
        if list(tensor.shape[:1]) != [spec.input.batch_size]:
            seen.problems.append(
                f"output.fields: {name!r} has shape {list(tensor.shape)} for {spec.input.batch_size} records; "
                "expected one row per record"
            )
