"""What a training says of itself: metrics.jsonl, TensorBoard, and figures for whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nimble_jobs.data.files import reported
from nimble_jobs.errors import DataError
from nimble_jobs.patience import passes
from nimble_jobs.workloads.training.board import Board
from nimble_jobs.workloads.training.figures import MetricsFile, Steps

METRICS = "metrics.jsonl"
_TELL_S = 0.2  # between two reports to who watches


class Journal:
    """Writes metrics as they come. After a resume, those of the steps before are written again first.

    `event(kind, message, data)` is told when TensorBoard's file cannot be written, and is given up.
    """

    def __init__(
        self,
        path: Path,
        *,
        classes: bool,
        tensorboard: bool,
        report: Callable[..., None],
        event: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self._path = path
        self._board = Board(path.parent) if tensorboard else None
        self._file = MetricsFile(path, classes=classes)
        self._classes = classes
        self._report = report
        self._event = event
        self._told_at = 0.0
        self._started = time.perf_counter()
        self._first_step = 0

    def replay(self, steps: Steps, epochs: list[dict[str, Any]]) -> None:
        """Write what an earlier attempt measured."""
        waiting = list(epochs)
        for number, row in enumerate(steps.rows(), start=1):
            while waiting and waiting[0]["epoch"] < row["epoch"]:
                self.epoch(waiting.pop(0))
            self.step(number, row)
        for metrics in waiting:
            self.epoch(metrics)
        self._started = time.perf_counter()
        self._first_step = len(steps)

    def step(self, number: int, row: Mapping[str, Any]) -> None:
        """A step that ended."""
        line = self._file.step(number, row)
        self._show("train", number, line)

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        """An epoch that ended."""
        self._file.epoch(metrics)
        self._flush_if_possible()
        self._show("epoch", metrics["step"], metrics)

    def tell(
        self,
        steps: Steps,
        epoch: int,
        *,
        total: int,
        done: int,
        bad: int,
        more: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Report how it goes, a few times a second. `total` counts steps, `done` and `bad` records; `more` says what
        else is told with the timings.
        """
        now = time.perf_counter()
        if now - self._told_at < _TELL_S:
            return
        self._told_at = now
        self._flush_if_possible()
        loss, accuracy, records = steps.of_epoch(epoch)
        rate = (len(steps) - self._first_step) / max(now - self._started, 1e-9)
        timings: dict[str, Any] = {"step": len(steps), "steps": total, "steps_per_s": rate, **more()}
        if rate > 0:
            timings["remaining_s"] = (total - len(steps)) / rate
        if records:
            timings["loss"] = loss
            if self._classes:
                timings["accuracy"] = accuracy
        self._report(done=done, bad=bad, timings=timings)

    def flush(self) -> None:
        """Write what is not written yet. Raises DataError; it can be called again."""
        with reported(self._path):
            self._file.flush()

    def finish(self) -> list[str]:
        """After the last `flush`: the names of the files written beside metrics.jsonl."""
        board, self._board = self._board, None
        if board is None:
            return []
        try:
            return board.close()
        except OSError as e:
            self._give_up(e)
            return []

    def close(self) -> None:
        """Let go of the files. A second call does nothing."""
        self._file.close()
        with suppress(OSError):  # a training that was stopped needs none of it
            if self._board is not None:
                self._board.close()
                self._board = None

    def _flush_if_possible(self) -> None:
        try:
            self._file.flush()
        except OSError as e:
            if not passes(e):
                raise DataError(f"{self._path}: cannot be written: {e.strerror or e}") from e

    def _show(self, prefix: str, step: int, line: Mapping[str, Any]) -> None:
        try:
            if self._board is not None:
                self._board.add(prefix, step, line)
        except OSError as e:
            self._give_up(e)

    def _give_up(self, error: OSError) -> None:
        self._board = None
        text = f"its event file is incomplete, the rest of it is left out: {error.strerror or error}"
        self._event("tensorboard", text, {})
