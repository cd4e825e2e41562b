"""Queues copies, fills, events and waits on streams without releasing the interpreter's lock.

torch releases the lock around each of these calls, although they take about a microsecond. A thread that releases it
queues up behind all other threads that run Python, and a pipeline makes about fifteen such calls per batch.

Each function does what torch's own call does. If the driver refuses a call, torch makes it instead: it raises the
error, or first makes the thread's missing context current.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from nimble_jobs.engine.cuda_driver import driver


def record(event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Let `event` happen once all work queued on `stream` so far is done."""
    handle = event.cuda_event
    if not handle or _held().cuEventRecord(handle, stream.cuda_stream):
        event.record(stream)


def wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    """Let all further work on `stream` wait for `event`."""
    handle = event.cuda_event
    if handle and _held().cuStreamWaitEvent(stream.cuda_stream, handle, 0):
        stream.wait_event(event)


def copy(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Copy between device memory and device or pinned host memory, on `stream`.

    From pageable host memory, the call may take as long as the copy itself.
    """
    alike = target.dtype == source.dtype and target.shape == source.shape
    if alike and target.is_contiguous() and source.is_contiguous():
        cuda = _held() if source.is_cuda else _released()
        if not cuda.cuMemcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream):
            return
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def fill(target: torch.Tensor, value: int, stream: torch.cuda.Stream) -> None:
    """Set all bytes of contiguous device memory to `value`, 0 to 255, on `stream`."""
    if _held().cuMemsetD8Async(target.data_ptr(), value, target.nbytes, stream.cuda_stream):
        with torch.cuda.stream(stream):
            target.view(torch.uint8).fill_(value)


def idle(stream: torch.cuda.Stream) -> bool:
    """Whether all work on `stream` is known to be done. An error of the device is left to whoever waits for it."""
    return not _held().cuStreamQuery(stream.cuda_stream)


@functools.cache
def _held() -> ctypes.CDLL:
    """The driver, called with the lock held."""
    return _typed(ctypes.PyDLL("libcuda.so.1"))


@functools.cache
def _released() -> ctypes.CDLL:
    """The driver, called with the lock released: for calls that may take long."""
    return _typed(driver())


def _typed(cuda: ctypes.CDLL) -> ctypes.CDLL:
    handle, address = ctypes.c_void_p, ctypes.c_uint64
    cuda.cuEventRecord.argtypes = (handle, handle)
    cuda.cuStreamWaitEvent.argtypes = (handle, handle, ctypes.c_uint)
    cuda.cuStreamQuery.argtypes = (handle,)
    cuda.cuMemcpyAsync.argtypes = (address, address, ctypes.c_size_t, handle)
    cuda.cuMemsetD8Async.argtypes = (address, ctypes.c_ubyte, ctypes.c_size_t, handle)
    return cuda
