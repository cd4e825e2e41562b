"""Turns an exception of a job into the error that is stored with it, and recognises a lost device context."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from nimble_jobs.errors import DeviceFault, DiskTrouble, JobFailed, NimbleError, OutOfMemory, RankLost
from nimble_jobs.patience import is_trouble

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


def explain(error: BaseException, device: str) -> NimbleError:
    """The error to store with the job. After a DeviceFault this process must not run another job on `device`."""
    for cause in _chain(error):
        if isinstance(cause, DeviceFault | OutOfMemory | RankLost):
            return cause
        if fault := _device_error(cause):
            return fault
    if not _context_answers(device):
        return DeviceFault(f"{_words(error)}; the device no longer responds")
    if isinstance(error, NimbleError) and error.retryable:
        return error
    if any(is_trouble(cause, _text(cause), begun=False) for cause in _chain(error)):
        return DiskTrouble(_text(error) if isinstance(error, NimbleError) else _words(error))
    return error if isinstance(error, NimbleError) else JobFailed(_words(error))


def _device_error(error: BaseException) -> NimbleError | None:
    torch = sys.modules.get("torch")
    text = _text(error).lower()
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return OutOfMemory(_words(error))
    if not isinstance(error, RuntimeError) or isinstance(error, NimbleError):
        return None
    if any(words in text for words in _NO_MEMORY):
        return OutOfMemory(_words(error))
    if (torch and isinstance(error, torch.AcceleratorError)) or any(words in text for words in _FAULTS):
        return DeviceFault(_words(error))
    return None


def _context_answers(device: str) -> bool:
    torch = sys.modules.get("torch")
    if device == "cpu" or torch is None:
        return True
    from nimble_jobs.engine.device import synchronize

    try:
        synchronize(torch.device(device))
    except RuntimeError:  # kernels fail asynchronously: a fault may show only here
        return False
    return True


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _text(error: BaseException) -> str:
    """The text of an error. Making it may run user code, which may fail too."""
    try:
        return str(error)
    except Exception as e:  # noqa: BLE001  # whatever it is, the error that it belongs to is what counts
        return f"(making its message failed: {type(e).__name__})"


def _words(error: BaseException) -> str:
    """Type and first paragraph. The rest of CUDA's messages is advice that belongs in a log, not in a table."""
    text = _text(error).strip().split("\n\n")[0].split("\nCUDA kernel errors")[0].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
