"""From a spec and its texts to a classifier on its device, and a training step for each bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs import buckets as lengths
from nimble_jobs.argument_paths import PART
from nimble_jobs.data import Reader
from nimble_jobs.errors import DataError
from nimble_jobs.models import random_weights
from nimble_jobs.models.build import build
from nimble_jobs.models.classifier import as_classifier, classes_of_head
from nimble_jobs.models.from_transformers import NEW_HEAD
from nimble_jobs.models.packed import Packed
from nimble_jobs.planner.keys.options import options_of
from nimble_jobs.planner.keys.step import code_parts, step_parts
from nimble_jobs.planner.module.limits import Limits
from nimble_jobs.planner.step.request import Shared, StepRequest
from nimble_jobs.plural import count, some
from nimble_jobs.spec import JobSpec, ModelSpec
from nimble_jobs.spec.text import TOKENS_PER_BATCH, TextSpec
from nimble_jobs.workloads.text.setup import TextSetup, set_up
from nimble_jobs.workloads.training.batches.bucketed import Bucket, TextEpochs
from nimble_jobs.workloads.training.batches.lots import HELD_OUT, TRAINED_ON
from nimble_jobs.workloads.training.batches.tokens import TokenSet, token_set
from nimble_jobs.workloads.training.step.losses import loss_name, make_loss
from nimble_jobs.workloads.training.step.setup import Setup, Shaped, begins_with, freeze, in_training, recipe

_MOST_CLASSES = 10_000
_MANY = 1000  # a label from here on is rather an id than a class if few of the numbers below it are labels
_LEAST_USED = 0.1  # of the numbers from 0 to such a label
# As `buckets.choose` takes them, for a long training: a step takes longer to build than a forward pass.
_MOST_BUCKETS, _PRICE = 16, 0.005
# A bucket costs so many steps at least. In eager it costs none; to load and check its stored step takes about as long
# as 27 of MiniLM's on two cores (text.md), and to build one far longer, but what does not pay is not built.
_BUCKET_STEPS = 8.0


@dataclass(frozen=True, kw_only=True)
class TrainTexts:
    """What a training on texts has read."""

    epochs: TextEpochs
    names: tuple[str, ...]  # of the classes
    unused: tuple[int, ...]  # numbers of classes that no label has, if labels are numbers
    head: tuple[str, ...]  # names of the classes of the head that the training begins with, if they are known
    setup: TextSetup
    decides: dict[str, Any]  # what decides the tokens, beside the spec
    cut: int  # texts that lost tokens

    @classmethod
    def read(cls, spec: JobSpec, reader: Reader, held_out: Reader | None) -> TrainTexts:
        """Tokenise everything, and choose the buckets. Raises ModelError for a tokenizer, DataError for texts and
        labels.
        """
        texts, head = set_up(spec), classes_of_head(begins_with(spec))
        tokens = token_set(reader, texts.tokenizer, padding=texts.padding, field="input.source")
        held = None
        if held_out is not None:
            held = token_set(held_out, texts.tokenizer, padding=texts.padding, field=HELD_OUT)
        names = _names(tokens, reader)
        if held is not None and held_out is not None:
            _check_labels(held, held_out, len(names))
        both = [tokens] if held is None else [tokens, held]
        buckets = buckets_of(spec, both, texts)
        epochs = TextEpochs.of(spec, tokens, held, buckets)
        decides = texts.to_json()
        if texts.spec.buckets == "auto":  # a checkpoint counts batches, which other buckets would divide otherwise
            decides["buckets"] = [bucket.tokens for bucket in buckets]
        unused: set[int] = set()
        if reader.label_names is None:
            unused = set(range(len(names))) - set(tokens.labels.tolist())
        return cls(
            epochs=epochs,
            names=names,
            unused=tuple(sorted(unused)),
            head=head,
            setup=texts,
            decides=decides,
            cut=sum(each.cut for each in both),
        )


def _names(tokens: TokenSet, reader: Reader) -> tuple[str, ...]:
    """The names of the classes. Raises DataError for labels of one alone, and for numbers that are far apart."""
    names = reader.label_names
    if names is not None:
        labelled: Sequence[str] = [names[number] for number in np.unique(tokens.labels)]
    else:
        most, different = int(tokens.labels.max()), len(np.unique(tokens.labels))
        record = reader.ids(tokens.positions[tokens.labels == most][:1])[0]
        if most >= _MOST_CLASSES:
            raise DataError(f"{TRAINED_ON}: found the label {most} of record {record}; expected below {_MOST_CLASSES}")
        if most >= _MANY and different < _LEAST_USED * (most + 1):
            raise DataError(
                f"{TRAINED_ON}: found the label {most} of record {record}, although there are {different} different "
                f"labels; expected numbers from 0 with few gaps, numbers below {_MANY}, or names"
            )
        labelled = names = tuple(str(number) for number in range(most + 1))
    if len(labelled) < 2:
        raise DataError(f"{TRAINED_ON}: found {', '.join(map(repr, labelled))} alone; expected at least two classes")
    return names


def _check_labels(held_out: TokenSet, reader: Reader, classes: int) -> None:
    """Raises DataError for a label that is no class of the training."""
    wrong = np.flatnonzero(held_out.labels >= classes)
    if len(wrong):
        record = reader.ids(held_out.positions[wrong[:1]])[0]
        raise DataError(
            f"{HELD_OUT}: found the label {held_out.labels[wrong[0]]} of record {record}; expected 0 to {classes - 1}, "
            "as in the training's records"
        )


def buckets_of(spec: JobSpec, found: Sequence[TokenSet], texts: TextSetup) -> tuple[Bucket, ...]:
    """The buckets for the texts of a training, the first of `found`, and of its validations.

    A batch has `input.batch_size` records, or fewer in buckets where these would be more than `tokens_per_batch`.
    """
    text = texts.spec
    histogram: dict[int, int] = {}
    for tokens in found:
        for length, records in tokens.histogram.items():
            histogram[length] = histogram.get(length, 0) + records
    if text.buckets == "auto":
        chosen = lengths.choose(histogram, limit=texts.limit, price=_price(spec, found[0], text), most=_MOST_BUCKETS)
    else:
        kept = [length for length in text.buckets if length < texts.limit]
        chosen = (*kept, texts.limit)  # the last one holds every text
    return tuple(
        Bucket(
            tokens=length,
            rows=max(1, min(spec.input.batch_size, (text.tokens_per_batch or TOKENS_PER_BATCH) // length)),
            layout=texts.layout(length),
        )
        for length in chosen
    )


def _price(spec: JobSpec, tokens: TokenSet, text: TextSpec) -> float:
    """What a bucket costs, as a share of all tokens: at least as much as `_BUCKET_STEPS` of the training's steps."""
    assert spec.train is not None
    full = int(tokens.lengths.sum()) / (text.tokens_per_batch or TOKENS_PER_BATCH)
    batches = spec.train.epochs * max(len(tokens) / spec.input.batch_size, full)
    return max(_PRICE, _BUCKET_STEPS / batches)


def prepare(spec: JobSpec, read: TrainTexts, device: torch.device, allowed_python: Sequence[Path]) -> Setup:
    """Build and freeze the classifier, with a request for a step of each bucket that has batches.

    The first request is that of the bucket with the most tokens in a batch. Raises ModelError, DataError, OutOfMemory,
    ModelChanged.
    """
    train = spec.train
    assert train is not None
    spec = spec.model_copy(update={"model": as_classifier(read.setup.model(spec.model), len(read.names))})
    code = code_parts(spec.model, train)
    model = begins_with(spec).model_copy(update={"dtype": "fp32"})
    module = build(model, device=str(device), allowed_python=allowed_python, new_head=True)
    freeze(module, train.freeze)
    in_training(module)
    shapes = _shapes(spec, read.epochs, module, code, device, allowed_python)
    setup = Setup(
        spec=spec,
        module=module,
        request=shapes[0].request,
        classes=len(read.names),
        code=code,
        parts=shapes[0].parts,
        limits=Limits(),
        further=tuple(shapes[1:]),
        names=read.names,
        head=_of_head(model, module, read),
        tokens=shapes[0].tokens,
        batches=shapes[0].batches,
    )
    setup.check_code()
    return setup


def _of_head(model: ModelSpec, module: nn.Module, read: TrainTexts) -> str | None:
    """What is to be said of the classifier's head: it is new, or its classes have other names."""
    if random_weights(model) is not None:
        return None  # said of the whole model
    if getattr(module, NEW_HEAD, False):
        return f"the head is new: the weights have none for {count(len(read.names), 'class')}"
    if read.head and read.head != read.names:
        return f"the head is taken over, although its classes are named {some(read.head)}, not {some(read.names)}"
    return None


def _shapes(
    spec: JobSpec,
    epochs: TextEpochs,
    module: nn.Module,
    code: Mapping[str, str],
    device: torch.device,
    allowed_python: Sequence[Path],
) -> list[Shaped]:
    train, tokens, shared = spec.train, epochs.tokens, Shared()
    assert train is not None
    largest: dict[int, np.ndarray] = {}  # of each bucket, the records of its largest batch
    groups = epochs.groups(1)
    batches = Counter(group.bucket for group in groups)  # the same in every epoch
    for group in groups:
        if len(group.records) > len(largest.get(group.bucket, ())):
            largest[group.bucket] = group.records
    options = replace(options_of(spec.schedule), layout="given")  # weights of several schedules lie in one layout
    found = []
    for place in sorted(largest, reverse=True):
        bucket, records = epochs.buckets[place], largest[place]
        packed = Packed(module, bucket.layout, torch.float32, device)
        x = torch.from_numpy(tokens.rows(records, bucket.layout, bucket.tokens)).to(device)
        y = torch.from_numpy(tokens.labels[records]).to(device)
        request = StepRequest(
            module=packed,
            x=x,
            y=y,
            loss=make_loss(train, allowed_python),
            loss_name=loss_name(train),
            optimizer=recipe(packed, train.optimizer),
            clip_norm=train.clip_norm,
            precision=spec.model.dtype,
            accumulate=train.accumulate,
            options=options,
            tolerance=spec.schedule.tolerance,
            shared=shared,
        )
        parts = step_parts(code, train, spec.schedule, x, y, device)
        parts |= {"schedule.layout": "given"} | {PART + path: said for path, said in bucket.layout.words.items()}
        total = train.epochs * batches[place]
        found.append(Shaped(request=request, parts=parts, tokens=bucket.tokens, batches=total))
    return found
