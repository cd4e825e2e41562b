"""One attempt at a scoring job: its input, what decodes it, and its place on the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nimble_jobs.data import AnyStaging, Reader, Staging, listing_for_member, open_reader
from nimble_jobs.data import stage as stage_output
from nimble_jobs.data.answers import Answers
from nimble_jobs.models.classes import Classes, classes_of
from nimble_jobs.models.pictures import left_out
from nimble_jobs.planner import Request
from nimble_jobs.plural import some
from nimble_jobs.spec import JobSpec
from nimble_jobs.spec.formats import TEXTS
from nimble_jobs.workloads import decode as decodes
from nimble_jobs.workloads import only_new
from nimble_jobs.workloads.answering import answers_of
from nimble_jobs.workloads.basis import basis
from nimble_jobs.workloads.context import JobContext
from nimble_jobs.workloads.members import Part
from nimble_jobs.workloads.request import request_of
from nimble_jobs.workloads.text.setup import ColumnOfText, TextSetup, set_up


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a job: its input, opened, and its place on the disk, claimed."""

    context: JobContext
    device: torch.device
    reader: Reader
    staging: AnyStaging | None  # None for a member that did not claim the job, unless it publishes
    stage: Callable[[], AnyStaging]  # makes what publishes
    part: Part | None  # this member's part, if other workers may work on the job too
    decode: decodes.Decode | None  # what decodes pictures; None if there are none
    why_not: str | None  # why the device does not decode them, if it might have
    work: only_new.Work | None  # which files, with `input.only_new`
    texts: TextSetup | None  # how texts become tokens; None if there are none
    column: ColumnOfText  # how a text among several inputs becomes tokens, if there is one
    answers: Answers | None  # what makes the lines of a batch file; None for other formats

    @property
    def sole(self) -> AnyStaging:
        """The place of an attempt that one worker makes alone."""
        assert self.staging is not None
        return self.staging

    def request(self) -> Request:
        """What the job asks of the planner; if its records are texts, all but the shape of a batch."""
        context = self.context
        given = (self.reader, self.device, context.allowed_python, context.memory_bytes)
        return request_of(context.spec, *given, column=self.column)


def opened(context: JobContext, work: only_new.Work | None, column: ColumnOfText) -> Reader:
    """The job's input. A member that joined takes the folder of pictures as the one that claimed the job found it."""
    spec, job, fetching = context.spec, context.job, context.fetching
    alike = job.joined and _one_folder(context, work)
    reader = open_reader(
        spec.input,
        files=work.files if work is not None else None,
        tokens=column,
        origin=context.origins.get(spec.input.source),
        arriving=fetching.arriving if fetching is not None else None,
        listing=listing_for_member(spec.output, job.id, job.attempt) if alike else None,
    )
    if reader.label_names is not None and "label" in spec.output.fields:
        unlike = _number_labels(reader, reader.label_names, classes_of(spec.model))
        if unlike is not None and not job.joined:
            context.event("labels", unlike, {})
    return reader


def _number_labels(reader: Reader, names: Sequence[str], classes: Classes | None) -> str | None:
    """Number labels as the model does; what is to be said if it knows none of their names."""
    if classes is not None and not set(names).isdisjoint(classes.names):
        reader.number_labels(classes.names)
        return None
    why = "the model has no names of its classes"
    if classes is not None and (classes.unnamed or classes.said):
        why = classes.unnamed or f"{classes.file} names {some(classes.names)}, but none of the labels {some(names)}"
    return f"{why}; labels are numbered in alphabetical order, which may not be the numbers of the model's classes"


def _one_folder(context: JobContext, work: only_new.Work | None) -> bool:
    """Whether all members read the input where it lies: not copies of their own, nor files that a list names."""
    return work is None and context.fetching is None and context.spec.input.source not in context.origins


def claimed(
    context: JobContext, device: torch.device, reader: Reader, work: only_new.Work | None, column: ColumnOfText
) -> Attempt:
    """Decide what decodes, and claim the output. Raises UsageError for a device that cannot decode, OutputExists."""
    spec, job, ledger = context.spec, context.job, context.store.publications
    decode, why_not = decodes.choose(spec, reader, device)
    texts = set_up(spec) if spec.input.format in TEXTS else None
    setup = texts or column.setup
    if context.decoders is not None:
        reader.hire(context.decoders)
    answers = answers_of(spec, reader)
    options: dict[str, Any] = {
        "through": context.patience.through,
        "ledger": ledger,
        "successor": job.worker if job.joined else None,
    }
    if answers is not None:
        options["error"] = answers.error

    def decided(by: decodes.Decode | None) -> dict[str, Any]:
        how = basis(spec, reader, by, setup.to_json() if setup is not None else None)
        return {"basis": how, "decoded_by": str(by) if by is not None else None}

    def staged(by: decodes.Decode | None) -> AnyStaging:
        return context.patience.through(
            lambda: stage_output(spec.output, job.id, job.attempt, **options, **decided(by)), begun=job.attempt > 1
        )

    staging = None if job.joined else staged(decode)
    part = None
    if context.membership is None:  # members each choose a decoder, and must choose alike
        if staging is not None and (kept := _kept(spec, reader, decode, staging, staged)) is not None:
            (decode, staging), why_not = kept, "an earlier attempt began with the CPU"
    elif staging is None or staging.finished is None:
        part = Part(context, reader.total, answers=answers, **decided(decode))
        # In an object store, looking at the files again is quicker than moving a listing there and back.
        if isinstance(staging, Staging) and reader.listing is not None and _one_folder(context, work):
            context.patience.through(partial(staging.share, reader.listing))
    context.report(total=reader.total if answers is None else answers.total)
    notes = reader.notes()
    if reader.decodes and (unlike := left_out(spec)) is not None:
        notes = [*notes, unlike]
    for note in notes:
        context.event("input", note, {})
    return Attempt(
        context=context,
        device=device,
        reader=reader,
        staging=staging,
        stage=partial(staged, decode),
        part=part,
        decode=decode,
        why_not=why_not,
        work=work,
        texts=texts,
        column=column,
        answers=answers,
    )


def _kept(
    spec: JobSpec,
    reader: Reader,
    decode: decodes.Decode | None,
    staging: AnyStaging,
    staged: Callable[[decodes.Decode], AnyStaging],
) -> tuple[decodes.Decode, AnyStaging] | None:
    """The decoder of an earlier attempt, and what is staged with it, if its shards can be kept then and no others."""
    if staging.done or not decodes.may_keep(spec, decode, staging.decoded_before):
        return None
    before = decodes.on_host(reader.recipe.interpolation)
    with_it = staged(before)
    return (before, with_it) if with_it.done else None
