"""What takes long when a process, or a shape, first calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nimble_jobs.engine.difference import relative_norm


def without_cudnn(call: Callable[..., Any], *, convolutions: bool) -> Callable[..., Any]:
    """`call` without cuDNN's attention and, with `convolutions`, without its convolutions.

    cuDNN makes a plan for each new shape: for an attention with a mask that took 40 ms on an H200, and its first call
    in a process 0.8 s. torch's own kernels take longer later, but a check calls few times.
    """

    def plain(*args: Any, **named: Any) -> Any:
        cudnn: Any = torch.backends.cudnn
        attention = torch.backends.cuda.cudnn_sdp_enabled()
        enabled = cudnn.enabled
        torch.backends.cuda.enable_cudnn_sdp(False)
        cudnn.enabled = enabled and not convolutions
        try:
            return call(*args, **named)
        finally:
            cudnn.enabled = enabled
            torch.backends.cuda.enable_cudnn_sdp(attention)

    return plain


def load_comparison(device: torch.device) -> None:
    """Compare small tensors as large ones are compared on a GPU. A process's first time loads the kernels, which took
    0.6 s on an H200.
    """
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        values = torch.ones(8, dtype=dtype, device=device)
        relative_norm(values, values, on_host=0)
