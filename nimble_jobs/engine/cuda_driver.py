"""Load compiled kernels through the CUDA driver's own interface (cuModuleLoadData), without any compiler.

What is loaded stays loaded: instances share functions, and one that is let go of without being closed may still run on
the device when the last Python reference to its kernels goes, so that no moment is known to be safe for cuModuleUnload.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib

import torch

from nimble_jobs.errors import EngineError

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
_WITHOUT_ASKING = 48 * 1024  # bytes of shared memory that every kernel may have

_FUNCTIONS: dict[tuple[int, bytes, str], int] = {}  # by device, SHA-256 of the binary, and name


def load_function(binary: bytes, name: str, shared_bytes: int, device: torch.device) -> int:
    """Handle of a function of a binary that was compiled for this GPU. Raises EngineError where it cannot be loaded."""
    key = (device.index or 0, hashlib.sha256(binary).digest(), name)  # a binary is not kept when its kernels go
    if key not in _FUNCTIONS:
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # the driver needs the context that torch makes
            _FUNCTIONS[key] = _load(binary, name, shared_bytes)
    return _FUNCTIONS[key]


def _load(binary: bytes, name: str, shared_bytes: int) -> int:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _driver()
    _check(driver.cuModuleLoadData(ctypes.byref(module), binary), name)
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
    if shared_bytes > _WITHOUT_ASKING:
        _check(driver.cuFuncSetCacheConfig(function, _PREFER_SHARED), name)
        _check(driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED, shared_bytes), name)
    assert function.value is not None
    return function.value


def _check(status: int, name: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"the kernel {name} cannot be loaded: {(text.value or b'unknown error').decode()}")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise EngineError(f"the CUDA driver cannot be reached: {e}") from e
