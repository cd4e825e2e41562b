"""Which error a job is left with, and which one means that the device's context is lost."""

from __future__ import annotations

import errno

import pytest
import torch

from nimble_jobs.errors import (
    CheckFailed,
    DataError,
    DeviceFault,
    DiskTrouble,
    EngineError,
    JobFailed,
    NimbleError,
    OutOfMemory,
    StoreTrouble,
)
from nimble_jobs.worker.faults import explain

ASSERT = (
    "CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might lie."
)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (torch.AcceleratorError(ASSERT), DeviceFault, "AcceleratorError: CUDA error: device-side assert triggered"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceFault, "illegal memory access"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), DeviceFault, "CUDNN_STATUS_EXECUTION_FAILED"),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), DeviceFault, "misaligned"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OutOfMemory, "Tried to allocate"),
        (torch.AcceleratorError("CUDA error: out of memory"), OutOfMemory, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), OutOfMemory, "DefaultCPUAllocator"),
        (RuntimeError("cuBLAS: CUBLAS_STATUS_ALLOC_FAILED"), OutOfMemory, "CUBLAS"),
        (MemoryError(), OutOfMemory, "MemoryError"),
        (ValueError("illegal memory access is what this sentence is about"), JobFailed, "ValueError: illegal"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), JobFailed, "RuntimeError: mat1"),
        (KeyError("weights"), JobFailed, "KeyError: 'weights'"),
        (DataError("x.npy: no such file"), DataError, "x.npy: no such file"),
        (OSError(errno.ENOSPC, "No space left on device"), DiskTrouble, "No space left on device"),
        (OSError(errno.EIO, "Input/output error"), DiskTrouble, "Input/output error"),
        (PermissionError(errno.EACCES, "Permission denied"), JobFailed, "Permission denied"),
        (StoreTrouble("locked for 30 s"), StoreTrouble, "locked for 30 s"),
        (CheckFailed(), CheckFailed, "does not agree"),
    ],
)
def test_errors(error: BaseException, kind: type[NimbleError], text: str) -> None:
    """Each error keeps its words and gets the class that says whether another attempt, or this process, may go on."""
    found = explain(error, "cpu")
    assert type(found) is kind
    assert text in str(found)
    assert "stacktrace below" not in str(found)


def test_causes_count() -> None:
    """A fault wrapped by another error is still a fault; one that was merely seen before is not."""
    fault = torch.AcceleratorError(ASSERT)
    wrapped = EngineError("the replay failed")
    wrapped.__cause__ = fault
    assert isinstance(explain(wrapped, "cpu"), DeviceFault)
    later = EngineError("the file is gone")
    later.__context__ = fault
    assert explain(later, "cpu") is later


def test_what_another_attempt_may_survive() -> None:
    """A full disk and trouble with the store are worth another attempt, also as the cause of another error."""
    full = DataError("part-00000.parquet: cannot be written")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    missing = DataError("x.npy: cannot be read")
    missing.__cause__ = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert explain(full, "cpu").retryable
    assert str(explain(full, "cpu")) == "part-00000.parquet: cannot be written"
    assert explain(StoreTrouble(), "cpu").retryable
    assert not explain(missing, "cpu").retryable


def test_a_device_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels fail late: after any error on CUDA the context is asked whether it still answers."""

    def dead(_device: str) -> None:
        raise torch.AcceleratorError(ASSERT)

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    assert type(explain(KeyError("x"), "cuda:0")) is DeviceFault
    assert type(explain(KeyError("x"), "cpu")) is JobFailed
