"""Pins host memory, so that its pages stay in place and a device can copy from and to it without the host waiting."""

from __future__ import annotations

import logging
import weakref

import numpy as np
import torch

from nimble_jobs.engine.device import able

log = logging.getLogger(__name__)


def pin(memory: np.ndarray, device: torch.device) -> bool:
    """Pin memory, uint8 [n], for copies to a CUDA device until the array is freed. False if that is not possible.

    Without it, copies give the same bytes but take the host's time.
    """
    if not able(device).separate_memory or not memory.nbytes:
        return False
    runtime = torch.cuda.cudart()
    address = memory.ctypes.data
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if code != 0:
        log.warning("%d bytes could not be pinned: CUDA error %d; copies to the device are slower", memory.nbytes, code)
        return False
    weakref.finalize(memory, _unpin, address).atexit = False
    return True


def pinned_bytes(count: int) -> torch.Tensor:
    """Pinned memory, uint8 [count]."""
    return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
