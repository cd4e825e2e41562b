"""The figures of each step: gathered on the device without waiting for it, kept in columns, written as JSON lines."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nimble_jobs.planner.step.build import TrainingStep

ROWS = 16  # batches whose figures leave a GPU together
_BLOCKS = 4  # of so many that are on their way or being filled
_FIGURES = ("loss", "correct", "found_inf", "grad_norm")  # of a batch, as they leave the device
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


class _Block:
    """Figures of some batches, on the device and, once they were sent, on the host."""

    def __init__(self, rows: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.there = torch.zeros(rows, len(_FIGURES), device=device)
        self.slots = [tuple(row.unbind()) for row in self.there]
        self.here = torch.zeros(rows, len(_FIGURES), pin_memory=True) if cuda else self.there
        self.filled = 0
        self._sent = torch.cuda.Event() if cuda else None

    def send(self) -> None:
        if self._sent is not None:
            self.here.copy_(self.there, non_blocking=True)
            self._sent.record()

    def arrived(self, *, wait: bool) -> bool:
        if self._sent is None:
            return True
        if wait:
            self._sent.synchronize()
        return wait or self._sent.query()


class Gauge:
    """Reads a step's figures a little later than they are made, so that the device never waits.

    `take` returns what is known by now, `rest` waits for everything, and `hurry` has what is known to the device sent
    without waiting for it.
    """

    def __init__(
        self, step: TrainingStep, device: torch.device, *, scaled: bool = True, rows: int | None = None
    ) -> None:
        """`scaled` for losses that are scaled, so that updates may be skipped. `rows` is of how many batches figures
        leave the device together; None: at once on a CPU.
        """
        self._step = step
        self._scaled = scaled
        self._rows = rows or (ROWS if device.type == "cuda" else 1)
        self._norm = step.grad_norm is not None
        self._launched: deque[Batch] = deque()
        self._free = deque(_Block(self._rows, device) for _ in range(_BLOCKS - 1))
        self._block = _Block(self._rows, device)
        self._flights: deque[_Block] = deque()

    def take(self, batch: Batch) -> list[Measured]:
        """Note the figures of the batch just launched."""
        self._launched.append(batch)
        block, step = self._block, self._step
        skipped = step.found_inf if self._scaled else None
        values = (step.loss, step.correct, skipped, step.grad_norm)
        for slot, value in zip(block.slots[block.filled], values, strict=True):
            if value is not None:
                slot.copy_(value)
        block.filled += 1
        return self.hurry() if block.filled == self._rows else self._landed(wait=False)

    def hurry(self) -> list[Measured]:
        """Send what was noted. What is known by now, as `take`; it waits only where too much is on its way."""
        if not self._block.filled:
            return self._landed(wait=False)
        self._block.send()
        self._flights.append(self._block)
        found = self._landed(wait=not self._free)
        self._block = self._free.popleft()
        return found

    def rest(self) -> list[Measured]:
        """All figures that were not returned yet."""
        found = self.hurry()
        while self._flights:
            found += self._landed(wait=True)
        return found

    def _landed(self, *, wait: bool) -> list[Measured]:
        """Those of the oldest block, if it has arrived or is waited for."""
        if not self._flights or not self._flights[0].arrived(wait=wait):
            return []
        block = self._flights.popleft()
        rows = block.here[: block.filled].tolist()
        block.filled = 0
        self._free.append(block)
        return [self._measured(*row) for row in rows]

    def _measured(self, loss: float, correct: float, skipped: float, norm: float) -> Measured:
        batch = self._launched.popleft()
        known = norm if self._norm and batch.last else None
        return Measured(
            batch=batch, loss=loss, correct=int(correct), skipped=bool(skipped) and batch.last, grad_norm=known
        )


@dataclass(kw_only=True)
class _Sums:
    """Over the steps of an epoch, in their order."""

    epoch: int | None = None
    loss: float = 0.0
    correct: int = 0
    records: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        self.epoch = row["epoch"]
        self.loss += row["loss"] * row["records"]
        self.correct += row["correct"]
        self.records += row["records"]


class Steps:
    """Figures of all finished steps, and of the batches of the step under way."""

    def __init__(self, columns: Mapping[str, torch.Tensor] | None = None) -> None:
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}
        for name, column in (columns or {}).items():
            self._columns[name].frombytes(column.numpy().tobytes())
        self._open: list[Measured] = []
        self._epoch = _Sums()
        for i in range(self._first_of_last_epoch(), len(self)):
            self._epoch.add({name: column[i] for name, column in self._columns.items()})

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
        if row["epoch"] != self._epoch.epoch:
            self._epoch = _Sums()
        self._epoch.add(row)
        return row

    def column(self, name: str) -> np.ndarray:
        """One figure of all finished steps, a copy."""
        return np.array(self._columns[name])

    def tensors(self, count: int) -> dict[str, torch.Tensor]:
        """The columns of the first steps, for a checkpoint."""
        return {name: torch.from_numpy(np.array(column[:count])) for name, column in self._columns.items()}

    def rows(self) -> Iterator[dict[str, Any]]:
        """The figures of each step, from the first."""
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def of_epoch(self, epoch: int) -> tuple[float, float, int]:
        """Mean loss and accuracy over the records of the newest epoch so far, and how many they are; of others none."""
        found = self._epoch if self._epoch.epoch == epoch else _Sums()
        return found.loss / max(found.records, 1), found.correct / max(found.records, 1), found.records

    def _first_of_last_epoch(self) -> int:
        epochs = self._columns["epoch"]
        return epochs.index(epochs[-1]) if epochs else 0  # epochs rise


class MetricsFile:
    """metrics.jsonl: a line for each step and each epoch, in order, the same for equal trainings.

    Lines are kept until `flush` has written them: one that fails is called again later.
    """

    def __init__(self, path: Path, *, classes: bool) -> None:
        self._path = path
        self._descriptor = -1
        self._waiting = bytearray()
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
        """Write what is not written yet. Raises OSError; then nothing is lost, nor will it be written twice."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        while self._waiting:
            del self._waiting[: os.write(self._descriptor, self._waiting)]

    def close(self) -> None:
        """Let go of the file, whether all is written or not. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, line: Mapping[str, Any]) -> None:
        self._waiting += f"{json.dumps(line)}\n".encode()
