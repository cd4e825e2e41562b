"""Host memory for the results of batches under way, kept from one flight to the next.

A job of texts turns from bucket to bucket, with a flight for each turn. All of them land here, so pinned memory, which
takes a device long to allocate, is that of the largest results and not of all buckets together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from nimble_jobs.engine import enqueue
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.engine.pinned import pinned_bytes
from nimble_jobs.engine.seats import Seat
from nimble_jobs.pipeline import Pool


class Landings:
    """Lanes that the flights of a job share, one flight at a time. There are as many as the largest of them needed."""

    def __init__(self) -> None:
        self._lanes: Pool[Lane] = Pool([])

    def make(self, count: int) -> None:
        """Have at least so many lanes."""
        self._lanes.grow(Lane() for _ in range(count - len(self._lanes)))

    def take(self) -> tuple[Lane, Callable[[], None]]:
        """Wait for a free lane; the lane, and what frees it."""
        taken = self._lanes.take()
        assert taken is not None  # nobody ends the pool
        return taken


class Lane:
    """Host memory for the results of one batch. For each name it grows to the largest result of that name."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}  # uint8, pinned
        self._shaped: dict[str, torch.Tensor] = {}  # how it was used last
        self._results: dict[str, torch.Tensor] = {}  # of the batch that was started last, on the host
        self._made: Mapping[str, torch.Tensor] = {}  # the same on the device, while they are copied
        self._began, self._computed, self._leaving, self._done = (
            torch.cuda.Event(enable_timing=True) for _ in range(4)
        )

    @property
    def bytes(self) -> int:
        """The size of the results on the device."""
        return sum(tensor.nbytes for tensor in self._made.values())

    def start(self, batch: Arrived, seat: Seat, out: torch.cuda.Stream) -> None:
        """Queue the work on a batch, and on `out` the copy of its results."""
        # Referenced until they are on the host: the allocator would give their memory to the seat's next batch, which
        # does not wait for the copy stream.
        self._made = seat.compute(batch, self._began)
        enqueue.record(self._computed, seat.stream)
        enqueue.wait(out, self._computed)
        enqueue.record(self._leaving, out)
        self._results = {name: self._copied(name, tensor, out) for name, tensor in self._made.items()}
        enqueue.record(self._done, out)
        seat.left = self._done

    def _copied(self, name: str, tensor: torch.Tensor, out: torch.cuda.Stream) -> torch.Tensor:
        """Host memory that a tensor is being copied to, or the tensor if it lies on the host."""
        if tensor.device != out.device:
            return tensor
        host = self._shaped.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = self._shaped[name] = self._room(name, tensor)
        enqueue.copy(host, tensor, out)
        return host

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Memory laid out as a copy of a tensor."""
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < tensor.nbytes:
            # Pinned memory comes in powers of two anyway, so the rest of one is free.
            memory = self._memory[name] = pinned_bytes(1 << max(0, tensor.nbytes - 1).bit_length())
        strides = torch.empty_like(tensor, device="meta").stride()
        return torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), 0, tensor.shape, strides)

    def wait(self) -> Mapping[str, torch.Tensor]:
        """The results, once they are on the host."""
        self._done.synchronize()
        self._made = {}
        return self._results

    def replay_s(self) -> float:
        """Device time in seconds from the beginning of the work on the batch to the results."""
        return float(self._began.elapsed_time(self._computed)) / 1e3

    def download_s(self) -> float:
        """Time in seconds that the results took to the host."""
        return float(self._leaving.elapsed_time(self._done)) / 1e3
