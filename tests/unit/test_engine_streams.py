"""Streams: each has one user at a time. A stand-in makes the handles, since there is no CUDA here."""

from __future__ import annotations

import ast
import ctypes
import gc
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import nimble_jobs
from nimble_jobs.engine import cuda_driver, streams
from nimble_jobs.errors import DeviceFault, OutOfMemory

ROOT = Path(nimble_jobs.__file__).parent
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Stream:
    """As much of a stream as is asked for."""

    cuda_stream: int
    device: torch.device


@pytest.fixture(autouse=True)
def _handles(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr(streams, "_IDLE", {})
    monkeypatch.setattr(streams, "_URGENT", set())
    monkeypatch.setattr(streams, "create_stream", lambda _device, urgent: (-1 if urgent else 1) * next(numbers))
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)


def test_no_two_users_have_one_stream() -> None:
    """However many there are, and on each device."""
    other = torch.device("cuda", 1)
    taken = [streams.take(device) for device in (DEVICE, other) for _ in range(40)]
    assert len({stream.cuda_stream for stream in taken}) == 80
    streams.give_back(taken[0])
    assert streams.take(other) not in taken
    assert streams.take(DEVICE, urgent=True) not in taken
    assert streams.take(DEVICE) is taken[0]


def test_urgent_streams_are_kept_apart() -> None:
    """Whose kernels would otherwise go before others', or wait behind them, by chance."""
    urgent = streams.take(DEVICE, urgent=True)
    assert urgent.cuda_stream < 0
    streams.give_back(urgent)
    assert streams.take(DEVICE).cuda_stream > 0
    assert streams.take(DEVICE, urgent=True) is urgent


def test_a_stream_is_free_again_when_its_owner_is() -> None:
    """Also if nothing but the garbage collector finds the owner."""

    class Owner:
        def __init__(self) -> None:
            self.stream, self.me = streams.take_for(self, DEVICE), self

    handle = Owner().stream.cuda_stream
    gc.collect()
    with streams.borrowed(DEVICE) as first, streams.borrowed(DEVICE) as second:
        assert first.cuda_stream == handle != second.cuda_stream
    owner = Owner()
    lent: list[torch.cuda.Stream] = []

    def fail() -> None:
        with streams.borrowed(DEVICE) as stream:
            lent.append(stream)
            raise ValueError("so")

    with pytest.raises(ValueError, match=r"^so$"):
        fail()
    assert streams.take(DEVICE) is lent[0] is not owner.stream


class Driver:
    """Notes calls. Device 1 has no memory left, device 2 has a fault."""

    now = 0

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:  # noqa: N802
        context._obj.value = 100 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        Driver.now = context.value or 0
        return 0

    def cuCtxPopCurrent_v2(self, _context: Any) -> int:  # noqa: N802
        Driver.now = 0
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:  # noqa: N802
        assert flags == 1
        stream._obj.value = 7
        return {100: 0, 101: 2}.get(Driver.now, 700)

    def cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> int:  # noqa: N802
        least._obj.value, greatest._obj.value = 0, -5
        return 0

    def cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: ctypes.c_int) -> int:  # noqa: N802
        assert (flags, priority.value) == (1, -5)
        stream._obj.value = 8
        return {100: 0, 101: 2}.get(Driver.now, 700)

    def cuGetErrorString(self, _status: int, text: Any) -> None:  # noqa: N802
        text._obj.value = b"an illegal memory access was encountered"


def test_a_stream_is_created_whatever_the_threads_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is as it was afterwards, also after a failure."""
    monkeypatch.setattr(cuda_driver, "driver", Driver)
    cuda_driver._context.cache_clear()
    for urgent, handle in ((False, 7), (True, 8)):
        assert cuda_driver.create_stream(DEVICE, urgent=urgent) == handle
        assert Driver.now == 0
        with pytest.raises(OutOfMemory):
            cuda_driver.create_stream(torch.device("cuda", 1), urgent=urgent)
        with pytest.raises(DeviceFault, match=r"^no stream can be created: an illegal memory access was encountered$"):
            cuda_driver.create_stream(torch.device("cuda", 2), urgent=urgent)
        assert Driver.now == 0
    cuda_driver._context.cache_clear()


def test_nobody_takes_a_stream_that_torch_hands_out_to_others() -> None:
    """Benchmarks do, as users do."""
    takes = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if "bench" not in path.relative_to(ROOT).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.cuda.Stream", "torch.Stream", "cuda.Stream")
    ]
    assert takes == []
