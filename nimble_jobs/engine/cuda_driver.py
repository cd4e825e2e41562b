"""Loads compiled kernels through the CUDA driver's own interface (cuModuleLoadData), without a compiler.

Modules stay loaded for the life of the process. Instances share functions, and an instance that was dropped without
being closed may still run on the device. So there is no moment at which cuModuleUnload is known to be safe.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib

import torch

from nimble_jobs.errors import EngineError

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
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
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"the kernel {name} cannot be loaded: {(text.value or b'unknown error').decode()}")


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's library. Raises EngineError if it cannot be loaded."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise EngineError(f"the CUDA driver cannot be loaded: {e}") from e
