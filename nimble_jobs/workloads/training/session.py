"""One attempt at a training: its data, opened, and its place on the disk, claimed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nimble_jobs.data import Reader, Staging, open_reader
from nimble_jobs.data.object_inputs import Origin
from nimble_jobs.errors import DataError
from nimble_jobs.models import random_weights
from nimble_jobs.models.classes import Classes, classes_of
from nimble_jobs.models.classifier import classes_of_head
from nimble_jobs.plural import count, plural, some
from nimble_jobs.spec import JobSpec
from nimble_jobs.workloads import decode as decodes
from nimble_jobs.workloads.basis import as_asked, basis_parts, digest
from nimble_jobs.workloads.context import JobContext
from nimble_jobs.workloads.training.batches.epochs import Sampler
from nimble_jobs.workloads.training.batches.intake import Data
from nimble_jobs.workloads.training.batches.lots import HELD_OUT
from nimble_jobs.workloads.training.keep.checkpoint import Checkpoints
from nimble_jobs.workloads.training.keep.resume import Search
from nimble_jobs.workloads.training.step.losses import targets
from nimble_jobs.workloads.training.step.setup import begins_with, first_batch
from nimble_jobs.workloads.training.step.texts import TrainTexts

_FEW = 8  # records that are read together to find a good one


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What each rank of an attempt has: its data, opened."""

    context: JobContext
    device: torch.device
    data: Data
    began: float  # time.perf_counter() at its start
    classes: tuple[str, ...] | None  # names in the order of the head that the training begins with, if it decides
    texts: TrainTexts | None = None  # tokens of all records, if they are texts
    why_not: str | None = None  # the device does not decode pictures

    @property
    def spec(self) -> JobSpec:
        return self.context.spec


@dataclass(frozen=True, kw_only=True)
class Session(Reading):
    """What stays the same during an attempt, for all of its phases."""

    staging: Staging
    search: Search  # for the checkpoint to go on from

    @property
    def checkpoints(self) -> Checkpoints:
        return self.search.checkpoints

    def sheet(self, environment: dict[str, str]) -> dict[str, Any]:
        """What all checkpoints of this attempt say of it."""
        job = self.context.job
        return {
            "basis": self.search.basis,
            "parts": self.search.parts,
            "spec": as_asked(self.spec, self.data.reader, self.data.held_out),
            "job": {"id": job.id, "attempt": job.attempt},
            "environment": environment,
        }


@contextmanager
def read(context: JobContext, device: torch.device) -> Iterator[Reading]:
    """Open the data of a job. Raises DataError, and UsageError for a device that cannot decode."""
    began, spec = time.perf_counter(), context.spec
    assert spec.train is not None
    with ExitStack() as readers:
        origin = context.origins.get(spec.input.source)
        reader = readers.enter_context(open_reader(spec.input, targets=targets(spec.train.loss), origin=origin))
        classes, of_head = number_as_head(spec, reader)
        if of_head is not None:
            context.event("head", of_head, {})
        held_out = None
        if spec.train.validation is not None:
            source = spec.train.validation.source
            origin = context.origins.get(source)
            held_out = readers.enter_context(open_held_out(spec, source, reader, origin=origin))
            _tell_overlap(context, reader, held_out)
        if not reader.has_labels:
            raise DataError("input.fields.label: fine-tuning needs labels; the input has none")
        texts = None
        if spec.input.format == "text":
            context.report(phase="tokenize")
            texts = TrainTexts.read(spec, reader, held_out)
            _tell(context, texts)
        else:
            for note in reader.notes(shuffled=True):
                context.event("input", note, {})
        decode, why_not = decodes.choose(spec, reader, device)
        data = Data(reader=reader, held_out=held_out, decode=decode)
        for each in data.readers:
            if context.decoders is not None:
                each.hire(context.decoders)
        yield Reading(
            context=context, device=device, data=data, began=began, classes=classes, texts=texts, why_not=why_not
        )


@contextmanager
def opened(context: JobContext, device: torch.device) -> Iterator[Session]:
    """Open the data of a job and claim its output.

    Raises DataError, UsageError for a device that cannot decode, and OutputExists.
    """
    spec, job = context.spec, context.job
    assert spec.train is not None
    with read(context, device) as reading:
        data, decode = reading.data, reading.data.decode
        parts = basis_parts(spec, data.reader, data.held_out, decode=decode)
        if reading.texts is not None:
            parts["texts"] = reading.texts.decides
        elif left_out := Sampler.of(spec, data.reader.total).left_out:
            parts["left_out"] = left_out  # of each epoch
        if reading.classes is not None:
            parts["classes"] = list(reading.classes)
        if spec.run.gpus != 1:
            parts["ranks"] = spec.run.gpus  # how batches are divided
        basis = digest(parts)
        staging = context.patience.through(
            lambda: Staging(spec.output, job.id, job.attempt, ledger=context.store.publications, basis=basis),
            begun=job.attempt > 1,
        )
        key = basis[:16] if spec.train.resume != "never" else f"{basis[:16]}-{job.id}"
        if staging.finished is None:
            decodes.tell(context, decode, reading.why_not)
        search = Search(
            resume=spec.train.resume,
            checkpoints=Checkpoints(spec.output.folder, key, owner=job.id),
            basis=basis,
            parts=parts,
            patience=context.patience,
            event=context.event,
        )
        yield Session(**vars(reading), staging=staging, search=search)


def number_as_head(spec: JobSpec, reader: Reader) -> tuple[tuple[str, ...] | None, str | None]:
    """Number labels as the head that the training begins with does, if it knows all of their names. Returns the names
    of its classes if labels have other numbers then; and what is to be said. Whoever builds a classifier of texts says
    if its classes have other names.

    Raises ModelError for a configuration that is malformed.
    """
    names, model = reader.label_names, begins_with(spec)
    if names is None or random_weights(model) is not None:
        return None, None
    texts = spec.input.format == "text"
    found = Classes(names=classes_of_head(model)) if texts else classes_of(model)
    if found is None:
        return None, None
    if found.unnamed is not None:
        return None, f"{found.unnamed}; classes are numbered in alphabetical order"
    head = found.said
    if set(names) <= set(head) and len(set(head)) == len(head):
        reader.number_labels(head)
        lacking = [name for name in head if name not in names]
        said = f"no record has the label {some(lacking)}, a class that is named beside the weights" if lacking else None
        return None if head == names else head, said
    said = f"the head is taken over, although its classes are named {some(head)}, not {some(names)}"
    return None, None if texts or not head else said


def _tell_overlap(context: JobContext, reader: Reader, held_out: Reader) -> None:
    if both := reader.files_of(held_out):
        files = f"{count(len(both), 'file')} {plural(len(both), 'is')} also in the input, such as {both[0]}"
        text = f"train.validation.source: {files}; validations measure records that were trained on"
        context.event("overlap", text, {"files": len(both)})


def _tell(context: JobContext, texts: TrainTexts) -> None:
    if texts.unused:
        text = f"no record has the label {some(texts.unused)} of the classes 0 to {len(texts.names) - 1}"
        context.event("labels", f"{text}; number them from 0 without gaps if this is not meant", {})
    if texts.cut:
        limit = texts.decides["max_length"]
        context.event("truncated", f"{texts.cut:,} texts were cut to {limit} tokens", {"truncated": texts.cut})


def open_held_out(spec: JobSpec, source: str, reader: Reader, *, origin: Origin | None = None) -> Reader:
    """The records of `train.validation`. Raises DataError if they do not match the input's, or none is good."""
    assert spec.train is not None
    wanted, trained_on = targets(spec.train.loss), _no_labels(reader)
    if wanted == "stored" and trained_on is not None and trained_on.dtype.kind == "f":
        wanted = "numbers"  # whole ones, too
    held_out = open_reader(
        spec.input.model_copy(update={"source": source}), label_names=reader.label_names, targets=wanted, origin=origin
    )
    try:
        _check_held_out(held_out, source, reader, spec.input.source)
        if spec.input.format != "text":  # of texts, whoever makes tokens of them says so
            first_batch(held_out, _FEW, HELD_OUT, "validate on")
    except DataError:
        held_out.close()
        raise
    return held_out


def _check_held_out(held_out: Reader, source: str, reader: Reader, input_source: str) -> None:
    """Raises DataError for records or labels of another kind than the input's."""
    if held_out.signature != reader.signature:
        if unlike := held_out.signature.scaled_unlike(reader.signature):
            raise DataError(
                f"{HELD_OUT}: {source}: {unlike}, as in {input_source}; input.transform.scale sets one scale for both"
            )
        raise DataError(
            f"{HELD_OUT}: records are {held_out.signature.dtype} {list(held_out.signature.shape)}; "
            f"expected {reader.signature.dtype} {list(reader.signature.shape)}, as the input's"
        )
    found, expected = _kind_of_labels(held_out), _kind_of_labels(reader)
    if found != expected:
        raise DataError(f"{HELD_OUT}: labels are {found}; expected {expected}, as the input's")


def _kind_of_labels(reader: Reader) -> str:
    """What labels are, in words: names, or numbers of a type and shape."""
    if reader.label_names is not None:
        return f"names ({some(reader.label_names)})"
    empty = _no_labels(reader)
    if empty is None:
        return "missing"
    numbers = "whole numbers" if empty.dtype.kind == "i" else "floating-point numbers"
    return numbers if empty.ndim == 1 else f"{empty.shape[1]} {numbers} for each record"


def _no_labels(reader: Reader) -> np.ndarray | None:
    """An array of no labels, of their type and shape; None if the input has none."""
    return reader.labels(np.empty(0, dtype=np.int64))
