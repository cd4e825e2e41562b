"""Epochs and steps: launch, measure, validate, keep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from nimble_jobs.data import BadRecord, Reader
from nimble_jobs.errors import DataError, JobFailed, NimbleError
from nimble_jobs.planner.step.build import TrainingStep
from nimble_jobs.spec import TrainSpec
from nimble_jobs.workloads.context import JobContext, Stop
from nimble_jobs.workloads.threshold import enforce_threshold
from nimble_jobs.workloads.training.augment import Augment
from nimble_jobs.workloads.training.feed import DeviceBatch, Feed, lot_size
from nimble_jobs.workloads.training.figures import Batch, Gauge, Measured, Steps
from nimble_jobs.workloads.training.forward import Forward
from nimble_jobs.workloads.training.intake import Intake
from nimble_jobs.workloads.training.journal import Journal
from nimble_jobs.workloads.training.keeper import Keeper
from nimble_jobs.workloads.training.learning_rate import LearningRate
from nimble_jobs.workloads.training.losses import make_loss
from nimble_jobs.workloads.training.pixels import Pixels
from nimble_jobs.workloads.training.progress import Progress
from nimble_jobs.workloads.training.reading import HELD_OUT, read
from nimble_jobs.workloads.training.sampler import Sampler
from nimble_jobs.workloads.training.segments import Segment
from nimble_jobs.workloads.training.setup import Setup
from nimble_jobs.workloads.training.stages import Stages
from nimble_jobs.workloads.training.validation import validate

_AT_LEAST = 2  # good records in a batch: statistics over a batch need two


class Loop:
    """Runs a training from where `progress` says, and moves it on."""

    def __init__(
        self,
        context: JobContext,
        setup: Setup,
        step: TrainingStep,
        forward: Forward,
        *,
        reader: Reader,
        held_out: Reader | None,
        keeper: Keeper | None,
        sheet: dict[str, Any],
        progress: Progress,
        steps: Steps,
        journal: Journal,
        sampler: Sampler,
        decode_on_device: bool = False,
    ) -> None:
        spec = context.spec
        assert spec.train is not None
        self.context, self.train, self.setup = context, spec.train, setup
        self.step, self.forward = step, forward
        self.reader, self.held_out, self.sampler = reader, held_out, sampler
        self.keeper, self.sheet, self.journal = keeper, sheet, journal
        self.progress, self.steps = progress, steps
        self.device = setup.request.x.device
        self.total = steps_of(spec.train, sampler)
        self.rate = LearningRate(spec.train.lr_schedule, spec.train.optimizer.lr, self.total)
        self.augment = Augment(spec.train.augment, reader.signature, seed=spec.model.seed, decodes=reader.decodes)
        self.gauge = Gauge(step, self.device, scaled=spec.model.dtype == "fp16")
        self.loss = make_loss(spec.train, context.allowed_python, smoothing=False)  # of validations
        self.stages = Stages(context.device, decodes=decode_on_device)
        self._decode_on_device = decode_on_device
        self.left_out = 0  # bad records of the last validation
        self.due = False  # for a checkpoint, as soon as the one before is written

    def run(self) -> Stop:
        """Train to the end (GO), or to where the worker wants it to stop, with a checkpoint of that place.

        Raises JobFailed for a loss that is not finite, DataError for too many bad records, a wrong label, or no step.
        """
        with closing(self._feeding()) as feeding:
            feed = feeding.feed
            while not self.progress.finished and self.progress.epoch <= self.train.epochs:
                stop = self._epoch(feed.segment())
                if stop is Stop.GO:
                    stop = self._end_epoch(feed)
                if stop is not Stop.GO:
                    self._keep(wait=True)
                    return stop
        if not self.progress.step:
            raise DataError(f"input.source: no batch has {_AT_LEAST} good records; expected one to train on")
        if self.keeper is not None:
            self.keeper.settle()
        return Stop.GO

    def _feeding(self) -> _Feeding:
        """The rest of the present epoch and all that follow, each with its validation."""
        readers = (self.reader, *([self.held_out] if self.held_out is not None else []))
        batch_bytes = 4 * self.sampler.batch_size * math.prod(self.reader.signature.shape)
        together = lot_size(batch_bytes, self.device) if all(reader.quick for reader in readers) else 1
        intake = Intake(
            self.device,
            readers,
            on_device=self._decode_on_device,
            batch_size=self.sampler.batch_size * together,
            read=self.stages.read,
            decode=self.stages.decode,
        )
        feed = Feed(
            self._segments(self.progress.epoch, self.progress.batch, together, intake),
            Pixels(self.context.spec.input.transform, padding=self.augment.padding),
            self.device,
            batch_bytes=batch_bytes,
            together=together,
            prepare=self.stages.prepare,
            steps=self.stages.steps,
            stream=intake.stream,
        )
        return _Feeding(feed=feed, intake=intake)

    def _segments(self, first: int, skip: int, together: int, intake: Intake) -> Iterator[Segment]:
        limit = self.setup.label_limit
        size, limits = self.sampler.batch_size, self.setup.limits
        for epoch in range(first, self.train.epochs + 1):
            lots = read(
                self.reader,
                batch_size=size,
                order=self.sampler.order(epoch),
                skip=skip if epoch == first else 0,
                at_least=_AT_LEAST,
                classes=limit,
                places=partial(self.augment.places, epoch=epoch) if self.augment else None,
                together=together,
                limits=limits,
                intake=intake,
                crops=self.augment.crops(epoch),
            )
            yield Segment(lots=lots, batches=self.sampler.batches)
            if self.held_out is not None and self._validates(epoch):
                lots = read(
                    self.held_out,
                    batch_size=size,
                    classes=limit,
                    together=together,
                    field=HELD_OUT,
                    limits=limits,
                    intake=intake,
                )
                yield Segment(lots=lots, batches=-(-self.held_out.total // size))

    def _validates(self, epoch: int) -> bool:
        return self.train.validation is not None and epoch % self.train.validation.every_epochs == 0

    def _epoch(self, batches: Iterator[DeviceBatch]) -> Stop:
        """The rest of the present epoch's batches."""
        progress = self.progress
        part = 0  # batches of the step under way
        for batch in batches:
            part += 1
            last = batch.host.last or part == self.train.accumulate
            self._launch(batch, last=last)
            if not last:
                continue
            part = 0
            progress.step += 1
            progress.batch = batch.host.taken
            self._tell(batch.host.records)
            if (stop := self.context.stop()) is not Stop.GO:
                return stop
            self._keep_if_due(end=batch.host.last)
        progress.batch = self.sampler.batches
        return self.context.stop()

    def _launch(self, batch: DeviceBatch, *, last: bool) -> None:
        number = self.progress.step + 1
        lr = self.rate(self.progress.step)
        self.step.run(batch.x, batch.y, lr, last)
        if batch.host.bad:
            self.progress.bad += len(batch.host.bad)
            self.progress.bad_records |= {str(bad.index): [bad.id, bad.reason] for bad in batch.host.bad}
            enforce_threshold(self.context.spec.run, self.progress.bad, self.reader.total, batch.host.bad)
        row = Batch(step=number, epoch=self.progress.epoch, records=len(batch.y), lr=lr, last=last)
        self._note(self.gauge.take(row))

    def _note(self, found: list[Measured]) -> None:
        for measured in found:
            if not math.isfinite(measured.loss):
                raise JobFailed(self._not_finite(measured))
            row = self.steps.add(measured)
            if row is not None:
                self.journal.step(len(self.steps), row)
        if self.keeper is not None:
            self.keeper.write(self.steps)

    def _not_finite(self, measured: Measured) -> str:
        kept = "no checkpoint was kept"
        if self.keeper is not None:
            try:
                self.keeper.write(self.steps)
                self.keeper.settle()
            except NimbleError as e:  # the loss is what the job fails of
                kept = f"{kept}: {e}"
            if self.keeper.latest is not None:
                kept = f"the checkpoint after step {self.keeper.latest} is kept: {self.keeper.path}"
        return (
            f"the loss became {measured.loss} at step {measured.batch.step}; expected a finite number "
            f"(a lower train.optimizer.lr?); {kept}"
        )

    def _tell(self, records: int) -> None:
        done = (self.progress.epoch - 1) * self.sampler.records + records
        self.journal.tell(
            self.steps,
            self.progress.epoch,
            total=self.total,
            done=done,
            bad=self.progress.bad,
            more=self.stages.summary,
        )

    def _keep_if_due(self, *, end: bool) -> None:
        """By steps, unless the epoch is over with this one: its end is kept then."""
        kept = self.train.checkpoint
        if self.keeper is None or kept is None:
            return
        busy = self.keeper.busy
        self.due = self.due or (kept.every_steps is not None and self.progress.step % kept.every_steps == 0)
        if self.due and not end and not busy:
            self._keep(wait=False)

    def _keep(self, *, wait: bool) -> None:
        if self.keeper is None:
            return
        if wait:
            self._note(self.gauge.rest())
        self.keeper.take(self.sheet, self.progress)
        self.due = False
        self._note(self.gauge.hurry())  # it is written once the figures of all its steps are there
        if wait:
            self.keeper.settle()

    def _end_epoch(self, feed: Feed) -> Stop:
        """Measure the epoch that is over. Not GO, and nothing of it noted, where its validation was told to stop."""
        progress, train = self.progress, self.train
        epoch = progress.epoch
        measured: dict[str, float | None] = {}
        if self.held_out is not None and self._validates(epoch):
            found = self._validate(feed.segment())
            if isinstance(found, Stop):
                return found
            measured = found
        self._note(self.gauge.rest())
        loss, accuracy, records = self.steps.of_epoch(epoch)
        metrics: dict[str, Any] = {"epoch": epoch, "step": progress.step}
        if records:
            metrics |= {"lr": self.rate(progress.step - 1), "loss": loss}
            if self.setup.classes is not None:
                metrics["accuracy"] = accuracy
        metrics |= measured
        improved = progress.note(metrics, train.checkpoint, train.early_stopping)
        self.journal.epoch(metrics)
        shown = ", ".join(
            f"{k} {'not finite' if v is None else f'{v:.4g}'}" for k, v in metrics.items() if k not in ("epoch", "step")
        )
        self.context.event("epoch", f"{epoch} of {train.epochs}: {shown}", metrics)
        progress.epoch, progress.batch, progress.bad = epoch + 1, 0, 0
        if progress.finished and train.early_stopping is not None:
            name, patience = train.early_stopping.metric, train.early_stopping.patience
            text = f"after epoch {epoch}: {name} did not get better in {patience} measurements"
            self.context.event("early-stopping", text, {"epoch": epoch})
        over = progress.finished or epoch == train.epochs
        every = train.checkpoint.epochs if train.checkpoint is not None else None
        due = self.due and self.keeper is not None and not self.keeper.busy  # else it comes after a later step
        if improved or (not over and (due or (every is not None and epoch % every == 0))):
            self._keep(wait=False)
        return Stop.GO

    def _validate(self, batches: Iterator[DeviceBatch]) -> dict[str, float | None] | Stop:
        found = validate(
            self.setup.module,
            self.forward,
            self._counted(batches),
            self.loss,
            dtype=self.context.spec.model.dtype,
            classes=self.setup.classes,
            device=self.device,
            stop=self.context.stop,
        )
        if isinstance(found, Stop):
            return found
        return {name: value if math.isfinite(value) else None for name, value in found.items()}

    def _counted(self, batches: Iterator[DeviceBatch]) -> Iterator[DeviceBatch]:
        """The held-out batches. Raises DataError for too many bad records; an event tells of fewer, once."""
        assert self.held_out is not None
        total, bad = self.held_out.total, list[BadRecord]()
        for batch in batches:
            if batch.host.bad:
                bad += batch.host.bad
                enforce_threshold(self.context.spec.run, len(bad), total, bad, what="held-out records")
            yield batch
        if bad and not self.left_out:
            told = f"validations leave out {len(bad)} of {total} records; the first is {bad[0].id}: {bad[0].reason}"
            self.context.event("bad-records", told, {"bad": len(bad)})
        self.left_out = len(bad)


@dataclass(frozen=True, kw_only=True)
class _Feeding:
    """What brings batches, and where they come from."""

    feed: Feed
    intake: Intake

    def close(self) -> None:
        """End all threads, and give memory back."""
        self.intake.end()
        try:
            self.feed.close()
        finally:
            self.intake.close()


def steps_of(train: TrainSpec, sampler: Sampler) -> int:
    """Steps of the whole training, if every batch has good records."""
    return train.epochs * -(-sampler.batches // train.accumulate)
