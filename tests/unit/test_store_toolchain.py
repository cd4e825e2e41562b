"""Which stored schedules the software of this machine can still use."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.store.toolchain import Toolchain, toolchain

CPU = {"device": "cpu", "device.name": "A CPU", "torch": "2.11.0", "format": "3"}
GPU = {"device": "cuda", "device.name": "A GPU", "torch": "2.11.0", "format": "3", "cuda": "13.0", "driver": "580.1"}
HERE = Toolchain(
    versions={
        "cpu": {"format": "3", "torch": "2.11.0"},
        "cuda": {"format": "3", "torch": "2.11.0", "cuda": "13.0", "driver": "580.1", "triton": "3.6.0"},
    },
    devices={"cpu": frozenset({"A CPU"}), "cuda": frozenset({"A GPU"})},
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
    here = Toolchain(versions=HERE.versions, devices={})
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


def test_it_loads_no_torch() -> None:
    """Listing schedules must not take seconds."""
    code = "import sys; from nimble_jobs.store.toolchain import toolchain; toolchain(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
