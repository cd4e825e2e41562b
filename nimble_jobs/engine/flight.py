"""Several replays in flight: instances on streams of their own, input and output copied while others compute.

Host memory on both sides is pinned. A batch goes host -> device staging on a copy stream, staging -> the instance's
input on the instance's stream, and its outputs go the same way back, so that no replay waits for a copy of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.launch import flight_streams

T = TypeVar("T")


class Flight:
    """Runs batches through instances of one schedule, results in order.

    The results of a batch are host tensors that stay valid until the next one is asked for.
    """

    def __init__(self, instances: Sequence[Instance], device: torch.device) -> None:
        self._instances = tuple(instances)
        self._device = device
        self._lanes: list[_Lane] = []
        if device.type == "cuda":
            copy_in, copy_out = torch.cuda.Stream(device), torch.cuda.Stream(device)
            streams = flight_streams(device, len(self._instances))
            count = max(2, len(self._instances))
            self._lanes = [
                _Lane(self._instances[i % len(self._instances)], streams[i % len(streams)], copy_in, copy_out, device)
                for i in range(count + 1)  # one more, to be filled on the host while all others are under way
            ]

    def run(self, batches: Iterable[tuple[torch.Tensor, T]]) -> Iterator[tuple[dict[str, torch.Tensor], T]]:
        """Outputs by name of each batch, with what came beside it, in the order of `batches`."""
        if not self._lanes:
            yield from self._one_by_one(batches)
            return
        free = deque(self._lanes)
        busy: deque[tuple[_Lane, T]] = deque()
        with torch.no_grad():
            try:
                for x, beside in batches:
                    if not free:
                        lane, first = busy.popleft()
                        yield lane.results(), first
                        free.append(lane)
                    lane = free.popleft()
                    lane.start(x)
                    busy.append((lane, beside))
                while busy:
                    lane, first = busy.popleft()
                    yield lane.results(), first
                    free.append(lane)
            finally:
                for lane, _ in busy:
                    lane.results()

    def _one_by_one(self, batches: Iterable[tuple[torch.Tensor, T]]) -> Iterator[tuple[dict[str, torch.Tensor], T]]:
        instance = self._instances[0]
        name = next(iter(instance.inputs))
        for x, beside in batches:
            instance.inputs[name].copy_(x)
            instance.replay()
            yield instance.outputs, beside


class _Lane:
    """Buffers for one batch on its way through an instance."""

    def __init__(
        self,
        instance: Instance,
        stream: torch.cuda.Stream,
        copy_in: torch.cuda.Stream,
        copy_out: torch.cuda.Stream,
        device: torch.device,
    ) -> None:
        self._instance = instance
        self._stream, self._copy_in, self._copy_out = stream, copy_in, copy_out
        self._input = next(iter(instance.inputs.values()))
        self._host_in = torch.empty_like(self._input, device="cpu", pin_memory=True)
        self._staged_in = torch.empty_like(self._input)
        self._staged_out = {n: torch.empty_like(t) for n, t in instance.outputs.items()}
        self._host_out = {n: torch.empty_like(t, device="cpu", pin_memory=True) for n, t in instance.outputs.items()}
        self._arrived, self._computed, self._done = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
        torch.cuda.synchronize(device)

    def start(self, x: torch.Tensor) -> None:
        """Send a batch on its way; returns once the host may reuse `x`."""
        self._host_in.copy_(x)
        with torch.cuda.stream(self._copy_in):
            self._staged_in.copy_(self._host_in, non_blocking=True)
            self._arrived.record(self._copy_in)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._arrived)
            self._input.copy_(self._staged_in, non_blocking=True)
            self._instance.replay()
            for name, tensor in self._instance.outputs.items():
                self._staged_out[name].copy_(tensor, non_blocking=True)
            self._computed.record(self._stream)
        with torch.cuda.stream(self._copy_out):
            self._copy_out.wait_event(self._computed)
            for name, tensor in self._staged_out.items():
                self._host_out[name].copy_(tensor, non_blocking=True)
            self._done.record(self._copy_out)

    def results(self) -> dict[str, torch.Tensor]:
        """Wait for the batch and return its outputs on the host."""
        self._done.synchronize()
        return self._host_out
