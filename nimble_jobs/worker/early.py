"""Work that a `run` command begins while it opens the store: one thread imports torch, another starts the GPU.

Both take seconds, and neither needs the job. Errors are ignored here, because the job does the same again and reports
them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nimble_jobs.machine import before_cuda
from nimble_jobs.spec import JobSpec, parse_source
from nimble_jobs.spec.formats import TEXTS

log = logging.getLogger(__name__)

_CUDA_DRIVER = "libcuda.so.1"
_FEW_FROZEN = 10_000  # objects that the collector skips; Python 3.12 starts with a few hundred


class Early:
    """The threads. Until `join` has returned, no other code may import torch.

    `join` does not wait for the GPU: torch starts CUDA under a lock, and a first convolution waits for cuDNN.

    Python's cycle collector is off until then: what is imported stays, and looking through it takes an eighth of the
    time of an import. From then until `close` it skips the objects that were there; where it skips some already, what
    it skips is left to whoever asked for that.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._collects = gc.isenabled()
        self._freezes = gc.get_freeze_count() < _FEW_FROZEN
        gc.disable()
        self._torch = threading.Event()  # set once the import has succeeded or failed
        self._imports = _started("imports", self._import)
        self._gpu = _started("gpu", self._start_gpu) if spec.run.device != "cpu" else None

    def join(self) -> None:
        """Wait until all is imported."""
        self._imports.join()
        if self._freezes:
            gc.freeze()
        if self._collects:
            gc.enable()

    def close(self) -> None:
        """Wait for both threads, and leave the collector as it was."""
        self.join()
        if self._gpu is not None:
            self._gpu.join()
        if self._freezes:
            gc.unfreeze()

    def _import(self) -> None:
        try:
            importlib.import_module("torch")
            self._torch.set()
            importlib.import_module("nimble_jobs.worker.foreground")
            source = parse_source(self._spec.model.source)
            if source.scheme == "transformers":
                from nimble_jobs.models.transformers_import import import_transformers

                import_transformers(Path(source.target))
            if source.scheme == "torchvision":
                from nimble_jobs.models.torchvision_import import import_torchvision

                import_torchvision()
            if self._spec.kind == "score" and self._spec.output.format == "parquet":
                importlib.import_module("pyarrow.parquet")
        except Exception as error:  # noqa: BLE001  # the command imports it, too, and says what is wrong
            log.debug("not imported early: %s", error)
        finally:
            self._torch.set()

    def _start_gpu(self) -> None:
        index = int(self._spec.run.device.partition(":")[2] or 0)
        if not _make_context(index):
            return
        self._torch.wait()
        try:
            from nimble_jobs.engine.first_calls import load_comparison, load_operators
            from nimble_jobs.models.build import DTYPES

            device = sys.modules["torch"].device("cuda", index)
            texts = self._spec.input.format in TEXTS
            load_operators(device, DTYPES[self._spec.model.dtype], pictures=not texts)
            if texts:
                load_comparison(device)
            self._imports.join()
            if self._spec.kind == "score":
                from nimble_jobs.workloads.heads import load_kernels

                load_kernels(self._spec, device)
        except Exception as error:  # noqa: BLE001  # the job meets it, too
            log.debug("the GPU's libraries were not loaded early: %s", error)


def _make_context(index: int) -> bool:
    """Make the primary context of a GPU, which torch will use. False if there is no such GPU.

    The call needs no torch, and Python's lock is free while the driver works.
    """
    before_cuda()
    try:
        driver = _driver()
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    result = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    )
    if result:
        log.debug("CUDA did not start early: error %d of the driver", result)
    return not result


def _driver() -> Any:
    return ctypes.CDLL(_CUDA_DRIVER)


def _started(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=f"early-{name}", daemon=True)
    thread.start()
    return thread
