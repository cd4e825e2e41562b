"""The walk of a training: each batch passes step, gauge, journal and keeper; after each epoch comes its validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nimble_jobs.errors import DataError, JobFailed, NimbleError
from nimble_jobs.planner.step.build import TrainingStep
from nimble_jobs.spec import JobSpec, RunSpec, TrainSpec
from nimble_jobs.workloads.bad_records import BadRecords, enforce_threshold
from nimble_jobs.workloads.context import Stop
from nimble_jobs.workloads.training.batches.bucketed import TextBatches, TextEpochs
from nimble_jobs.workloads.training.batches.epochs import AT_LEAST, Batches, Epochs
from nimble_jobs.workloads.training.batches.intake import Data
from nimble_jobs.workloads.training.batches.together import Joint, Share, together
from nimble_jobs.workloads.training.gauge.figures import Batch, Gauge, Measured
from nimble_jobs.workloads.training.gauge.journal import Journal, NotFinite
from nimble_jobs.workloads.training.keep.keeper import Keeper
from nimble_jobs.workloads.training.keep.shared import SharedKeeper
from nimble_jobs.workloads.training.keep.state import Progress
from nimble_jobs.workloads.training.ranks.gang import Gang
from nimble_jobs.workloads.training.step.learning_rate import LearningRate
from nimble_jobs.workloads.training.step.validation import Validation


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training does, as far as its spec and its data decide."""

    train: TrainSpec
    run: RunSpec
    epochs: Epochs | TextEpochs
    rate: LearningRate

    @classmethod
    def of(cls, spec: JobSpec, data: Data, texts: TextEpochs | None = None, share: Share = Share()) -> Plan:  # noqa: B008 - frozen
        """Raises DataError and JobFailed for what the data or the number of steps does not allow."""
        train = spec.train
        assert train is not None
        epochs = Epochs.of(spec, data, share) if texts is None else texts
        steps = train.epochs * -(-epochs.sampler.batches // train.accumulate)  # if every batch has good records
        rate = LearningRate(train.lr_schedule, train.optimizer.lr, steps)
        return cls(train=train, run=spec.run, epochs=epochs, rate=rate)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What a batch passes, in this order. Each stage knows only those before it."""

    batches: Batches | TextBatches
    step: TrainingStep
    validation: Validation | None  # in place of the step, for held-out batches
    gauge: Gauge
    journal: Journal
    keeper: Keeper | SharedKeeper
    gang: Gang | None = None  # all ranks that take the batches together


class Loop:
    """Runs a training from where `progress` says, and updates `progress`."""

    def __init__(
        self, plan: Plan, stages: Stages, progress: Progress, stop: Callable[[], Stop], bad: BadRecords
    ) -> None:
        """`stop` is asked after each step and epoch, and before each batch of a validation. `bad` counts each bad
        record once, in whichever epoch it is met first.
        """
        self.plan, self.stages, self.progress = plan, stages, progress
        self._stop, self._bad = stop, bad

    def run(self) -> Stop:
        """Train to the end (GO), or until the worker wants it to stop; then a checkpoint is taken first.

        Raises JobFailed for a loss that is not finite; DataError for too many bad records, a wrong label, or no step.
        """
        while not self.progress.finished and self.progress.epoch <= self.plan.train.epochs:
            wish = self._epoch()
            if wish is Stop.GO:
                wish = self._end_epoch()
            if wish is not Stop.GO:
                self._keep(wait=True)
                return wish
        if not self.progress.step:
            raise DataError(f"input.source: no batch has {AT_LEAST} good records; expected one to train on")
        self.stages.keeper.settle()
        return Stop.GO

    def _epoch(self) -> Stop:
        """Train on the rest of the present epoch."""
        progress, keeper = self.progress, self.stages.keeper
        part = 0  # batches of the step under way
        for batch in self._together(self.plan.epochs.sampler.records):
            part += 1
            last = batch.host.last or part == self.plan.train.accumulate
            self._launch(batch, last=last)
            if not last:
                continue
            part = 0
            progress.step += 1
            progress.batch = batch.host.taken
            self._tell(batch.host.records)
            if (wish := self._stop()) is not Stop.GO:
                return wish
            if keeper.due_after_step(progress.step, end=batch.host.last):
                self._keep(wait=False)
        progress.batch = self.plan.epochs.sampler.batches
        return self._stop()

    def _together(self, records: int) -> Iterator[Joint]:
        """The batches of the next segment, which has so many records."""
        batches, gang, epochs = self.stages.batches.segment(), self.stages.gang, self.plan.epochs
        size = epochs.sampler.batch_size if isinstance(epochs, Epochs) else 0  # texts have one rank
        return together(batches, gang, batch_size=size, total=records)

    def _launch(self, batch: Joint, *, last: bool) -> None:
        """Run one batch; `last` of its step."""
        progress, bad = self.progress, batch.host.bad
        lr = self.plan.rate(progress.step)
        if self.stages.gang is not None:
            self.stages.step.weigh(batch.share)
        if batch.own is None:
            self.stages.step.sit_out(lr, last)
        else:
            self.stages.step.run(batch.own.x, batch.own.y, lr, last)
        if bad:
            self._bad.note([record for record in bad if str(record.index) not in progress.bad_records])
            progress.bad += len(bad)
            progress.bad_records |= {str(record.index): [record.id, record.reason] for record in bad}
            enforce_threshold(self.plan.run, progress.bad, self.plan.epochs.sampler.total, bad)
        launched = Batch(step=progress.step + 1, epoch=progress.epoch, records=batch.size, lr=lr, last=last)
        self._note(self.stages.gauge.take(launched))

    def _note(self, measured: Sequence[Measured]) -> None:
        """Pass figures on to the journal, and let the keeper know how far they have come."""
        try:
            self.stages.journal.note(measured)
        except NotFinite as e:
            if self.stages.gang is not None and not self.stages.gang.leads:
                return  # the leader has the same loss, and fails
            raise JobFailed(self._not_finite(e.measured)) from None
        self.stages.keeper.write(self.stages.journal.steps)

    def _not_finite(self, measured: Measured) -> str:
        kept, keeper = "no checkpoint was kept", self.stages.keeper
        try:
            keeper.write(self.stages.journal.steps)
            keeper.settle()
        except NimbleError as e:  # the job fails because of its loss all the same
            kept = f"{kept}: {e}"
        if keeper.latest is not None:
            kept = f"the checkpoint after step {keeper.latest} is kept: {keeper.path}"
        return (
            f"the loss became {measured.loss} at step {measured.batch.step}; expected a finite number "
            f"(try a lower train.optimizer.lr); {kept}"
        )

    def _tell(self, records: int) -> None:
        """Report progress. `records` of the present epoch are done."""
        progress = self.progress
        self.stages.journal.tell(
            progress.epoch,
            total=self.plan.rate.steps,
            done=(progress.epoch - 1) * self.plan.epochs.sampler.records + records,
            more=self.stages.batches.meters.summary,
        )

    def _keep(self, *, wait: bool) -> None:
        """Take a checkpoint, if the spec asks for any. With `wait`, it is on the disk afterwards."""
        keeper, gauge = self.stages.keeper, self.stages.gauge
        if self.plan.train.checkpoint is None:
            return
        if wait:
            self._note(gauge.rest())
        keeper.take(self.progress)
        self._note(gauge.hurry())  # it is written once the figures of all its steps have arrived
        if wait:
            keeper.settle()

    def _end_epoch(self) -> Stop:
        """Measure the epoch that is over. If the validation is told to stop, nothing of the epoch is noted."""
        progress, train, stages = self.progress, self.plan.train, self.stages
        epoch = progress.epoch
        held_out: dict[str, float | None] = {}
        if stages.validation is not None and self.plan.epochs.validated(epoch):
            answer = stages.validation(self._together(stages.validation.records), self._stop)
            if isinstance(answer, Stop):
                return answer
            held_out = answer
        self._note(stages.gauge.rest())
        metrics: dict[str, Any] = {"epoch": epoch, "step": progress.step}
        trained = stages.journal.means(epoch)
        if trained:
            metrics |= {"lr": self.plan.rate(progress.step - 1), **trained}
        metrics |= held_out
        improved = progress.note(metrics, train.checkpoint, train.early_stopping)
        stages.journal.epoch(metrics, train.epochs)
        progress.epoch, progress.batch, progress.bad = epoch + 1, 0, 0
        if progress.finished and train.early_stopping is not None:
            stages.journal.stopped_early(epoch, train.early_stopping)
        over = progress.finished or epoch == train.epochs
        if improved or (not over and stages.keeper.due_after_epoch(epoch)):
            self._keep(wait=False)
        return Stop.GO
