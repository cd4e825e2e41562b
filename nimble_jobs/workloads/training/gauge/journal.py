"""What a training says of itself: metrics.jsonl, TensorBoard, events, and progress for whoever watches."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nimble_jobs.data.files import reported
from nimble_jobs.errors import DataError, JobFailed
from nimble_jobs.patience import passes
from nimble_jobs.plural import plural
from nimble_jobs.spec import EarlyStoppingSpec
from nimble_jobs.workloads.context import Event
from nimble_jobs.workloads.training.gauge.figures import Measured, Steps

METRICS = "metrics.jsonl"
_TELL_S = 0.2  # between two reports of progress


def check_tensorboard() -> None:
    """Raises JobFailed if TensorBoard, which is an extra, is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise JobFailed(
            "train.tensorboard: TensorBoard is not installed; install it with: pip install 'nimble-jobs[tensorboard]'"
        )


class NotFinite(Exception):
    """The loss of a batch is NaN or infinite."""

    def __init__(self, measured: Measured) -> None:
        super().__init__(measured)
        self.measured = measured


class Journal:
    """Keeps the figures of all steps, and writes them to metrics.jsonl: a line for each step and each epoch, in order.

    Equal trainings write equal bytes. Lines wait until the disk takes them.
    """

    def __init__(
        self,
        path: Path,
        steps: Steps,
        *,
        classes: bool,
        tensorboard: bool,
        report: Callable[..., None],
        event: Event,
    ) -> None:
        """`steps` holds what earlier attempts measured. `classes` says that accuracy is measured.

        `report(done=, timings=)` and `event` tell the job.
        """
        self.steps = steps
        self._path = path
        self._lines = bytearray()  # that are not written yet
        self._descriptor = -1  # of the open file
        self._board = _Board(path.parent) if tensorboard else None
        self._classes = classes
        self._report = report
        self._event = event
        self._told_at = 0.0
        self._started = time.perf_counter()
        self._first_step = len(steps)

    def replay(self, epochs: Sequence[Mapping[str, Any]]) -> None:
        """Write what earlier attempts measured: all steps so far, and these epochs."""
        waiting = list(epochs)
        for number, row in enumerate(self.steps.rows(), start=1):
            while waiting and waiting[0]["epoch"] < row["epoch"]:
                self._write_epoch(waiting.pop(0))
            self._write_step(number, row)
        for metrics in waiting:
            self._write_epoch(metrics)
        self._started = time.perf_counter()

    def note(self, measured: Sequence[Measured]) -> None:
        """Take figures of batches, and write those of the steps that they finish. Raises NotFinite."""
        for one in measured:
            if not math.isfinite(one.loss):
                raise NotFinite(one)
            row = self.steps.add(one)
            if row is not None:
                self._write_step(len(self.steps), row)

    def epoch(self, metrics: Mapping[str, Any], epochs: int) -> None:
        """Write the metrics of an epoch that ended, one of `epochs`, and record them on the job."""
        self._write_epoch(metrics)
        shown = ", ".join(
            f"{k} {'not finite' if v is None else f'{v:.4g}'}" for k, v in metrics.items() if k not in ("epoch", "step")
        )
        self._event("epoch", f"{metrics['epoch']} of {epochs}: {shown}", dict(metrics))

    def stopped_early(self, epoch: int, stopping: EarlyStoppingSpec) -> None:
        """Record on the job that the training ends after this epoch, and why."""
        count = f"{stopping.patience} {plural(stopping.patience, 'measurement')}"
        text = f"after epoch {epoch}: {stopping.metric} did not improve in {count}"
        self._event("early-stopping", text, {"epoch": epoch})

    def means(self, epoch: int) -> dict[str, float]:
        """Loss and, for classes, accuracy over the records of the newest epoch so far; nothing for other epochs."""
        loss, accuracy, records = self.steps.of_epoch(epoch)
        if not records:
            return {}
        return {"loss": loss, "accuracy": accuracy} if self._classes else {"loss": loss}

    def tell(self, epoch: int, *, total: int, done: int, more: Callable[[], dict[str, Any]] = dict) -> None:
        """Report the progress of an epoch, a few times a second.

        `total` counts steps, `done` records; `more` adds to the timings.
        """
        now = time.perf_counter()
        if now - self._told_at < _TELL_S:
            return
        self._told_at = now
        self._flush_if_possible()
        steps = len(self.steps)
        rate = (steps - self._first_step) / max(now - self._started, 1e-9)
        timings: dict[str, Any] = {"step": steps, "steps": total, "steps_per_s": rate, **more()}
        if rate > 0:
            timings["remaining_s"] = (total - steps) / rate
        self._report(done=done, timings={**timings, **self.means(epoch)})

    def finish(self) -> list[str]:
        """Write the rest, and return the names of the files beside metrics.jsonl.

        Raises DataError if it cannot be written; you can then call it again.
        """
        with reported(self._path):
            self._flush()
        board, self._board = self._board, None
        if board is None:
            return []
        try:
            return board.close()
        except OSError as e:
            self._give_up(e)
            return []

    def close(self) -> None:
        """Close the files. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with suppress(OSError):  # an attempt that was stopped does not publish the file
            if self._board is not None:
                self._board.close()
                self._board = None

    def _write_step(self, number: int, row: Mapping[str, Any]) -> None:
        line = {"kind": "step", "step": number, "epoch": row["epoch"], "lr": row["lr"], "loss": row["loss"]}
        if self._classes:
            line["accuracy"] = row["correct"] / row["records"]
        if not math.isnan(row["grad_norm"]):
            line["grad_norm"] = row["grad_norm"] if math.isfinite(row["grad_norm"]) else None
        if row["skipped"]:
            line["skipped"] = True  # by loss scaling
        self._write("train", number, line)

    def _write_epoch(self, metrics: Mapping[str, Any]) -> None:
        self._write("epoch", metrics["step"], {"kind": "epoch", **metrics})
        self._flush_if_possible()

    def _write(self, prefix: str, step: int, line: Mapping[str, Any]) -> None:
        self._lines += f"{json.dumps(line)}\n".encode()
        try:
            if self._board is not None:
                self._board.add(prefix, step, line)
        except OSError as e:
            self._give_up(e)

    def _flush(self) -> None:
        """Write the lines that wait. Raises OSError; nothing is then lost or written twice."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        while self._lines:
            del self._lines[: os.write(self._descriptor, self._lines)]

    def _flush_if_possible(self) -> None:
        try:
            self._flush()
        except OSError as e:
            if not passes(e):
                raise DataError(f"{self._path}: cannot be written: {e.strerror or e}") from e

    def _give_up(self, error: OSError) -> None:
        self._board = None
        text = f"its event file is incomplete, and the rest is left out: {error.strerror or error}"
        self._event("tensorboard", text, {})


class _Board:
    """Writes numbers to an event file of TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an extra

        self._writer = SummaryWriter(log_dir=str(folder))
        self._folder = folder

    def add(self, prefix: str, step: int, line: Mapping[str, Any]) -> None:
        """Write the numbers of one line of metrics."""
        for name, value in line.items():
            if name not in ("step", "epoch", "kind") and isinstance(value, float):
                self._writer.add_scalar(f"{prefix}/{name}", value, step)

    def close(self) -> list[str]:
        """The names of the files that were written."""
        self._writer.close()
        return sorted(p.name for p in self._folder.glob("events.out.tfevents.*"))
