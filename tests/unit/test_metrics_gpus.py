"""Figures of GPUs, from a driver that answers, lacks figures, fails in the middle, or is not there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from nimble_jobs.metrics import Gpus
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests.metrics import NoDriver, scraped, value
from tests.store_samples import NOW

GIB = 1 << 30


class Driver:
    """The interface of nvidia-ml-py over two GPUs. `broken`: functions that raise, with the driver's error."""

    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, **broken: int) -> None:
        self.broken = broken
        self.opened = self.closed = 0

    def nvmlInit(self) -> None:  # noqa: N802  # the interface's name
        self._may("nvmlInit")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.closed += 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
            "nvmlDeviceGetName": lambda _index: 'NVIDIA "H200"',
            "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(used=index * GIB, total=139 * GIB),
            "nvmlDeviceGetUtilizationRates": lambda _index: SimpleNamespace(gpu=75, memory=10),
            "nvmlDeviceGetTemperature": lambda _index, _sensor: 41,
            "nvmlDeviceGetPowerUsage": lambda _index: 123_456,
        }
        if name not in answers:
            raise AttributeError(name)
        answer = answers[name]

        def asked(*args: Any) -> Any:
            self._may(name)
            return answer(*args)

        return asked

    def _may(self, name: str) -> None:
        if name in self.broken:
            raise pynvml.NVMLError(self.broken[name])


def samples_of(driver: object, tmp_path: Path) -> dict[Any, float]:
    with open_store(resolve(str(tmp_path / "home"))) as store:
        return scraped(store, NOW, Gpus(driver))


def names_of(samples: dict[Any, float]) -> set[str]:
    return {name for name, _ in samples if "_gpu_" in name}


def test_two_gpus(tmp_path: Path) -> None:
    """Each in base units, by index and uuid."""
    samples = samples_of(Driver(), tmp_path)
    at = {"gpu": "1", "uuid": "GPU-1"}
    assert value(samples, "gpu_utilization_ratio", **at) == 0.75
    assert value(samples, "gpu_memory_used_bytes", **at) == GIB
    assert value(samples, "gpu_memory_total_bytes", **at) == 139 * GIB
    assert value(samples, "gpu_temperature_celsius", **at) == 41
    assert value(samples, "gpu_power_watts", **at) == 123.456
    assert value(samples, "gpu_names", name='NVIDIA "H200"', **at) == 1
    assert value(samples, "gpu_read_errors") == 0


@pytest.mark.parametrize("driver", [NoDriver(), Driver(nvmlInit=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)])
def test_without_a_driver(driver: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There are no families of GPUs, no error, and no line in the log."""
    assert names_of(samples_of(driver, tmp_path)) == set()
    assert caplog.text == ""


def test_a_figure_that_a_gpu_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is left out, which is no error."""
    samples = samples_of(Driver(nvmlDeviceGetPowerUsage=pynvml.NVML_ERROR_NOT_SUPPORTED), tmp_path)
    assert "nimble_jobs_gpu_power_watts" not in names_of(samples)
    assert "nimble_jobs_gpu_temperature_celsius" in names_of(samples)
    assert value(samples, "gpu_read_errors") == 0
    assert caplog.text == ""


def test_a_driver_that_fails_in_the_middle(caplog: pytest.LogCaptureFixture) -> None:
    """Each reading counts what failed; the log says it once; the other figures stay."""
    driver = Driver(nvmlDeviceGetTemperature=pynvml.NVML_ERROR_GPU_IS_LOST)
    gpus = Gpus(driver)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found, errors = gpus.read()
            assert errors == 2
            assert [gpu.temperature_celsius for gpu in found] == [None, None]
            assert found[1].memory_used_bytes == GIB
    assert caplog.text.count("the GPU's temperature cannot be read") == 1
    driver.broken.clear()
    assert gpus.read()[1] == 0
    assert driver.opened == 1
    gpus.close()
    gpus.close()
    assert driver.closed == 1


def test_a_driver_that_cannot_be_opened_now() -> None:
    """It counts as an error, and is tried again."""
    driver = Driver(nvmlInit=pynvml.NVML_ERROR_UNKNOWN)
    gpus = Gpus(driver)
    assert gpus.read() == ([], 1)
    driver.broken.clear()
    assert len(gpus.read()[0]) == 2


def test_a_gpu_that_fell_off(tmp_path: Path) -> None:
    """Nothing is said about it but the error."""
    samples = samples_of(Driver(nvmlDeviceGetHandleByIndex=pynvml.NVML_ERROR_GPU_IS_LOST), tmp_path)
    assert names_of(samples) == {"nimble_jobs_gpu_read_errors"}
    assert value(samples, "gpu_read_errors") == 2
