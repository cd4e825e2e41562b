"""Several replays in flight: each instance has its own stream, and results are copied to the host while others compute.

A replay copies its batch into the instance's input and computes. Then the head computes the wanted results from the
outputs, and a copy stream brings them to pinned host memory. So no replay waits for the copies of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from nimble_jobs.engine import enqueue
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.launch import flight_streams
from nimble_jobs.engine.streams import take_for
from nimble_jobs.engine.tail import Head, Tail
from nimble_jobs.pipeline import Pool

T = TypeVar("T")

_LANDED = 2  # batches whose outputs are still being read
_TAILS = 4  # heads that are kept for later jobs


@dataclass(frozen=True, kw_only=True, eq=False)
class Landed(Generic[T]):
    """The results of a batch on the host, by name, and the value that accompanied it. `release` frees their memory for
    another batch.
    """

    outputs: Mapping[str, torch.Tensor]
    beside: T
    release: Callable[[], None] = lambda: None
    replay_s: float = 0.0
    upload_s: float = 0.0
    download_s: float = 0.0


class Flight:
    """Runs batches through instances of one schedule, on a CUDA device, results in order."""

    def __init__(self, instances: Sequence[Instance], device: torch.device) -> None:
        # More than there are instances, so that the next replay is queued when one ends.
        self._under_way = len(instances) + 2
        self._copy_out = take_for(self, device)
        streams = flight_streams(device, len(instances))
        self._seats = [_Seat(instance, stream) for instance, stream in zip(instances, streams, strict=True)]
        torch.cuda.synchronize(device)

    def prepare(self, head: Head) -> None:
        """Capture `head`, unless that was done before. Raises what `head` raises, and EngineError."""
        for seat in self._seats:
            seat.prepare(head)

    def run(self, arrived: Iterable[tuple[Arrived | None, T]], head: Head = dict) -> Generator[Landed[T]]:
        """Yield what `head` makes of each batch's outputs, on the host, in order. A batch of None has no outputs.

        `head` runs on the device, after each replay. At most two batches may be held at a time. Raises what `head`
        raises.
        """
        self.prepare(head)
        free = Pool([_Lane(self._copy_out) for _ in range(self._under_way + _LANDED)])
        busy: deque[_UnderWay[T]] = deque()
        turn = 0
        with torch.no_grad():
            try:
                for batch, beside in arrived:
                    if len(busy) >= self._under_way:
                        yield busy.popleft().land()
                    if batch is None:
                        busy.append(_UnderWay(beside=beside))
                        continue
                    taken = free.take()
                    assert taken is not None
                    lane, release = taken
                    lane.start(batch, self._seats[turn % len(self._seats)])
                    turn += 1
                    busy.append(_UnderWay(beside=beside, batch=batch, lane=lane, release=release))
                while busy:
                    yield busy.popleft().land()
            finally:
                for one in busy:
                    one.land()


class _Seat:
    """An instance, its stream, and the head over its outputs."""

    def __init__(self, instance: Instance, stream: torch.cuda.Stream) -> None:
        self.instance, self.stream = instance, stream
        self.input = next(iter(instance.inputs.values()))
        self.left: torch.cuda.Event | None = None  # when the last results are on the host
        self.tail: Tail | None = None
        self._tails: dict[Head, Tail] = {}

    def prepare(self, head: Head) -> None:
        """Apply `head` from now on."""
        if head not in self._tails:
            while len(self._tails) >= _TAILS:
                del self._tails[next(iter(self._tails))]
            self._tails[head] = Tail(head, self.instance, self.stream)
        self.tail = self._tails[head]


@dataclass(frozen=True, kw_only=True, eq=False)
class _UnderWay(Generic[T]):
    beside: T
    batch: Arrived | None = None
    lane: _Lane | None = None
    release: Callable[[], None] = lambda: None

    def land(self) -> Landed[T]:
        if self.lane is None or self.batch is None:
            return Landed(outputs={}, beside=self.beside)
        return Landed(
            outputs=self.lane.wait(),
            beside=self.beside,
            release=self.release,
            replay_s=self.lane.replay_s(),
            upload_s=self.batch.upload_s(),
            download_s=self.lane.download_s(),
        )


class _Lane:
    """Host memory for the results of one batch, allocated with the first batch."""

    def __init__(self, copy_out: torch.cuda.Stream) -> None:
        self._copy_out = copy_out
        self._host: dict[str, torch.Tensor] = {}
        self._began, self._computed, self._leaving, self._done = (
            torch.cuda.Event(enable_timing=True) for _ in range(4)
        )

    def start(self, batch: Arrived, seat: _Seat) -> None:
        """Queue the replay of a batch and the copy of its results."""
        tail, stream, out = seat.tail, seat.stream, self._copy_out
        assert tail is not None
        x = batch.take(stream)
        enqueue.record(self._began, stream)
        enqueue.copy(seat.input, x, stream)
        batch.let_go(stream)
        with torch.cuda.stream(stream):
            seat.instance.replay()
            if seat.left is not None:
                enqueue.wait(stream, seat.left)
            tail.run()
        enqueue.record(self._computed, stream)
        enqueue.wait(out, self._computed)
        enqueue.record(self._leaving, out)
        for name, tensor in tail.made.items():
            if name not in self._host:
                self._host[name] = torch.empty_like(tensor, device="cpu", pin_memory=True)
            enqueue.copy(self._host[name], tensor, out)
        enqueue.record(self._done, out)
        seat.left = self._done

    def wait(self) -> Mapping[str, torch.Tensor]:
        """The results, once they are on the host."""
        self._done.synchronize()
        return self._host

    def replay_s(self) -> float:
        """Device time in seconds from the copy into the input to the results."""
        return float(self._began.elapsed_time(self._computed)) / 1e3

    def download_s(self) -> float:
        """Time in seconds that the results took to the host."""
        return float(self._leaving.elapsed_time(self._done)) / 1e3
