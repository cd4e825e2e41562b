"""What computes the batches of a flight: replays of one instance of a schedule, or calls of a module in eager.

A seat has one stream, on which it queues one batch after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from nimble_jobs.engine import enqueue
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.engine.tail import Head, Tail

_TAILS = 4  # heads that are kept for later jobs


class Seat(Protocol):
    """Computes batches on its stream."""

    stream: torch.cuda.Stream
    left: torch.cuda.Event | None  # when the results of the previous batch are on the host

    def prepare(self, head: Head) -> None:
        """Apply `head` from now on. Raises what `head` raises, and EngineError."""

    def compute(self, batch: Arrived, began: torch.cuda.Event) -> Mapping[str, torch.Tensor]:
        """Queue the work on a batch, which begins with `began`; what the head makes of the outputs, by name.

        Nothing that is queued later may write to the results before `left`, if somebody refers to them.
        """
        ...


class ReplaySeat:
    """An instance, its stream, and the head over its outputs."""

    def __init__(self, instance: Instance, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.left: torch.cuda.Event | None = None
        self._instance = instance
        self._input = next(iter(instance.inputs.values()))
        self._tail: Tail | None = None
        self._tails: dict[Head, Tail] = {}

    def prepare(self, head: Head) -> None:
        """As `Seat` says."""
        if head not in self._tails:
            while len(self._tails) >= _TAILS:
                del self._tails[next(iter(self._tails))]
            self._tails[head] = Tail(head, self._instance, self.stream)
        self._tail = self._tails[head]

    def compute(self, batch: Arrived, began: torch.cuda.Event) -> Mapping[str, torch.Tensor]:
        """As `Seat` says."""
        tail, stream = self._tail, self.stream
        assert tail is not None
        x = batch.take(stream)
        enqueue.record(began, stream)
        enqueue.copy(self._input, x, stream)
        batch.let_go(stream)
        with torch.cuda.stream(stream):
            self._instance.replay()
            if self.left is not None:
                enqueue.wait(stream, self.left)
            tail.run()
        return tail.made


class EagerSeat:
    """A module, called on a stream that is the current one when batches are computed."""

    def __init__(self, module: Callable[[torch.Tensor], Any], stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.left: torch.cuda.Event | None = None
        self._module = module
        self._head: Head = dict

    def prepare(self, head: Head) -> None:
        """As `Seat` says."""
        self._head = head

    def compute(self, batch: Arrived, began: torch.cuda.Event) -> Mapping[str, torch.Tensor]:
        """As `Seat` says. Raises what the module and the head raise.

        The model may write over its outputs when it is called again, and they may lie in the batch's slot, which is
        let go. So they are copied, in the order of the stream.
        """
        x = batch.take(self.stream)
        enqueue.record(began, self.stream)
        outputs = flatten_outputs(self._module(x))
        own = {t.untyped_storage().data_ptr() for t in outputs.values()}
        made = {n: self._kept(t, own) for n, t in self._head(outputs).items()}
        batch.let_go(self.stream)
        return made

    def _kept(self, tensor: torch.Tensor, own: set[int]) -> torch.Tensor:
        if tensor.device != self.stream.device:
            return tensor.to("cpu", copy=True)
        return tensor.clone() if tensor.untyped_storage().data_ptr() in own else tensor
