"""CUDA Stream Sanitizer over a plan's launches: the events and waits that `engine.launch` makes, and who touches what.

The sanitizer knows a tensor by the address of its first element, so that it sees what passes between tasks as whole
tensors. Views that begin elsewhere, and what tasks share in bytes only, are for `graph.check`.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.cuda._sanitizer import ArgumentHandler, CUDASanitizerDispatchMode, CUDASanitizerErrors, EventHandler

from nimble_jobs.engine.bind import Bound
from nimble_jobs.engine.launch import run_on_streams

WHOLE = ("inception", "nas", "residual")  # networks whose tasks pass on whole tensors
CAPS = (None, 3)  # bounds on their streams
_FRAMES = 16  # of the stack that the sanitizer notes at each launch: all of pytest's take a sixth of the time
FORK = 0  # number of the event that streams wait for before their first task; those of tasks follow


@contextlib.contextmanager
def blind_to_empty_tensors() -> Iterator[None]:
    """The sanitizer tells empty tensors, which have no address, by the identity of Python objects. That comes again
    with other objects, and would be a race of nothing.
    """
    handle = ArgumentHandler._handle_argument

    def handle_bytes(self: ArgumentHandler, value: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.numel():
            handle(self, value, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArgumentHandler, "_handle_argument", handle_bytes)
        yield


def marked(bound: Bound) -> int:
    """How many tasks others wait for, each with an event."""
    return sum(step.marked for step in bound.steps)


def launched(bound: Bound, pool: list[Any], x: torch.Tensor) -> str | None:
    """Fill the input, launch, read the outputs; what the sanitizer, which must be at work, says. None: clean."""
    try:
        with torch.no_grad():
            bound.inputs["x"].copy_(x)
            for tensor in run_on_streams(bound, pool).values():
                tensor.clone()
    except CUDASanitizerErrors as e:
        return "\n".join(str(error) for error in e.errors)
    return None


def numbered(event: type, missing: int | None) -> type:
    """A class of events, of which the one made as number `missing` is never recorded: who waits for it does not."""
    made = iter(range(1 << 30))

    class Numbered(event):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.number = next(made)

        def record(self, stream: Any = None) -> None:
            if self.number != missing:
                super().record(stream)

    return Numbered


class CpuDevice:
    """Streams and events that tell a handler of the sanitizer what they do, as CUDA's tell the real one."""

    def __init__(self) -> None:
        self.mode = _OnCpu()
        self.stack = [Stream(self, 0)]

    @property
    def handler(self) -> EventHandler:
        return self.mode.event_handler

    def pool(self, count: int) -> list[Stream]:
        return [Stream(self, i + 1) for i in range(count)]

    def check(
        self, bound: Bound, streams: int, x: torch.Tensor, *, missing: int | None = None, times: int = 1
    ) -> str | None:
        """`launched` on the CPU, so many times in a row, without the event of number `missing`."""
        self.mode.event_handler = EventHandler()
        device = self

        class Bare(Event):
            owner = device

        short = functools.partial(traceback.StackSummary.extract, limit=_FRAMES)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(traceback.StackSummary, "extract", short)
            patch.setattr(torch.cuda, "Event", numbered(Bare, missing))
            patch.setattr(torch.cuda, "current_stream", lambda *_: self.stack[-1])
            patch.setattr(torch.cuda, "stream", self.inside)
            patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
            with blind_to_empty_tensors(), self.mode:
                pool = self.pool(streams)
                return next(filter(None, (launched(bound, pool, x) for _ in range(times))), None)

    def inside(self, stream: Stream) -> Inside:
        return Inside(self, stream)


class Stream:
    def __init__(self, device: CpuDevice, number: int) -> None:
        self.device = device
        self.cuda_stream = number

    def wait_event(self, event: Event) -> None:
        if event.recorded:
            self.device.handler._handle_event_wait(id(event), self.cuda_stream)


class Event:
    owner: CpuDevice
    recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True
        self.owner.handler._handle_event_creation(id(self))
        self.owner.handler._handle_event_record(id(self), stream.cuda_stream)


class Inside:
    """`torch.cuda.stream`."""

    def __init__(self, device: CpuDevice, stream: Stream) -> None:
        self.device, self.stream = device, stream

    def __enter__(self) -> None:
        self.device.stack.append(self.stream)

    def __exit__(self, *_: object) -> None:
        self.device.stack.pop()


class _OnCpu(CUDASanitizerDispatchMode):
    """The sanitizer's own mode, which hears of allocations from here: on the CPU no allocator tells it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(_Allocating(func, self.event_handler), types, args, kwargs)


class _Allocating:
    def __init__(self, func: Any, handler: EventHandler) -> None:
        self._func, self._handler = func, handler
        self._schema = func._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, tuple(kwargs.values())))}
        result = self._func(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in given and tensor.data_ptr():
                self._handler._handle_memory_allocation(tensor.data_ptr())
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
