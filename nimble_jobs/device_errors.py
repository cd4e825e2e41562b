"""Recognises errors of devices, also by what other libraries say: memory ran out, or a context is lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from nimble_jobs.errors import DeviceFault, NimbleError, OutOfMemory, RankLost

# Messages of CUDA, cuBLAS and cuDNN about faults after which every later call of the process fails too.
_FAULTS = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "uncorrectable ecc error",
    "invalid program counter",
    "cuda error",
    "cublas_status_execution_failed",
    "cudnn_status_execution_failed",
    "triton error [cuda]",
)
_NO_MEMORY = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed")


def device_error(error: BaseException) -> DeviceFault | OutOfMemory | RankLost | None:
    """What the error, or the first of its causes that says anything about a device, says about it."""
    for cause in causes(error):
        if isinstance(cause, DeviceFault | OutOfMemory | RankLost):
            return cause
        if fault := _by_words(cause):
            return fault
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def text_of(error: BaseException) -> str:
    """The text of an error. Making it may run user code, which may fail too."""
    try:
        return str(error)
    except Exception as e:  # noqa: BLE001  # whatever it is, the error that it belongs to is what counts
        return f"(making its message failed: {type(e).__name__})"


def words(error: BaseException) -> str:
    """Type and first paragraph. The rest of CUDA's messages is advice that belongs in a log, not in a table."""
    text = text_of(error).strip().split("\n\n")[0].split("\nCUDA kernel errors")[0].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _by_words(error: BaseException) -> DeviceFault | OutOfMemory | None:
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return OutOfMemory(words(error))
    if not isinstance(error, RuntimeError) or isinstance(error, NimbleError):
        return None
    text = text_of(error).lower()
    if any(part in text for part in _NO_MEMORY):
        return OutOfMemory(words(error))
    if (torch and isinstance(error, torch.AcceleratorError)) or any(part in text for part in _FAULTS):
        return DeviceFault(words(error))
    return None
