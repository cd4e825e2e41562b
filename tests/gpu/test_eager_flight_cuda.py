"""Batches that run in eager on a GPU: one is under way while another one is copied to the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nimble_jobs.engine.arrivals import Arrivals, Arrived
from nimble_jobs.engine.flight import Flight

_BUSY_CYCLES = 2_000_000  # about a millisecond
_ROWS, _WIDTH = 64, 4096


class Overwriting(nn.Module):
    """Returns its input, memory of its own that the next call writes over, and something new; slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(_ROWS, _WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        torch.cuda._sleep(_BUSY_CYCLES)
        kept = self.get_buffer("kept")
        kept.copy_(x)
        return {"given": x, "kept": kept, "part": kept[:, ::2], "made": x * 2}


def uploaded(arrivals: Arrivals, count: int) -> Iterator[tuple[Arrived | None, int]]:
    for number in range(count):
        host = torch.full((_ROWS, _WIDTH), float(number)).pin_memory()
        arrived = arrivals.upload(host)
        yield arrived, number
        assert arrived is not None
        assert arrived.ready is not None
        arrived.ready.synchronize()


def test_each_batch_has_its_own_results(device: torch.device) -> None:
    """Though the model writes over them, and the slots of two hundred batches and their memory are used again."""
    module = Overwriting().to(device)
    arrivals = Arrivals((_ROWS, _WIDTH), torch.float32, device, in_flight=1)
    arrivals.begin()
    seen = 0
    for landed in Flight.of_calls(module, device).run(uploaded(arrivals, 200)):
        number = landed.beside
        assert number == seen
        for name, expected in (("given", number), ("kept", number), ("part", number), ("made", 2 * number)):
            values = landed.outputs[name]
            assert bool((values == expected).all()), (name, number)
            values.fill_(-1)  # the host's memory is ours until it is released
        landed.release()
        seen += 1
    assert seen == 200


def test_the_host_is_ahead_of_the_device(device: torch.device) -> None:
    """When a batch lands, the next one has been called already."""
    called = 0

    class Counted(Overwriting):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            nonlocal called
            called += 1
            return super().forward(x)

    module = Counted().to(device)
    arrivals = Arrivals((_ROWS, _WIDTH), torch.float32, device, in_flight=1)
    arrivals.begin()
    for landed in Flight.of_calls(module, device).run(uploaded(arrivals, 20)):
        assert called == min(20, landed.beside + 2)
        assert landed.replay_s > 0
        landed.release()


def test_results_in_memory_that_the_allocator_uses_again(device: torch.device) -> None:
    """What a head makes is freed by nobody before it is on the host, whatever is allocated meanwhile."""

    class Churning(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                torch.empty_like(x).fill_(-7)
            return x + 1

    module = Churning().to(device)
    arrivals = Arrivals((_ROWS, _WIDTH), torch.float32, device, in_flight=1)
    arrivals.begin()

    def head(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": outputs["output"] + 1}

    for landed in Flight.of_calls(module, device).run(uploaded(arrivals, 100), head):  # type: ignore[arg-type]
        assert bool((landed.outputs["sum"] == landed.beside + 2).all()), landed.beside
        landed.release()


def test_a_failing_call_raises_its_own_error(device: torch.device) -> None:
    """Batches before it are waited for, and the device goes on."""

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(x[0, 0]) == 3:
                raise IndexError("no such word")
            return x + 1

    arrivals = Arrivals((_ROWS, _WIDTH), torch.float32, device, in_flight=1)
    arrivals.begin()
    seen = []

    def run() -> None:
        for landed in Flight.of_calls(Failing(), device).run(uploaded(arrivals, 9)):
            seen.append(landed.beside)
            landed.release()

    with pytest.raises(IndexError, match="no such word"):
        run()
    assert seen == [0, 1]
    assert float(torch.ones(1, device=device)) == 1
