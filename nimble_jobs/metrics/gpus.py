"""Figures of this machine's NVIDIA GPUs, from the driver. Without a driver there are none, which is no error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

log = logging.getLogger(__name__)

_MILLI = 1e-3
_ABSENT = (  # the driver does not tell this figure of this GPU
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
)
_NO_DRIVER = (
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. A figure that the driver does not tell is None."""

    index: int
    uuid: str
    name: str
    used_share: float | None  # of the last sampling period in which a kernel ran, 0 to 1
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_celsius: float | None
    power_watts: float | None


class Gpus:
    """Reads the GPUs. The driver is opened at the first reading and stays open; threads may share the object."""

    def __init__(self, nvml: Any = pynvml) -> None:
        """`nvml`: the driver's interface, as in nvidia-ml-py."""
        self._nvml = nvml
        self._lock = threading.Lock()
        self._opened: bool | None = None  # None: not tried; False: there is no driver
        self._told: set[str] = set()
        self._errors = 0

    def read(self) -> tuple[list[Gpu], int]:
        """The GPUs, and how many figures could not be read. Each kind of error is logged once."""
        with self._lock:
            self._errors = 0
            if not self._open():
                return [], self._errors
            count = self._asked("count", self._nvml.nvmlDeviceGetCount)
            gpus = [self._gpu(index) for index in range(count or 0)]
            return [gpu for gpu in gpus if gpu is not None], self._errors

    def close(self) -> None:
        """Close the driver."""
        with self._lock:
            if self._opened:
                self._asked("shutdown", self._nvml.nvmlShutdown)
            self._opened = None

    def _open(self) -> bool:
        if self._opened is None:
            try:
                self._nvml.nvmlInit()
                self._opened = True
            except pynvml.NVMLError as error:
                if error.value in _NO_DRIVER:
                    self._opened = False
                else:  # tried again at the next reading
                    self._failed("nvmlInit", error)
        return bool(self._opened)

    def _gpu(self, index: int) -> Gpu | None:
        nvml = self._nvml
        handle = self._asked("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            return None
        memory = self._asked("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = self._asked("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power = self._asked("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return Gpu(
            index=index,
            uuid=str(self._asked("uuid", lambda: nvml.nvmlDeviceGetUUID(handle)) or ""),
            name=str(self._asked("name", lambda: nvml.nvmlDeviceGetName(handle)) or ""),
            used_share=None if use is None else use.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature_celsius=self._asked(
                "temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            power_watts=None if power is None else power * _MILLI,
        )

    def _asked(self, what: str, ask: Callable[[], Any]) -> Any:
        """What the driver answers; None if it does not tell, or fails."""
        try:
            return ask()
        except pynvml.NVMLError as error:
            if error.value not in _ABSENT:
                self._failed(what, error)
            return None

    def _failed(self, what: str, error: pynvml.NVMLError) -> None:
        self._errors += 1
        if what not in self._told:
            self._told.add(what)
            log.warning("the GPU's %s cannot be read: %s; this is said once", what, error)
