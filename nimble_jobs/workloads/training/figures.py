"""The figures of each step: gathered on the device without waiting for it, kept in columns, written as JSON lines."""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from nimble_jobs.planner.training import TrainingStep

_HALF = 16  # batches whose figures leave the device together
_COLUMNS = {  # of a step, with their type in `array`
    "epoch": "i",
    "records": "i",
    "correct": "i",
    "loss": "d",
    "lr": "d",
    "grad_norm": "d",  # NaN where none was measured
    "skipped": "b",
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the host knows of a batch when it is launched."""

    step: int  # the optimizer's step that it belongs to, from 1
    epoch: int
    records: int
    lr: float
    last: bool  # of its step


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the device found for a batch."""

    batch: Batch
    loss: float
    correct: int
    skipped: bool
    grad_norm: float | None


class Gauge:
    """Reads a step's figures a little later than they are made, so that the device never waits.

    `take` returns what is known by now; `rest` waits for everything.
    """

    def __init__(self, step: TrainingStep, device: torch.device) -> None:
        self._step = step
        self._cuda = device.type == "cuda"
        self._norm = step.grad_norm is not None
        self._launched: deque[Batch] = deque()
        self._count = 0
        if self._cuda:
            ring = torch.zeros(2 * _HALF, 4, device=device)
            self._slots = [tuple(row.unbind()) for row in ring]
            self._halves = ring.view(2, _HALF, 4)
            self._hosts = [torch.zeros(_HALF, 4, pin_memory=True) for _ in range(2)]
            self._flights: deque[tuple[int, int, torch.cuda.Event]] = deque()

    def take(self, batch: Batch) -> list[Measured]:
        """Note the figures of the batch just launched."""
        self._launched.append(batch)
        if not self._cuda:
            return [self._now()]
        slot = self._slots[self._count % (2 * _HALF)]
        slot[0].copy_(self._step.loss)
        slot[1].copy_(self._step.correct)
        slot[2].copy_(self._step.found_inf)
        if self._step.grad_norm is not None:
            slot[3].copy_(self._step.grad_norm)
        self._count += 1
        if self._count % _HALF == 0:
            self._send(_HALF)
        # A half may be written again only once its host copy has been read.
        return self._landed(wait=len(self._flights) > 1)

    def rest(self) -> list[Measured]:
        """All figures that were not returned yet."""
        if not self._cuda:
            return []
        if self._count % _HALF:
            self._send(self._count % _HALF)
            self._count += -self._count % _HALF
        found = []
        while self._flights:
            found += self._landed(wait=True)
        return found

    def _send(self, rows: int) -> None:
        half = (self._count - 1) // _HALF % 2
        self._hosts[half].copy_(self._halves[half], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._flights.append((half, rows, event))

    def _landed(self, *, wait: bool) -> list[Measured]:
        if not self._flights or not (wait or self._flights[0][2].query()):
            return []
        half, rows, event = self._flights.popleft()
        event.synchronize()
        return [self._measured(*row) for row in self._hosts[half][:rows].tolist()]

    def _now(self) -> Measured:
        norm = self._step.grad_norm
        return self._measured(
            float(self._step.loss),
            float(self._step.correct),
            float(self._step.found_inf),
            0.0 if norm is None else float(norm),
        )

    def _measured(self, loss: float, correct: float, skipped: float, norm: float) -> Measured:
        batch = self._launched.popleft()
        known = norm if self._norm and batch.last else None
        return Measured(
            batch=batch, loss=loss, correct=int(correct), skipped=bool(skipped) and batch.last, grad_norm=known
        )


class Steps:
    """Figures of all finished steps, and of the batches of the step under way."""

    def __init__(self, columns: Mapping[str, torch.Tensor] | None = None) -> None:
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}
        for name, column in (columns or {}).items():
            self._columns[name].frombytes(column.numpy().tobytes())
        self._open: list[Measured] = []

    def __len__(self) -> int:
        return len(self._columns["loss"])

    def add(self, measured: Measured) -> dict[str, Any] | None:
        """Take a batch; the figures of its step if that is finished by it."""
        self._open.append(measured)
        if not measured.batch.last:
            return None
        parts, self._open = self._open, []
        records = sum(m.batch.records for m in parts)
        row = {
            "epoch": measured.batch.epoch,
            "records": records,
            "correct": sum(m.correct for m in parts),
            "loss": math.fsum(m.loss * m.batch.records for m in parts) / records,
            "lr": measured.batch.lr,
            "grad_norm": math.nan if measured.grad_norm is None else measured.grad_norm,
            "skipped": measured.skipped,
        }
        for name, value in row.items():
            self._columns[name].append(value)
        return row

    def tensors(self) -> dict[str, torch.Tensor]:
        """The columns, for a checkpoint."""
        return {name: torch.from_numpy(np.array(column)) for name, column in self._columns.items()}

    def rows(self) -> Iterator[dict[str, Any]]:
        """The figures of each step, from the first."""
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def of_epoch(self, epoch: int) -> tuple[float, float, int]:
        """Mean loss and accuracy over the epoch's records so far, and how many they are."""
        loss, correct, records = 0.0, 0, 0
        for i in range(len(self) - 1, -1, -1):
            if self._columns["epoch"][i] != epoch:
                break
            n = self._columns["records"][i]
            loss, correct, records = (
                loss + self._columns["loss"][i] * n,
                correct + self._columns["correct"][i],
                records + n,
            )
        return loss / max(records, 1), correct / max(records, 1), records


class MetricsFile:
    """metrics.jsonl: a line for each step and each epoch, in order, the same for equal trainings."""

    def __init__(self, path: Path, *, classes: bool) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8")
        self._classes = classes

    def step(self, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """Write a step's line; what it holds."""
        line = {"kind": "step", "step": number, "epoch": row["epoch"], "lr": row["lr"], "loss": row["loss"]}
        if self._classes:
            line["accuracy"] = row["correct"] / row["records"]
        if not math.isnan(row["grad_norm"]):
            line["grad_norm"] = row["grad_norm"] if math.isfinite(row["grad_norm"]) else None
        if row["skipped"]:
            line["skipped"] = True  # by loss scaling
        self._write(line)
        return line

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        """Write an epoch's line."""
        self._write({"kind": "epoch", **metrics})

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        json.dump(line, self._file)
        self._file.write("\n")
