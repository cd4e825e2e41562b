"""What the key of a schedule says of a device, of the software under it, and of the process's switches."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nimble_jobs import machine
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import UsageError
from tests import prefork


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that a test describes. Its index is not among what describes it."""
    properties: dict[str, Any] = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "total_memory": 140 * 2**30,
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(**properties))
    monkeypatch.setattr(machine, "driver_version", lambda: "575.57")
    monkeypatch.setattr(machine, "package_version", lambda _package: "3.6.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_900)
    for name in devices.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    return properties


def facts(index: int = 0) -> dict[str, str]:
    return devices.facts(torch.device("cuda", index))


def test_equal_gpus_share(gpu: dict[str, Any]) -> None:
    """Another index is the same device; so is one with a few reserved bytes less."""
    first = facts(0)
    gpu["total_memory"] -= 100 * 2**20
    assert facts(3) == first
    assert first["device.name"] == "NVIDIA H200"
    assert all(part for name, part in first.items() if name != "precision.environment")


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("name", "NVIDIA H100", "device.name"),
        ("major", 10, "device.capability"),
        ("minor", 1, "device.capability"),
        ("multi_processor_count", 114, "device.sms"),  # a partition of a GPU has the same name
        ("total_memory", 70 * 2**30, "device.memory_gib"),
    ],
)
def test_another_gpu_does_not(gpu: dict[str, Any], name: str, value: Any, part: str) -> None:
    """Name, capability, multiprocessors and the class of its memory."""
    before = facts()
    gpu[name] = value
    found = facts()
    assert {n for n in before if found[n] != before[n]} == {part}


@pytest.mark.parametrize("part", ["torch", "cuda", "cudnn", "driver", "triton"])
def test_other_software_does_not(gpu: dict[str, Any], part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch, CUDA, cuDNN, the driver and triton each have their part."""
    before = facts()
    match part:
        case "torch":
            monkeypatch.setattr(torch, "__version__", "2.12.0")
        case "cuda":
            monkeypatch.setattr(torch.version, "cuda", "14.0")
        case "cudnn":
            monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92_000)
        case "driver":
            monkeypatch.setattr(machine, "driver_version", lambda: "580.1")
            devices._driver.cache_clear()
        case _:
            monkeypatch.setattr(machine, "package_version", lambda _package: "3.7.0")
    found = facts()
    devices._driver.cache_clear()
    assert {n for n in before if found[n] != before[n]} == {part}


SWITCHES = {
    "matmul.fp32_precision": ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "precision.matmul"),
    "legacy matmul precision": ("torch.set_float32_matmul_precision('high')", "precision.matmul"),
    "conv.fp32_precision": ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", "precision.conv"),
    "rnn.fp32_precision": ("torch.backends.cudnn.rnn.fp32_precision = 'ieee'", "precision.rnn"),
    "fp16 reduction": (
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
        "precision.fp16_reduction",
    ),
    "bf16 reduction": (
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
        "precision.bf16_reduction",
    ),
    "fp16 accumulation": ("torch.backends.cuda.matmul.allow_fp16_accumulation = True", "precision.fp16_accumulation"),
    "cudnn": ("torch.backends.cudnn.enabled = False", "precision.cudnn"),
    "benchmark": ("torch.backends.cudnn.benchmark = True", "precision.cudnn_benchmark"),
    "deterministic": ("torch.backends.cudnn.deterministic = True", "precision.cudnn_deterministic"),
    "deterministic algorithms": ("torch.use_deterministic_algorithms(True)", "precision.deterministic"),
    "attention": ("torch.backends.cuda.enable_flash_sdp(False)", "precision.attention"),
    "blas": ("torch.backends.cuda.preferred_blas_library('cublaslt')", "precision.blas"),
    "override": ("os.environ['NVIDIA_TF32_OVERRIDE'] = '0'", "precision.environment"),
    "workspaces": ("os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'", "precision.environment"),
    "mkldnn matmul": ("torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", "cpu precision.matmul"),
    "mkldnn conv": ("torch.backends.mkldnn.conv.fp32_precision = 'bf16'", "cpu precision.conv"),
    "mkldnn off": ("torch._C._set_mkldnn_enabled(False)", "cpu precision.mkldnn"),
    "threads": ("torch.set_num_threads(torch.get_num_threads() + 1)", "cpu device.threads"),
}
ALL_SWITCHES = """
import json, os, sys, types
import torch
from nimble_jobs import machine
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import UsageError

properties = types.SimpleNamespace(name="G", major=9, minor=0, multi_processor_count=1, total_memory=2**30)
torch.cuda.get_device_properties = lambda _device: properties
devices._driver = lambda: "575.57"

def tell(code):
    print(json.dumps([code, {kind: devices.facts(torch.device(kind)) for kind in ("cuda", "cpu")}]), flush=True)

tell("")
for code in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        exec(code)
        tell(code)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_each_precision_switch_matters() -> None:
    """Each alone, in a process of its own, changes its part, and that part only of those of its device."""
    codes = [code for code, _ in SWITCHES.values()]
    environment = {n: v for n, v in os.environ.items() if n not in devices.SWITCHES}
    done = prefork.run(
        [sys.executable, "-c", ALL_SWITCHES, json.dumps(codes)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    before = found.pop("")
    for code, part in SWITCHES.values():
        kind, _, name = part.rpartition(" ")
        device = kind or "cuda"
        differ = {n for n in before[device] if found[code][device][n] != before[device][n]}
        assert differ == {name}, code


def test_they_are_plain_text() -> None:
    """A worker's child sends them to the supervisor, which would import torch to read a type of torch's own."""
    assert {type(value) for value in devices.facts(torch.device("cpu")).values()} == {str}


def test_a_machine_has_its_cpu_and_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU comes first."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device) for device in devices.present()] == ["cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize("name", ["cuda:00", "cuda:\u0663", "cuda:99999999999999999999", "cuda:-1", "gpu", ""])
def test_names_that_are_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They are refused in words, wherever the name comes from, whether or not the machine has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match=r"^run\.device: found '.*'; expected auto, cpu, cuda or cuda:N$"):
        devices.resolve(name)


def test_a_device_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's number is a byte in torch, which takes cuda:256 for cuda:0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.resolve("cuda:1") == torch.device("cuda", 1)
    for name in ("cuda:2", "cuda:200", "cuda:256"):
        with pytest.raises(UsageError, match=rf"^--device: {name} does not exist; this machine has 2 CUDA devices"):
            devices.resolve(name, "--device")
