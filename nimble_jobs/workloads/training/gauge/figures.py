"""The figures of each step: gathered without waiting for the device, and kept in columns."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nimble_jobs.engine.device import able
from nimble_jobs.planner.step.build import TrainingStep

ROWS = 16  # batches whose figures leave a GPU together, as one block
_BLOCKS = 4  # being filled or on their way
_FIGURES = ("loss", "correct", "found_inf", "grad_norm")  # of a batch, as they leave the device
_COLUMNS = {  # figures of a step -> type code of `array`
    "epoch": "i",
    "records": "i",
    "correct": "i",
    "loss": "d",
    "lr": "d",
    "grad_norm": "d",  # NaN: not measured
    "skipped": "b",
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the host knows of a batch when it launches it."""

    step: int  # of the optimizer, from 1
    epoch: int
    records: int
    lr: float
    last: bool  # of its step


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the device computed for a batch."""

    batch: Batch
    loss: float
    correct: int
    skipped: bool
    grad_norm: float | None


class _Block:
    """Figures of some batches, on the device and, once sent, on the host."""

    def __init__(self, rows: int, device: torch.device) -> None:
        sends = able(device).asynchronous
        self.on_device = torch.zeros(rows, len(_FIGURES), device=device)
        self.slots = [tuple(row.unbind()) for row in self.on_device]
        self.on_host = torch.zeros(rows, len(_FIGURES), pin_memory=True) if sends else self.on_device
        self.filled = 0
        self._sent = torch.cuda.Event() if sends else None

    def send(self) -> None:
        if self._sent is not None:
            self.on_host.copy_(self.on_device, non_blocking=True)
            self._sent.record()

    def arrived(self, *, wait: bool) -> bool:
        if self._sent is None:
            return True
        if wait:
            self._sent.synchronize()
        return wait or self._sent.query()


class Gauge:
    """Reads the figures of steps a little after the device has computed them, so that the device never waits.

    Each method returns figures that have arrived, each figure once and in order.
    """

    def __init__(
        self, step: TrainingStep, device: torch.device, *, scaled: bool = True, rows: int | None = None
    ) -> None:
        """With `scaled`, losses are scaled, and an update that overflows is skipped.

        `rows` batches send their figures together; None means 16 on a GPU and 1 on a CPU.
        """
        self._step = step
        self._scaled = scaled
        self._rows = rows or (ROWS if able(device).asynchronous else 1)
        self._norm = step.grad_norm is not None
        self._launched: deque[Batch] = deque()
        self._free = deque(_Block(self._rows, device) for _ in range(_BLOCKS - 1))
        self._block = _Block(self._rows, device)
        self._flights: deque[_Block] = deque()

    def take(self, batch: Batch) -> list[Measured]:
        """Note the figures of the batch that was just launched."""
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
        """Send all that was noted. This waits only if all blocks are on their way."""
        if not self._block.filled:
            return self._landed(wait=False)
        self._block.send()
        self._flights.append(self._block)
        landed = self._landed(wait=not self._free)
        self._block = self._free.popleft()
        return landed

    def rest(self) -> list[Measured]:
        """Wait for all figures that were not returned yet."""
        landed = self.hurry()
        while self._flights:
            landed += self._landed(wait=True)
        return landed

    def _landed(self, *, wait: bool) -> list[Measured]:
        """The figures of the oldest block on its way, if it has arrived; `wait` waits for it."""
        if not self._flights or not self._flights[0].arrived(wait=wait):
            return []
        block = self._flights.popleft()
        rows = block.on_host[: block.filled].tolist()
        block.filled = 0
        self._free.append(block)
        return [self._measured(*row) for row in rows]

    def _measured(self, loss: float, correct: float, skipped: float, norm: float) -> Measured:
        batch = self._launched.popleft()
        known = norm if self._norm and batch.last else None
        return Measured(
            batch=batch, loss=loss, correct=int(correct), skipped=bool(skipped) and batch.last, grad_norm=known
        )


class Steps:
    """The figures of all finished steps, and of the batches of the step under way."""

    def __init__(self, columns: Mapping[str, torch.Tensor] | None = None) -> None:
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}
        for name, column in (columns or {}).items():
            self._columns[name].frombytes(column.numpy().tobytes())
        self._open: list[Measured] = []
        self._sums = (0, 0.0, 0, 0)  # epoch, loss, correct, records: over the steps of the newest epoch, in order
        for row in self.rows():
            self._sum(row)

    def __len__(self) -> int:
        return len(self._columns["loss"])

    def add(self, measured: Measured) -> dict[str, Any] | None:
        """Add a batch. If it is the last one of its step, return the step's figures."""
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
        self._sum(row)
        return row

    def column(self, name: str) -> np.ndarray:
        """One figure of all finished steps, a copy."""
        return np.array(self._columns[name])

    def tensors(self, count: int) -> dict[str, torch.Tensor]:
        """The columns of the first `count` steps, for a checkpoint."""
        return {name: torch.from_numpy(np.array(column[:count])) for name, column in self._columns.items()}

    def rows(self) -> Iterator[dict[str, Any]]:
        """The figures of each step, from the first."""
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def of_epoch(self, epoch: int) -> tuple[float, float, int]:
        """Mean loss, accuracy and number of the records so far, if `epoch` is the newest one; otherwise zeros."""
        newest, loss, correct, records = self._sums
        return (loss / records, correct / records, records) if newest == epoch else (0.0, 0.0, 0)

    def _sum(self, row: Mapping[str, Any]) -> None:
        newest, loss, correct, records = self._sums if self._sums[0] == row["epoch"] else (row["epoch"], 0.0, 0, 0)
        loss += row["loss"] * row["records"]
        self._sums = newest, loss, correct + row["correct"], records + row["records"]
