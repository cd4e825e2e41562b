"""Batches on their way to a device: uploaded, or made there, ahead of the replays that take them.

A few slots on the device take turns. A batch goes into one on a copy stream; a replay copies it from there into its
own input, on its own stream, and gives the slot back. So no upload waits for a replay, and no replay for an upload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nimble_jobs.pipeline import Pool

_AHEAD = 2  # slots beyond those that replays are about to take


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived:
    """A batch where a replay can take it: rows beyond those that were given repeat the last one."""

    x: torch.Tensor
    began: torch.cuda.Event | None = None  # of the copy; None: x lies on the host
    ready: torch.cuda.Event | None = None
    taken: torch.cuda.Event | None = None
    release: Callable[[], None] = lambda: None  # once `taken` is recorded, the slot is for the next batch

    def take(self, stream: torch.cuda.Stream) -> torch.Tensor:
        """The batch, for work that is put on `stream` from now on."""
        if self.ready is not None:
            stream.wait_event(self.ready)
        return self.x

    def let_go(self, stream: torch.cuda.Stream) -> None:
        """All work that reads the batch has been put on `stream`."""
        if self.taken is not None:
            self.taken.record(stream)
        self.release()

    def upload_s(self) -> float:
        """How long the copy took; it must be over."""
        if self.began is None or self.ready is None:
            return 0.0
        return float(self.began.elapsed_time(self.ready)) / 1e3


class _Slot:
    def __init__(self, like: torch.Tensor) -> None:
        self.x = torch.empty_like(like)
        self.taken = torch.cuda.Event()


class Arrivals:
    """The slots for batches of one shape and dtype. On a CPU there are none: batches arrive as they are."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, in_flight: int) -> None:
        self._device, self._dtype, self._rows = device, dtype, shape[0]
        self._stream: torch.cuda.Stream | None = None
        slots: list[_Slot] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            like = torch.empty(shape, dtype=dtype, device=device)
            slots = [_Slot(like) for _ in range(in_flight + _AHEAD)]
        self._slots = Pool(slots)
        self.bytes = sum(slot.x.nbytes for slot in slots)

    def begin(self) -> None:
        """Offer all slots; nothing of an earlier job may be under way."""
        self._slots.begin()

    def end(self) -> None:
        """Wake whoever waits for a slot."""
        self._slots.end()

    def upload(self, host: torch.Tensor) -> Arrived | None:
        """Send rows [n, ...] of the host on their way; None after `end`. The host's memory must stay until then."""
        if self._stream is None:
            return Arrived(x=_whole(host, self._rows))
        return self.fill(self._stream, lambda x: x[: len(host)].copy_(host, non_blocking=True), len(host))

    def fill(self, stream: torch.cuda.Stream, write: Callable[[torch.Tensor], Any], rows: int) -> Arrived | None:
        """Let `write` fill the first rows of a free slot on `stream`, and repeat the last one; None after `end`."""
        taken = self._slots.take()
        if taken is None:
            return None
        slot, give_back = taken
        began, ready = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        try:
            with torch.cuda.stream(stream):
                stream.wait_event(slot.taken)
                began.record(stream)
                write(slot.x)
                if rows < self._rows:
                    slot.x[rows:] = slot.x[rows - 1]
                ready.record(stream)
        except BaseException:
            give_back()
            raise
        return Arrived(x=slot.x, began=began, ready=ready, taken=slot.taken, release=give_back)


def _whole(host: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - len(host)
    return torch.cat([host, host[-1:].expand(missing, *host.shape[1:])]) if missing else host
