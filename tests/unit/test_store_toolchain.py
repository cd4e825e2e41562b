"""Which stored schedules the software of this machine can still use."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
import torch

from nimble_jobs import machine
from nimble_jobs.engine import device as devices
from nimble_jobs.models.identity import _imported_package, identity
from nimble_jobs.spec import ModelSpec
from nimble_jobs.store.toolchain import Toolchain, toolchain

CPU = {"device": "cpu", "device.name": "A CPU", "torch": "2.11.0", "format": "3"}
GPU = {"device": "cuda", "device.name": "A GPU", "torch": "2.11.0", "format": "3", "cuda": "13.0", "driver": "580.1"}
HERE = Toolchain(
    versions={
        "cpu": {"format": "3", "torch": "2.11.0"},
        "cuda": {
            "format": "3",
            "torch": "2.11.0",
            "cuda": "13.0",
            "driver": "580.1",
            "triton": "3.6.0",
            "cudnn": "91900",
        },
    },
    devices={"cpu": frozenset({"A CPU"}), "cuda": frozenset({"A GPU"})},
    package={"torchvision": "0.26.0", "PyYAML": "6.0.2", "timm": "1.0.9"}.get,  # type: ignore[arg-type]
)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (CPU, None),
        (GPU, None),
        (CPU | {"torch": "2.10.0"}, "made with torch 2.10.0, here 2.11.0"),
        (CPU | {"format": "2"}, "made with format 2, here 3"),
        (GPU | {"driver": "570.9"}, "made with driver 570.9, here 580.1"),
        (GPU | {"cuda": "12.8", "triton": "3.4.0"}, "made with CUDA 12.8, here 13.0; triton 3.4.0, here 3.6.0"),
        (GPU | {"cudnn": "91002"}, "made with cuDNN 91002, here 91900"),
        (CPU | {"model.package": "torchvision 0.26.0"}, None),
        (CPU | {"model.package": "torchvision 0.25.0"}, "made with torchvision 0.25.0, here 0.26.0"),
        (CPU | {"model.package": "mine (unknown), timm 1.0.9, yaml (PyYAML 6.0.2)"}, None),
        (
            CPU | {"model.package": "mine (unknown), timm 1.0.8, yaml (PyYAML 6.0.1)"},
            "made with timm 1.0.8, here 1.0.9; PyYAML 6.0.1, here 6.0.2",
        ),
        (GPU | {"torch": "2.10.0", "device.name": "Another GPU"}, None),  # of another machine
        (CPU | {"torch": "2.10.0", "device.name": "Another CPU"}, None),
        ({"torch": "2.10.0"}, None),  # of no device that is known
    ],
)
def test_outdated(parts: dict[str, str], why: str | None) -> None:
    """Only other software for a device of this machine makes a schedule stale; all that differs is named."""
    assert HERE.outdated(parts) == why


def test_names_that_cannot_be_read_count_as_here() -> None:
    """Where the system does not name its GPUs, every GPU's schedule is compared."""
    here = Toolchain(versions=HERE.versions, devices={}, package=HERE.package)
    assert here.outdated(GPU | {"torch": "2.10.0"}) is not None
    assert here.outdated(GPU) is None


def test_what_is_read_is_what_keys_hold() -> None:
    """Read from files, without torch: the same texts that the engine puts into keys."""
    facts = devices.facts(torch.device("cpu")) | {"format": toolchain().versions["cpu"]["format"]}
    assert toolchain().outdated(facts) is None
    assert toolchain().versions["cpu"]["torch"] == torch.__version__
    assert toolchain().outdated(facts | {"torch": "1.0"}) == f"made with torch 1.0, here {torch.__version__}"
    if torch.version.cuda:
        assert toolchain().versions["cuda"]["cuda"] == torch.version.cuda


def test_packages_are_read_as_identities_name_them() -> None:
    """Whatever a Python model imports, its own key is not stale where it was made."""
    spec = ModelSpec(source="torchvision:resnet18")
    facts = devices.facts(torch.device("cpu"))
    packages = ", ".join(_imported_package(name) for name in ("torchvision", "yaml", "PIL", "no_such_package"))
    assert "yaml (PyYAML " in packages
    for text in (identity(spec)["model.package"], packages):
        assert toolchain().outdated(facts | {"model.package": text}) is None
    old = packages.replace("PyYAML ", "PyYAML 0.")
    assert "PyYAML 0." in (toolchain().outdated(facts | {"model.package": old}) or "")


@pytest.mark.parametrize(
    ("required", "installed", "expected"),
    [
        (["numpy", "nvidia-cudnn-cu13==9.19.0.56; platform_system == 'Linux'"], "9.19.0.56", "91900"),
        (["nvidia-cudnn-cu12==8.9.7.29"], "8.9.7.29", "8907"),
        (["numpy"], "9.1.0", None),
        (None, "9.1.0", None),
    ],
)
def test_cudnn_is_counted_as_torch_counts_it(
    monkeypatch: pytest.MonkeyPatch, required: list[str] | None, installed: str, expected: str | None
) -> None:
    """Of the package that torch asks for; where it asks for none, nothing is known."""
    monkeypatch.setattr(metadata, "requires", lambda _name: required)
    monkeypatch.setattr(metadata, "version", lambda _name: installed)
    assert machine.cudnn_version() == expected


def test_it_loads_no_torch() -> None:
    """Listing schedules must not take seconds."""
    code = "import sys; from nimble_jobs.store.toolchain import toolchain; toolchain(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
