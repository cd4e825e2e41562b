"""A flight's seats: as many as batches have to wait for. The device is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from nimble_jobs.engine import flight as flights
from nimble_jobs.engine.flight import Flight

DEVICE = torch.device("cuda", 0)


class Seat:
    """Notes which heads it was prepared for."""

    def __init__(self, instance: str, stream: str) -> None:
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

    def wait(self) -> Mapping[str, torch.Tensor]:
        self.computed = True
        return {}

    def replay_s(self) -> float:
        return 0.0

    download_s = replay_s


class Landings:
    """One lane for each batch."""

    def __init__(self, quick: bool) -> None:
        self.lanes: list[Lane] = []
        self.asked = 0
        self._quick = quick

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
    monkeypatch.setattr(flights, "flight_streams", lambda _, count: [f"stream {n}" for n in range(count)])
    monkeypatch.setattr(flights, "ReplaySeat", Seat)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


def head(outputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return outputs


def flown(flight: Flight, batches: int, *, quick: bool) -> list[Seat]:
    """The seats of so many batches, whose results are taken in order."""
    landings: Any = Landings(quick)
    arrived: Iterator[Any] = ((Batch(), n) for n in range(batches))
    assert [landed.beside for landed in flight.run(arrived, head, landings)] == list(range(batches))
    return [lane.seats[0] for lane in landings.lanes]


@pytest.mark.usefixtures("_no_device")
def test_a_seat_is_added_when_all_have_work() -> None:
    """Up to as many as there can be, each with its own stream and the head; then they take turns."""
    more = iter(["second", "third"])
    asked: list[str | None] = []

    def another() -> Any:
        asked.append(next(more, None))
        return asked[-1]

    first: Any = "first"
    flight = Flight.of_replays([first], DEVICE, another=another, left=2)
    seats = flown(flight, 9, quick=False)
    assert [seat.instance for seat in seats[:3]] == ["first", "second", "third"]
    assert [seat.stream for seat in seats[:3]] == ["stream 0", "stream 1", "stream 2"]
    assert [len({seat.instance for seat in seats[n : n + 3]}) for n in range(3, 7)] == [3] * 4, "in turn"
    assert asked == ["second", "third", None], "not again, once there is none"
    assert all(seat.prepared == [head] for seat in seats[:3])
    assert len({seat.instance for seat in flown(flight, 3, quick=False)}) == 3
    assert all(seat.prepared == [head, head] for seat in seats[:3])


@pytest.mark.usefixtures("_no_device")
def test_batches_that_wait_for_nothing_need_one_seat() -> None:
    """Such as those of slow input."""
    first: Any = "first"
    flight = Flight.of_replays([first], DEVICE, another=lambda: pytest.fail("asked"), left=2)
    assert {seat.instance for seat in flown(flight, 9, quick=True)} == {"first"}


@pytest.mark.usefixtures("_no_device")
def test_what_was_captured_beforehand_is_used_in_turn() -> None:
    """All instances of a schedule that was built now; there are no others."""
    made: Any = ["first", "second"]
    flight = Flight.of_replays(made, DEVICE)
    assert [seat.instance for seat in flown(flight, 6, quick=True)] == ["first", "second"] * 3


@pytest.mark.usefixtures("_no_device")
def test_a_flight_has_room_for_all_that_may_come() -> None:
    """So that batches can wait, and the host is ahead of the device."""
    first: Any = "first"
    flight = Flight.of_replays([first], DEVICE, another=lambda: None, left=3)
    landings: Any = Landings(quick=False)
    arrived: Iterator[Any] = ((Batch(), n) for n in range(20))
    for _ in flight.run(arrived, head, landings):
        assert sum(not lane.computed for lane in landings.lanes) <= 4 + flights._MORE_REPLAYS
    assert landings.asked == 4 + flights._MORE_REPLAYS + flights._LANDED
