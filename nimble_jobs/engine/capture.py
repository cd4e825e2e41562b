"""Captures a bound program and replays it: as one CUDA graph on a GPU, as a list of calls on a CPU.

An instance owns its inputs, intermediates and outputs. Two replays of one instance must not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from nimble_jobs.device_errors import device_error
from nimble_jobs.engine.bind import Bound, arena_plan, bind, planned_bytes
from nimble_jobs.engine.captures import UNCAPTURED, capturing
from nimble_jobs.engine.device import able, synchronize
from nimble_jobs.engine.launch import run_on_streams, streams
from nimble_jobs.engine.private.runtime import clear_workspaces
from nimble_jobs.engine.streams import borrowed
from nimble_jobs.errors import CaptureFailed, EngineError, OutOfMemory
from nimble_jobs.graph.memory import MemoryPlan
from nimble_jobs.schedule import Plan, Program


class Instance(Protocol):
    """A captured schedule over static buffers."""

    inputs: dict[str, torch.Tensor]  # write here before `replay`
    outputs: dict[str, torch.Tensor]  # read here after `replay`; the next replay overwrites them
    bytes: int  # device memory held beyond the module's state

    def replay(self) -> None:
        """Launch every task once, on the current stream."""

    def close(self) -> None:
        """Release the memory. The instance cannot be replayed afterwards."""


def capture(
    program: Program,
    plan: Plan,
    *,
    state: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    device: torch.device,
    kernels: Mapping[str, Callable[..., None]] = MappingProxyType({}),
    memory: MemoryPlan | None = None,
    example: Mapping[str, torch.Tensor] | None = MappingProxyType({}),
) -> Instance:
    """Prepare a program for replays on `device`. `memory` places the intermediates (default: `arena_plan`).

    It runs once before, on the inputs in `example`, or on zeros for inputs that are not in it. Some operators cannot
    take zeros. With None a GPU does not run it: for another capture of a plan by the thread that captured it last.

    Raises CaptureFailed if the device refuses, once that run has ended, EngineError if something else stands against
    it, and OutOfMemory if it does not fit.
    """
    memory = memory or arena_plan(program, plan)
    try:
        bound = bind(program, plan, state=state, constants=constants, device=device, kernels=kernels, memory=memory)
        for name, tensor in bound.inputs.items():
            if example and name in example:
                tensor.copy_(example[name])
            else:
                tensor.zero_()
        return (
            _GraphInstance(bound, device, plan.streams, run_first=example is not None)
            if able(device).graphs
            else _CallInstance(bound, planned_bytes(program, plan, memory, device))
        )
    except RuntimeError as e:
        # Libraries besides torch's allocator say it in words of their own, and other ranks wait for what this one does.
        if isinstance(e, OutOfMemory) or not isinstance(device_error(e), OutOfMemory):
            raise
        raise OutOfMemory(f"not enough memory on {device} to capture the schedule: {e}") from e


class _CallInstance:
    """Replays by calling the recorded operators one after another. The module's own code does not run."""

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
    """One CUDA graph with its own memory pool."""

    def __init__(self, bound: Bound, device: torch.device, count: int, *, run_first: bool) -> None:
        self._device = device
        pool = streams(device, count) if count > 1 else []
        self._bound: Bound | None = bound
        self.inputs = bound.inputs
        with torch.cuda.device(device), torch.no_grad(), borrowed(device) as stream:
            if run_first:  # so that kernels are loaded, and libraries choose algorithms
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    _launch(bound, pool)
                torch.cuda.current_stream(device).wait_stream(stream)
            synchronize(device)
            # Workspaces that are made during the capture lie in this graph's own pool and live as long as it does.
            # A workspace from elsewhere could be freed while the graph still uses it (pytorch#193402).
            clear_workspaces()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(device)
            self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
            try:
                with capturing(self._graph, stream):
                    self.outputs = _launch(bound, pool)
            except torch.OutOfMemoryError:
                raise
            except UNCAPTURED as e:
                raise CaptureFailed(f"the schedule cannot be captured: {str(e).splitlines()[0]}") from e
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
