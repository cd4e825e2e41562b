"""A flight's seats: as many as batches have to wait for. The device is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from nimble_jobs.engine import flight as flights
from nimble_jobs.engine.flight import Flight

DEVICE = torch.device("cuda", 0)


class Stream(str):
    """Known by its name. Idle once the batches on it are computed."""

    def __init__(self, _: str) -> None:
        self.lanes: list[Lane] = []


class Seat:
    """Notes which heads it was prepared for."""

    def __init__(self, instance: Any, stream: Stream) -> None:
        self.instance, self.stream = instance, stream
        self.prepared: list[Any] = []

    def prepare(self, head: Any) -> None:
        self.prepared.append(head)


class Lane:
    """Its batches are computed once they are waited for or, if the device is `quick`, at once."""

    bytes = 0

    def __init__(self, quick: bool) -> None:
        self.computed = True
        self._quick = quick
        self.seats: list[Seat] = []

    def start(self, batch: Any, seat: Seat, out: Any) -> None:
        self.computed = self._quick
        self.seats.append(seat)
        seat.stream.lanes.append(self)

    def wait(self) -> Mapping[str, torch.Tensor]:
        self.computed = True
        return {}

    def replay_s(self) -> float:
        return 0.0

    download_s = replay_s


class Landings:
    """One lane for each batch."""

    def __init__(self, quick: bool = False) -> None:
        self.lanes: list[Lane] = []
        self.asked = 0
        self._quick = quick

    def wait_for_all(self) -> None:
        """As a capture does."""
        for lane in self.lanes:
            lane.computed = True

    def make(self, count: int) -> None:
        self.asked = count

    def take(self) -> tuple[Lane, Callable[[], None]]:
        self.lanes.append(Lane(self._quick))
        return self.lanes[-1], lambda: None


class Batch:
    def upload_s(self) -> float:
        return 0.0


@pytest.fixture
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "take_for", lambda *_: "out")
    monkeypatch.setattr(flights, "flight_streams", lambda _, count: [Stream(f"stream {n}") for n in range(count)])
    monkeypatch.setattr(flights.enqueue, "idle", lambda stream: all(lane.computed for lane in stream.lanes))
    monkeypatch.setattr(flights, "ReplaySeat", Seat)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


def head(outputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return outputs


def flown(flight: Flight, batches: int, landings: Any) -> list[Any]:
    """The instances of so many batches, whose results are taken in order."""
    arrived: Iterator[Any] = ((Batch(), n) for n in range(batches))
    assert [landed.beside for landed in flight.run(arrived, head, landings)] == list(range(batches))
    return [lane.seats[0].instance for lane in landings.lanes]


@pytest.mark.usefixtures("_no_device")
def test_a_seat_is_added_when_all_have_work() -> None:
    """Up to as many as there can be, each with its own stream and the head. The capture waits for the batches of the
    others, which therefore come next.
    """
    first: Any = 1
    landings: Any = Landings()
    seats: list[Seat] = []
    asked: list[int] = []

    def another(use: Callable[[Any], Any]) -> Any:
        asked.append(len(seats) + 2)
        if len(seats) == 2:
            return None
        landings.wait_for_all()
        seats.append(use(len(seats) + 2))
        return seats[-1]

    flight = Flight.of_replays([first], DEVICE, another=another, left=2)
    assert flown(flight, 12, landings) == [1, 2, 1, 3, 1, 2, 3, 1, 2, 3, 1, 2]
    assert asked == [2, 3, 4], "not again, once there is none"
    assert [(seat.stream, seat.prepared) for seat in seats] == [("stream 1", [head]), ("stream 2", [head])]
    landings.lanes.clear()
    assert sorted(flown(flight, 3, landings)) == [1, 2, 3]
    assert [seat.prepared for seat in seats] == [[head, head]] * 2
    assert asked == [2, 3, 4]


@pytest.mark.usefixtures("_no_device")
def test_batches_that_wait_for_nothing_need_one_seat() -> None:
    """Such as those of slow input."""
    first: Any = "first"
    flight = Flight.of_replays([first], DEVICE, another=lambda _: pytest.fail("asked"), left=2)
    assert set(flown(flight, 9, Landings(quick=True))) == {"first"}


@pytest.mark.usefixtures("_no_device")
def test_what_was_captured_beforehand_is_used_in_turn() -> None:
    """All instances of a schedule that was built now; there are no others."""
    made: Any = ["first", "second"]
    flight = Flight.of_replays(made, DEVICE)
    assert flown(flight, 6, Landings(quick=True)) == ["first", "second"] * 3


@pytest.mark.usefixtures("_no_device")
def test_a_flight_has_room_for_all_that_may_come() -> None:
    """So that batches can wait, and the host is ahead of the device."""
    first: Any = "first"
    flight = Flight.of_replays([first], DEVICE, another=lambda _: None, left=3)
    landings: Any = Landings()
    arrived: Iterator[Any] = ((Batch(), n) for n in range(20))
    for _ in flight.run(arrived, head, landings):
        assert sum(not lane.computed for lane in landings.lanes) <= 4 + flights._MORE_REPLAYS
    assert landings.asked == 4 + flights._MORE_REPLAYS + flights._LANDED
