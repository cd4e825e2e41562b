"""Sizes of the workspaces that torch gives cuBLAS, one for each stream with a matrix product, made during the capture.

torch has no public function for their size. Its notes on CUDA document it: `CUBLAS_WORKSPACE_CONFIG` if that is set,
32 MiB on Hopper, and `:4096:2:16:8` elsewhere.
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
    """Device memory in bytes of the workspaces that a captured plan holds; 0 on a CPU, or without matrix products.

    It does not include cuDNN's workspaces for convolutions. These come and go with each call, and cuDNN does not reveal
    their sizes beforehand. Scratch memory of our own kernels comes and goes likewise, some 0.1 MB at a time.
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
    """Bytes of one workspace. `config` has pairs of a size in KiB and a count, as NVIDIA defines; other text is
    ignored.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    if not pairs and capability == _HOPPER:
        return _HOPPER_BYTES
    return sum(int(kib) * 1024 * int(count) for kib, count in pairs or re.findall(r":([0-9]+):([0-9]+)", _OTHERS))
