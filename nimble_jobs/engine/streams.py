"""CUDA streams that each have one user at a time.

`torch.cuda.Stream` hands out the same 32 streams in turn, to torchvision's decoder too. So two users may get one
stream. If one of them captures a graph on it, work that the other's thread queues meanwhile becomes part of that graph:
it does not run now, and runs with every replay, on memory that may be free by then.

Streams are never destroyed, since libraries keep a workspace for every stream that they ever saw.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator

import torch

from nimble_jobs.engine.cuda_driver import create_stream

_IDLE: dict[tuple[int, bool], deque[torch.cuda.Stream]] = {}  # by device index, and by whether they are urgent
_URGENT: set[int] = set()  # handles


def take(device: torch.device, *, urgent: bool = False) -> torch.cuda.Stream:
    """A stream of the device that nobody else uses until `give_back`. Raises OutOfMemory, DeviceFault.

    Kernels of an `urgent` one go before those of other streams. That is for short ones: replays keep all
    multiprocessors busy, and behind them each would wait.
    """
    try:
        # Without a lock: `give_back` may be called by the garbage collector, anywhere.
        return _idle(device, urgent).pop()
    except IndexError:
        stream = torch.cuda.ExternalStream(create_stream(device, urgent=urgent), device)
        if urgent:
            _URGENT.add(stream.cuda_stream)
        return stream


def give_back(stream: torch.cuda.Stream) -> None:
    """Let others use a stream. Work may still run on it, which theirs then follows, but no capture."""
    _idle(stream.device, stream.cuda_stream in _URGENT).append(stream)


def take_for(owner: object, device: torch.device, *, urgent: bool = False) -> torch.cuda.Stream:
    """A stream that nobody but `owner` uses, until it is freed. Raises OutOfMemory, DeviceFault."""
    stream = take(device, urgent=urgent)
    weakref.finalize(owner, give_back, stream).atexit = False
    return stream


@contextlib.contextmanager
def borrowed(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A stream that nobody else uses inside the block. Raises OutOfMemory, DeviceFault."""
    stream = take(device)
    try:
        yield stream
    finally:
        give_back(stream)


def _idle(device: torch.device, urgent: bool) -> deque[torch.cuda.Stream]:
    return _IDLE.setdefault((device.index or 0, urgent), deque())
