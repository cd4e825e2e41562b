"""Calls in eager in flight. The device is simulated: what is queued for its copy stream happens when it is waited for.

So a result that is overwritten, or whose memory is let go, before its copy is over comes out wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.engine import enqueue, landings
from nimble_jobs.engine import flight as flights
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.engine.flight import Flight
from nimble_jobs.engine.landings import Landings

CPU = torch.device("cpu")


class Stream:
    """Work that is queued, and done once it is waited for."""

    def __init__(self) -> None:
        self.device, self.queued = CPU, list[Callable[[], object]]()


class Event:
    """What `synchronize` waits for: all that its stream was given before it."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._stream: Stream | None = None
        self._happened = True

    def record(self, stream: Stream) -> None:
        self._stream, self._happened = stream, False
        stream.queued.append(self._happen)

    def _happen(self) -> None:
        self._happened = True

    def synchronize(self) -> None:
        while not self._happened:
            assert self._stream is not None
            self._stream.queued.pop(0)()

    def elapsed_time(self, _other: Event) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        there = weakref.ref(source)

        def arrive() -> None:
            memory = there()
            target.copy_(memory if memory is not None else torch.full_like(target, float("nan")))

        stream.queued.append(arrive)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    monkeypatch.setattr(flights, "take_for", lambda _owner, _device: Stream())
    monkeypatch.setattr(landings, "pinned_bytes", lambda count: torch.empty(count, dtype=torch.uint8))
    monkeypatch.setattr(enqueue, "copy", copy)
    monkeypatch.setattr(enqueue, "record", lambda event, stream: event.record(stream))
    monkeypatch.setattr(enqueue, "wait", lambda _stream, _event: None)


def batches(count: int, said: list[str] | None = None) -> Iterator[tuple[Arrived, int]]:
    """Batches of the numbers from 0, all in one slot."""
    slot = torch.empty(3)
    for number in range(count):
        if said is not None:
            said.append(f"batch {number}")
        slot.fill_(number)
        yield Arrived(x=slot), number


def landed(module: Callable[[torch.Tensor], Any], count: int, **kwargs: Any) -> list[tuple[int, list[float]]]:
    """What comes of so many batches: the number of each, and the first value of each result."""
    found = []
    for one in Flight.of_calls(module, CPU).run(batches(count), **kwargs):
        found.append((one.beside, [float(t.flatten()[0]) for t in one.outputs.values()]))
        one.release()
    return found


def test_the_next_batch_is_queued_before_one_is_waited_for() -> None:
    """One that is called while another is copied, and no more than that."""
    said: list[str] = []

    def module(x: torch.Tensor) -> torch.Tensor:
        said.append(f"call {int(x[0])}")
        return x + 1

    for one in Flight.of_calls(module, CPU).run(batches(4)):
        said.append(f"landed {one.beside}")
        assert float(one.outputs["output"][0]) == one.beside + 1
        one.release()
    calls = [text for text in said if not text.startswith("batch")]
    assert calls == ["call 0", "call 1", "landed 0", "call 2", "landed 1", "call 3", "landed 2", "landed 3"]


def test_results_are_those_of_their_batch() -> None:
    """Also if the model writes over its outputs, or returns its input, whose slot is let go after the call."""
    kept = torch.zeros(3)

    def module(x: torch.Tensor) -> dict[str, torch.Tensor]:
        kept.copy_(x)
        return {"kept": kept, "part": kept[1:], "given": x, "made": x * 2}

    assert landed(module, 9) == [(n, [n, n, n, 2.0 * n]) for n in range(9)]
    halves = landed(module, 9, head=lambda outputs: {"half": outputs["kept"] / 2, "kept": outputs["kept"]})
    assert halves == [(n, [n / 2, n]) for n in range(9)]


def test_shapes_may_differ_from_batch_to_batch() -> None:
    """Nothing that a schedule could hold, but in eager it runs."""

    def module(x: torch.Tensor) -> torch.Tensor:
        return x[:1].repeat(1 + int(x[0]) % 3)

    found = []
    for one in Flight.of_calls(module, CPU).run(batches(7)):
        found.append(one.outputs["output"].tolist())
        one.release()
    assert found == [[float(n)] * (1 + n % 3) for n in range(7)]


def test_large_results_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch then lands before the next call."""
    monkeypatch.setattr(flights, "_CALLS_BYTES", 11)
    called: list[int] = []

    def module(x: torch.Tensor) -> torch.Tensor:
        called.append(int(x[0]))
        return x + 1

    for one in Flight.of_calls(module, CPU).run(batches(5)):
        assert called[-1] == one.beside
        one.release()
    assert called == [0, 1, 2, 3, 4]


def test_batches_without_records_keep_their_place() -> None:
    """They have no outputs."""
    given = [(Arrived(x=torch.ones(2)), "a"), (None, "b"), (Arrived(x=torch.ones(2)), "c")]
    found = []
    for one in Flight.of_calls(lambda x: x, CPU).run(given):
        found.append((one.beside, sorted(one.outputs)))
        one.release()
    assert found == [("a", ["output"]), ("b", []), ("c", ["output"])]


def test_a_failing_call_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier batches are waited for. If one of them turns out to have failed on the device, that is what is raised."""
    waited: list[int] = []
    wait = landings.Lane.wait

    def counted(lane: Any) -> Any:
        waited.append(1)
        return wait(lane)

    monkeypatch.setattr(landings.Lane, "wait", counted)

    def module(x: torch.Tensor) -> torch.Tensor:
        if int(x[0]) == 1:
            raise IndexError("no such word")
        return x

    with pytest.raises(IndexError, match="no such word"):
        list(Flight.of_calls(module, CPU).run(batches(4)))
    assert waited == [1]

    def lost(_event: Event) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Event, "synchronize", lost)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        list(Flight.of_calls(module, CPU).run(batches(4)))


def test_an_early_end_waits_for_what_is_under_way() -> None:
    """So the pinned memory can be let go."""
    stream = Stream()
    flight = Flight.of_calls(lambda x: x + 1, CPU)
    flight._copy_out = stream  # type: ignore[assignment]
    running = flight.run(batches(9))
    next(running)
    assert stream.queued
    running.close()
    assert not stream.queued


def filled(count: int, size: int) -> Iterator[tuple[Arrived, int]]:
    for number in range(count):
        yield Arrived(x=torch.full((size,), float(number))), number


def turn(kept: Landings, count: int, size: int) -> None:
    """A flight of its own, for results of so many numbers. Two batches are held, also into the next turn."""
    held: list[Callable[[], None]] = getattr(kept, "held", [])
    for one in Flight.of_calls(lambda x: {"a": x, "b": x[:1]}, CPU).run(filled(count, size), landings=kept):
        while len(held) > 1:
            held.pop(0)()
        assert one.outputs["a"].tolist() == [float(one.beside)] * size
        assert one.outputs["b"].tolist() == [float(one.beside)]
        held.append(one.release)
    kept.held = held  # type: ignore[attr-defined]


def test_host_memory_is_kept_for_buckets_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bounded by the largest results, however many sizes there are."""
    made: list[weakref.ref[np.ndarray]] = []

    def pinned(count: int) -> torch.Tensor:
        memory = np.empty(count, dtype=np.uint8)
        made.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    monkeypatch.setattr(landings, "pinned_bytes", pinned)
    kept, sizes = Landings(), [3, 70, 500, 129, 1000, 64, 17]
    lanes = flights._CALLS + flights._LANDED
    for size in sizes:
        turn(kept, 9, size)
        alive = [memory.nbytes for ref in made if (memory := ref()) is not None]
        memory = None
        assert len(alive) <= 2 * lanes
        assert sum(alive) <= lanes * (4096 + 4)
    before = len(made)
    for size in sizes * 3:
        turn(kept, 9, size)
    assert len(made) == before


def test_more_lanes_are_made_only_for_flights_that_need_more() -> None:
    kept = Landings()
    for under_way, lanes in [(2, 4), (1, 4), (6, 8), (2, 8)]:
        flight = Flight.of_calls(lambda x: x + 1, CPU)
        flight._under_way = under_way
        for one in flight.run(filled(20, 5), landings=kept):
            assert one.outputs["output"].tolist() == [one.beside + 1.0] * 5
            one.release()
        assert len(kept._lanes) == kept._lanes.free == lanes


def test_lanes_are_free_after_an_end_that_was_not_foreseen() -> None:
    """A call that fails, and a generator that is closed early."""
    kept = Landings()

    def module(x: torch.Tensor) -> torch.Tensor:
        if int(x[0]) == 3:
            raise IndexError("no such word")
        return x

    running = Flight.of_calls(module, CPU).run(filled(9, 5), landings=kept)
    with pytest.raises(IndexError, match="no such word"):
        list(map(methodcaller("release"), running))
    assert kept._lanes.free == 4
    running = Flight.of_calls(lambda x: x, CPU).run(filled(9, 5), landings=kept)
    next(running).release()
    running.close()
    assert kept._lanes.free == 4


def test_results_keep_their_type_and_layout() -> None:
    given: dict[str, torch.Tensor] = {
        "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "flag": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3.0),
        "half": torch.rand(3).to(torch.bfloat16),
        "complex": torch.ones(3, dtype=torch.complex64),
        "expanded": torch.rand(1).expand(4),
    }
    kept = Landings()
    for _ in range(3):
        for one in Flight.of_calls(lambda _: dict(given), CPU).run(filled(2, 1), landings=kept):
            for name, tensor in given.items():
                result = one.outputs[name]
                assert torch.equal(result, tensor), name
                assert result.stride() == torch.empty_like(tensor).stride(), name
            one.release()
