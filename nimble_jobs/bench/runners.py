"""One face for everything that can be run: load inputs, run, read outputs. All times are taken through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import EngineError

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")
WARM_CALLS = 3  # the first compiles, the second may capture, the third runs what was captured


class Runner(Protocol):
    """A system that is ready to run one model."""

    loads_free: bool  # loading tensors that lie on the device launches nothing

    def load(self, inputs: Tensors) -> None:
        """Make these the inputs of the next run; tensors on the host are copied without waiting."""

    def run(self) -> None:
        """Launch everything once, on the current stream."""

    def outputs(self) -> dict[str, torch.Tensor]:
        """What the last run gave; the next one may overwrite it."""

    def close(self) -> None:
        """Give memory back."""


class CallRunner:
    """A function of tensors, as eager modules and compiled ones are."""

    loads_free = True

    def __init__(self, call: Callable[..., Any], device: torch.device) -> None:
        self._call: Callable[..., Any] | None = call
        self._device = device
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._result: Any = None

    def load(self, inputs: Tensors) -> None:
        self._inputs = tuple(
            t if t.device.type == self._device.type else t.to(self._device, non_blocking=True) for t in inputs.values()
        )

    def run(self) -> None:
        assert self._call is not None
        self._result = None  # or memory that replays share would count as taken
        self._result = self._call(*self._inputs)

    def outputs(self) -> dict[str, torch.Tensor]:
        return flatten_outputs(self._result)

    def close(self) -> None:
        self._call = self._result = None
        self._inputs = ()


class StaticRunner:
    """Something that replays over buffers of its own."""

    loads_free = False

    def __init__(
        self,
        replay: Callable[[], object],
        inputs: Tensors,
        outputs: Callable[[], dict[str, torch.Tensor]],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._replay = replay
        self._inputs = inputs
        self._outputs = outputs
        self._close = close

    def load(self, inputs: Tensors) -> None:
        for buffer, given in zip(self._inputs.values(), inputs.values(), strict=True):
            buffer.copy_(given, non_blocking=True)

    def run(self) -> None:
        self._replay()

    def outputs(self) -> dict[str, torch.Tensor]:
        return self._outputs()

    def close(self) -> None:
        self._close()
        self._inputs = {}
        self._outputs = dict
        self._replay = self._close = lambda: None


def capture(
    launch: Callable[[], T], device: torch.device, *, warm_up: Callable[[], object] | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of what `launch` does after three calls of `warm_up`, else of itself; and what it returned.

    Raises EngineError where it cannot be captured.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_CALLS):
            (warm_up or launch)()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            result = launch()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        raise EngineError(f"cannot be captured: {str(e).splitlines()[0]}") from e
    return graph, result
