"""Loads compiled kernels and creates streams through the CUDA driver's own interface.

Kernels are loaded without a compiler (cuModuleLoadData).

Modules stay loaded for the life of the process. Instances share functions, and an instance that was dropped without
being closed may still run on the device. So there is no moment at which cuModuleUnload is known to be safe.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib

import torch

from nimble_jobs.errors import DeviceFault, EngineError, OutOfMemory

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the legacy stream
_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_WITHOUT_ASKING = 48 * 1024  # bytes of shared memory that any kernel may use without an attribute

_FUNCTIONS: dict[tuple[int, bytes, str], int] = {}  # by device, SHA-256 of the binary, and name


def load_function(binary: bytes, name: str, shared_bytes: int, device: torch.device) -> int:
    """Handle of a function in a binary that was compiled for this GPU. Raises EngineError if it cannot be loaded."""
    key = (device.index or 0, hashlib.sha256(binary).digest(), name)  # a digest, so that the binary can be freed
    if key not in _FUNCTIONS:
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # makes torch create the context that the driver needs
            _FUNCTIONS[key] = _load(binary, name, shared_bytes)
    return _FUNCTIONS[key]


def _load(binary: bytes, name: str, shared_bytes: int) -> int:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    cuda = driver()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), binary), name)
    _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
    if shared_bytes > _WITHOUT_ASKING:
        _check(cuda.cuFuncSetCacheConfig(function, _PREFER_SHARED), name)
        _check(cuda.cuFuncSetAttribute(function, _DYNAMIC_SHARED, shared_bytes), name)
    assert function.value is not None
    return function.value


def _check(status: int, name: str) -> None:
    if status:
        raise EngineError(f"the kernel {name} cannot be loaded: {_text(status)}")


def create_stream(device: torch.device, *, urgent: bool = False) -> int:
    """Handle of a new stream in the context that torch uses, too. Raises OutOfMemory, DeviceFault.

    Blocks of an `urgent` one's kernels are the next to start when a multiprocessor has room.
    """
    cuda, stream, before = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    status = cuda.cuCtxPushCurrent_v2(_context(device.index or 0))  # this thread may have none
    if status == 0:
        if urgent:
            least, greatest = ctypes.c_int(), ctypes.c_int()
            status = cuda.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
            status = status or cuda.cuStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, greatest)
        else:
            status = cuda.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING)
        cuda.cuCtxPopCurrent_v2(ctypes.byref(before))
    if status:
        raise _lost(status)
    assert stream.value is not None
    return stream.value


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """The primary context of a device, which is kept to the end of the process."""
    cuda, device, context = driver(), ctypes.c_int(), ctypes.c_void_p()
    status = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index)
    status = status or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status:
        raise _lost(status)
    return context


def _lost(status: int) -> EngineError:
    if status == _NO_MEMORY:
        return OutOfMemory("not enough device memory for a stream")
    return DeviceFault(f"no stream can be created: {_text(status)}")


def _text(status: int) -> str:
    text = ctypes.c_char_p()
    driver().cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's library. Raises EngineError if it cannot be loaded."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise EngineError(f"the CUDA driver cannot be loaded: {e}") from e
