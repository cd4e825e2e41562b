"""Workspaces that torch gives cuBLAS: one for each stream on which a matrix product runs, made during the capture.

torch has no public name for their size. What it takes is in its notes on CUDA: `CUBLAS_WORKSPACE_CONFIG` where that is
set, 32 MiB on Hopper, and `:4096:2:16:8` elsewhere.
"""

from __future__ import annotations

import os
import re

import torch

from nimble_jobs.engine.device import able
from nimble_jobs.schedule import Plan, Program

_HOPPER, _HOPPER_BYTES = (9, 0), 32 << 20
_OTHERS = ":4096:2:16:8"
_PUBLIC = {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "linear", "matmul", "mm", "mv", "vdot"}
_PRODUCTS = _PUBLIC | {"_addmm_activation", "_grouped_mm", "_int_mm", "_scaled_mm"}


def workspace_bytes(program: Program, plan: Plan, device: torch.device) -> int:
    """Device memory of the workspaces that a captured plan holds; none on a CPU, or without matrix products.

    cuDNN's for convolutions are not in it: they come and go with each call, in sizes that it tells nobody before.
    """
    if not able(device).streams:
        return 0
    streams = {plan.stream_of[task.index] for task in program.tasks if _is_product(task.op)}
    if not streams:
        return 0
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    return len(streams) * _bytes_each(torch.cuda.get_device_capability(device), config)


def _is_product(op: str) -> bool:
    namespace, _, name = op.partition(".")
    return namespace == "aten" and name.partition(".")[0] in _PRODUCTS


def _bytes_each(capability: tuple[int, int], config: str) -> int:
    """Pairs of a size in KiB and a count, as NVIDIA writes them; whatever else is in the text is passed over."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    if not pairs and capability == _HOPPER:
        return _HOPPER_BYTES
    return sum(int(kib) * 1024 * int(count) for kib, count in pairs or re.findall(r":([0-9]+):([0-9]+)", _OTHERS))
