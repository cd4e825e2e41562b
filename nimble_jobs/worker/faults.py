"""Turns an exception of a job into the error that is stored with it, and recognises a lost device context."""

from __future__ import annotations

import sys

from nimble_jobs.device_errors import causes, device_error, text_of, words
from nimble_jobs.errors import DeviceFault, DiskTrouble, JobFailed, NimbleError
from nimble_jobs.patience import is_trouble


def explain(error: BaseException, device: str) -> NimbleError:
    """The error to store with the job. After a DeviceFault this process must not run another job on `device`."""
    if (known := device_error(error)) is not None:
        return known
    if not _context_answers(device):
        return DeviceFault(f"{words(error)}; the device no longer responds")
    if isinstance(error, NimbleError) and error.retryable:
        return error
    if any(is_trouble(cause, text_of(cause), begun=False) for cause in causes(error)):
        return DiskTrouble(text_of(error) if isinstance(error, NimbleError) else words(error))
    return error if isinstance(error, NimbleError) else JobFailed(words(error))


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
