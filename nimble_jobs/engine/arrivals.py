"""Uploads batches to a device, or makes them there, ahead of the replays that use them.

A few slots on the device take turns. A copy stream puts a batch into a slot. A replay copies it from there into its own
input, on its own stream, and returns the slot. So no upload waits for a replay, and no replay for an upload.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from nimble_jobs.engine import enqueue
from nimble_jobs.engine.device import able
from nimble_jobs.engine.streams import take_for
from nimble_jobs.pipeline import Pool

_AHEAD = 3  # slots beyond those that replays are about to take


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived:
    """A batch that a replay can take. If it was short, its last row is repeated until the batch is full."""

    x: torch.Tensor
    began: torch.cuda.Event | None = None  # when the copy began; None: x lies on the host
    ready: torch.cuda.Event | None = None
    taken: torch.cuda.Event | None = None
    release: Callable[[], None] = lambda: None  # returns the slot; to be called once `taken` is recorded

    def take(self, stream: torch.cuda.Stream) -> torch.Tensor:
        """The batch, for work queued on `stream` from now on."""
        if self.ready is not None:
            enqueue.wait(stream, self.ready)
        return self.x

    def let_go(self, stream: torch.cuda.Stream) -> None:
        """Return the slot. Call it once all work that reads the batch has been queued on `stream`."""
        if self.taken is not None:
            enqueue.record(self.taken, stream)
        self.release()

    def upload_s(self) -> float:
        """How long the copy took, in seconds. It must be over."""
        if self.began is None or self.ready is None:
            return 0.0
        return float(self.began.elapsed_time(self.ready)) / 1e3


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """Room for one batch on the device."""

    x: torch.Tensor
    taken: torch.cuda.Event | None  # when the previous batch has been copied out; None on a CPU
    give_back: Callable[[], None] = lambda: None


class Arrivals:
    """The slots for batches of one shape and dtype. On a CPU there are none: batches stay where they are."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, in_flight: int) -> None:
        self._shape, self._dtype, self._rows = shape, dtype, shape[0]
        self._stream: torch.cuda.Stream | None = None
        slots: list[Slot] = []
        if able(device).streams:
            self._stream = take_for(self, device)
            slots = [
                Slot(x=torch.empty(shape, dtype=dtype, device=device), taken=torch.cuda.Event())
                for _ in range(in_flight + _AHEAD)
            ]
        # A slot is free before the times of its batch are read, so there are more events than slots.
        self._times = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(4 * len(slots))
        ]
        self._turn = itertools.count()
        self._slots = Pool(slots)
        self.bytes = sum(slot.x.nbytes for slot in slots)

    def begin(self) -> None:
        """Offer all slots. No work of an earlier job may still be running."""
        self._slots.begin()

    def end(self) -> None:
        """Wake the threads that wait for a slot."""
        self._slots.end()

    def upload(self, host: torch.Tensor) -> Arrived | None:
        """Start to copy rows [n, ...] of the host to a slot; None after `end`. Leave `host` unchanged until `ready`."""
        if self._stream is None:
            return Arrived(x=_whole(host, self._rows))
        slot, stream = self.reserve(), self._stream
        return None if slot is None else self.finish(slot, lambda x: enqueue.copy(x, host, stream), rows=len(host))

    def reserve(self) -> Slot | None:
        """A slot for a batch made on the device; None after `end`. Follow it by `finish` or `Slot.give_back`."""
        if self._stream is None:
            return Slot(x=torch.empty(self._shape, dtype=self._dtype), taken=None)
        taken = self._slots.take()
        if taken is None:
            return None
        slot, give_back = taken
        return replace(slot, give_back=give_back)

    def finish(
        self,
        slot: Slot,
        write: Callable[[torch.Tensor], object] | None = None,
        *,
        rows: int,
        after: torch.cuda.Event | None = None,
    ) -> Arrived:
        """Let `write` fill the first `rows` rows of a slot once `after` has happened, then repeat the last of them."""
        if self._stream is None:
            self._fill(slot.x, write, rows)
            return Arrived(x=slot.x)
        began, ready = self._times[next(self._turn) % len(self._times)]
        stream = self._stream
        try:
            if after is not None:
                enqueue.wait(stream, after)
            assert slot.taken is not None
            enqueue.wait(stream, slot.taken)
            enqueue.record(began, stream)
            if write is not None or rows < self._rows:
                with torch.cuda.stream(stream):
                    self._fill(slot.x, write, rows)
            enqueue.record(ready, stream)
        except BaseException:
            slot.give_back()
            raise
        return Arrived(x=slot.x, began=began, ready=ready, taken=slot.taken, release=slot.give_back)

    def _fill(self, x: torch.Tensor, write: Callable[[torch.Tensor], object] | None, rows: int) -> None:
        if write is not None:
            write(x[:rows])
        if rows < self._rows:
            x[rows:] = x[rows - 1]


def _whole(host: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - len(host)
    return torch.cat([host, host[-1:].expand(missing, *host.shape[1:])]) if missing else host
