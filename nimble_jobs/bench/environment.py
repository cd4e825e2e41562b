"""Where results come from: device, driver, versions, commit, date, and the switches that all systems ran under."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.bench.cell import CHECKED, ROTATED
from nimble_jobs.bench.timing import SAMPLES
from nimble_jobs.bench.training_cell import STEPS
from nimble_jobs.engine import device as devices

_PACKAGES = (
    "nimble-jobs",
    "torchvision",
    "triton",
    "transformers",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch-tensorrt",
    "tensorrt",
)
METHOD = {
    "replay_us": f"device events around many calls, warm, median of {SAMPLES} samples; {ROTATED} inputs take turns",
    "with_copies_us": "the same, and at each call input from pinned host memory and outputs back to it, on one stream",
    "ours-1-stream, ours-streams": "the planner's measurements of its candidates: events, warm, median of 7 samples",
    "prepare_s": "from the module on the device to three finished calls; ours: the whole search",
    "peak_bytes": "torch.cuda.max_memory_reserved while running, beyond weights and inputs; "
    "onnxruntime, tensorrt: memory taken from the device; ours-1-stream, ours-streams: the planner's figure",
    "busy_us": "union of the profiler's kernel and copy intervals in one call; idle_share = 1 - busy_us / replay_us",
    "relative_norm": f"largest over {CHECKED} fresh inputs and all outputs, against eager in the same dtype",
    "training": f"a call is one step: forward, loss, backward, update; relative_norm: mean difference of {STEPS} "
    "losses from eager's over their mean, forgiven: the tolerance and twice what eager differs by with another seed "
    "for dropout; peak_bytes: with weights, gradients and the optimizer's state; bf16: autocast",
}


def prepare_precision() -> None:
    """The same switches for all systems: TF32 allowed in fp32, convolutions chosen by cuDNN's own benchmark."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def environment(device: torch.device) -> dict[str, Any]:
    """The `environment` of a file of results."""
    facts = devices.facts(device)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: facts[name] for name in ("cuda", "cudnn") if name in facts}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": devices.describe(device),
        "driver": facts.get("driver", "none"),
        "versions": versions,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device_facts": facts,
        "fp32": "TF32 allowed for all systems" if device.type == "cuda" else "full fp32",
        "cudnn_benchmark": True,
        "method": METHOD,
    }


def _commit() -> str | None:
    """The commit of the checkout that this package runs from, `+` where it was changed; None outside of one."""
    folder = Path(__file__).parent
    try:
        said = subprocess.run(  # noqa: S603  # fixed words
            ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None
