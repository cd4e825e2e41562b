"""Capture a bound program, and replay it: one CUDA graph on a GPU, the list of calls on a CPU.

An instance owns its inputs, intermediates and outputs; two replays of one instance must not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from nimble_jobs.engine.bind import Bound, arena_plan, bind, planned_bytes
from nimble_jobs.engine.captures import UNCAPTURED, cleared_if_failed
from nimble_jobs.engine.device import able, synchronize
from nimble_jobs.engine.launch import run_on_streams, streams
from nimble_jobs.engine.private.runtime import clear_workspaces
from nimble_jobs.errors import EngineError, OutOfMemory
from nimble_jobs.graph.memory import MemoryPlan
from nimble_jobs.schedule import Plan, Program

_WARM_UP_RUNS = 3  # lets libraries choose algorithms and make workspaces before the capture


class Instance(Protocol):
    """A captured schedule over static buffers."""

    inputs: dict[str, torch.Tensor]  # write here before `replay`
    outputs: dict[str, torch.Tensor]  # read here after it; overwritten by the next replay
    bytes: int  # device memory held beyond the module's state

    def replay(self) -> None:
        """Launch every task once, on the current stream."""

    def close(self) -> None:
        """Give the memory back. The instance cannot be replayed afterwards."""


def capture(
    program: Program,
    plan: Plan,
    *,
    state: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    device: torch.device,
    kernels: Mapping[str, Callable[..., None]] = MappingProxyType({}),
    memory: MemoryPlan | None = None,
    example: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Instance:
    """Make a program ready to be replayed on `device`, its intermediates where `memory` says (default: `arena_plan`).

    It is run first, over the inputs of `example`, and over zeros where there are none: some operators cannot take
    zeros.

    Raises EngineError where it cannot be captured, OutOfMemory where it does not fit.
    """
    memory = memory or arena_plan(program, plan)
    try:
        bound = bind(program, plan, state=state, constants=constants, device=device, kernels=kernels, memory=memory)
        for name, tensor in bound.inputs.items():
            if name in example:
                tensor.copy_(example[name])
            else:
                tensor.zero_()
        return (
            _GraphInstance(bound, device, plan.streams)
            if able(device).graphs
            else _CallInstance(bound, planned_bytes(program, plan, memory, device))
        )
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"not enough memory on {device} to capture the schedule: {e}") from e


class _CallInstance:
    """Replays by calling the recorded operators one after another, without any module's code."""

    def __init__(self, bound: Bound, nbytes: int) -> None:
        self._bound: Bound | None = bound
        self.inputs = bound.inputs
        with torch.no_grad():
            self.outputs = bound.run()
        self.bytes = nbytes

    def replay(self) -> None:
        if self._bound is None:
            raise EngineError("the instance is closed")
        with torch.no_grad():
            self.outputs = self._bound.run()

    def close(self) -> None:
        self._bound = None
        self.inputs = {}
        self.outputs = {}


class _GraphInstance:
    """One CUDA graph over a memory pool of its own."""

    def __init__(self, bound: Bound, device: torch.device, count: int) -> None:
        self._device = device
        pool = streams(device, count) if count > 1 else []
        self._bound: Bound | None = bound
        self.inputs = bound.inputs
        with torch.cuda.device(device), torch.no_grad():
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_RUNS):
                    _launch(bound, pool)
                    synchronize(device)
            torch.cuda.current_stream(device).wait_stream(stream)
            synchronize(device)
            # Workspaces that are made during the capture lie in this graph's own pool, and live and die with it:
            # those of others could be freed under it (pytorch#193402).
            clear_workspaces()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(device)
            self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
            try:
                # other threads may read ahead and pin memory while this one captures
                with (
                    cleared_if_failed(device),
                    torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
                ):
                    self.outputs = _launch(bound, pool)
            except torch.OutOfMemoryError:
                raise
            except UNCAPTURED as e:
                raise EngineError(f"the schedule cannot be captured: {str(e).splitlines()[0]}") from e
            finally:
                clear_workspaces()
            self.bytes = torch.cuda.memory_reserved(device) - before + bound.nbytes

    def replay(self) -> None:
        if self._graph is None:
            raise EngineError("the instance is closed")
        self._graph.replay()

    def close(self) -> None:
        synchronize(self._device)
        if self._graph is not None:
            self._graph.reset()
        self._graph = None
        self._bound = None
        self.inputs = {}
        self.outputs = {}


def _launch(bound: Bound, pool: list[torch.cuda.Stream]) -> dict[str, torch.Tensor]:
    return run_on_streams(bound, pool) if pool else bound.run()
