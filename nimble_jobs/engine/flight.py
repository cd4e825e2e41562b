"""Several batches in flight: results are copied to the host while later batches are computed.

A batch is computed at a seat, on the seat's stream: by a replay, or by a call in eager. Then a copy stream brings the
results to pinned host memory. So no batch waits for the copies of another, and the host waits for a batch only once the
next ones are queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from nimble_jobs.engine import enqueue
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.landings import Landings, Lane
from nimble_jobs.engine.launch import flight_streams
from nimble_jobs.engine.seats import EagerSeat, ReplaySeat, Seat
from nimble_jobs.engine.streams import take_for
from nimble_jobs.engine.tail import Head

T = TypeVar("T")

_LANDED = 2  # batches whose outputs are still being read
_MORE_REPLAYS = 2  # under way than there are instances, so that the next replay is queued when one ends
_CALLS = 2  # in eager under way
_CALLS_BYTES = 256 << 20  # of results of calls in eager on the device; above it, no further call is queued


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
    """Runs batches through its seats in turn, on a CUDA device, results in order."""

    def __init__(
        self,
        seats: Sequence[Seat],
        device: torch.device,
        *,
        under_way: int,
        most_bytes: int | None = None,
        another: Callable[[int, Head], Seat | None] | None = None,
    ) -> None:
        """At most `under_way` batches are queued at a time; no further one while their results take more than
        `most_bytes` (None: any number). `another` makes one more seat, given its number and the head to prepare, or
        gives None if there is none left.
        """
        self._seats = list(seats)
        self._under_way, self._most_bytes = under_way, most_bytes
        self._another = another
        self._turn = 0  # of the seats
        self._copy_out = take_for(self, device)

    @classmethod
    def of_replays(
        cls,
        instances: Sequence[Instance],
        device: torch.device,
        *,
        another: Callable[[Callable[[Instance], Seat]], Seat | None] | None = None,
        left: int = 0,
    ) -> Flight:
        """Replays of instances of one schedule, each on a stream of its own. `another`, which is called when a batch
        would wait for a replay, captures one more, up to `left` times, and gives what its argument makes of it; None if
        there is none left.
        """
        streams = flight_streams(device, len(instances) + left)
        seats = [ReplaySeat(instance, stream) for instance, stream in zip(instances, streams, strict=False)]

        def another_seat(number: int, head: Head) -> Seat | None:
            def seated(instance: Instance) -> Seat:
                seat = ReplaySeat(instance, streams[number])
                seat.prepare(head)
                return seat

            return another(seated) if another is not None else None

        flight = cls(seats, device, under_way=len(streams) + _MORE_REPLAYS, another=another_seat)
        torch.cuda.synchronize(device)
        return flight

    @classmethod
    def of_calls(cls, module: Callable[[torch.Tensor], Any], device: torch.device) -> Flight:
        """Calls of a module in eager, on the current stream."""
        seat = EagerSeat(module, torch.cuda.current_stream(device))
        return cls([seat], device, under_way=_CALLS, most_bytes=_CALLS_BYTES)

    def prepare(self, head: Head) -> None:
        """Make `head` ready, unless that was done before. Raises what `head` raises, and EngineError."""
        for seat in self._seats:
            seat.prepare(head)

    def run(
        self, arrived: Iterable[tuple[Arrived | None, T]], head: Head = dict, landings: Landings | None = None
    ) -> Generator[Landed[T]]:
        """Yield what `head` makes of each batch's outputs, on the host, in order. A batch of None has no outputs.

        `head` runs on the device, after each batch. At most two batches may be held at a time, those of the flight that
        had the `landings` before among them. Raises what `head` raises.
        """
        self.prepare(head)
        landings = landings or Landings()
        landings.make(self._under_way + _LANDED)
        busy: deque[_UnderWay[T]] = deque()
        with torch.no_grad():
            try:
                for batch, beside in arrived:
                    while busy and (len(busy) >= self._under_way or self._too_many_bytes(busy)):
                        yield busy.popleft().land()
                    if batch is None:
                        busy.append(_UnderWay(beside=beside))
                        continue
                    seat = self._seat(head)
                    lane, release = landings.take()
                    try:
                        lane.start(batch, seat, self._copy_out)
                    except BaseException:
                        release()
                        raise
                    busy.append(_UnderWay(beside=beside, batch=batch, lane=lane, release=release))
                while busy:
                    yield busy.popleft().land()
            finally:
                for one in busy:
                    one.land().release()

    def _seat(self, head: Head) -> Seat:
        """The next seat; a new one if all seats are at work."""
        if self._another is not None and not any(enqueue.idle(seat.stream) for seat in self._seats):
            made = self._another(len(self._seats), head)
            if made is None:
                self._another = None
            else:  # the capture waited for the device, so the other seats are idle and come next
                self._seats.append(made)
                self._turn = len(self._seats)
                return made
        seat = self._seats[self._turn % len(self._seats)]
        self._turn += 1
        return seat

    def _too_many_bytes(self, busy: Iterable[_UnderWay[T]]) -> bool:
        return self._most_bytes is not None and sum(one.bytes for one in busy) > self._most_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class _UnderWay(Generic[T]):
    beside: T
    batch: Arrived | None = None
    lane: Lane | None = None
    release: Callable[[], None] = lambda: None

    @property
    def bytes(self) -> int:
        """The size of its results on the device."""
        return self.lane.bytes if self.lane is not None else 0

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
