"""Activations in Triton, by their number in `activations`. Imported only when kernels are compiled."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl


@triton.jit
def activated(value, ACTIVATION: tl.constexpr):
    """ReLU, ReLU6, SiLU or Hardswish of a value in fp32; with a negative number, the value. NaN stays NaN."""
    if ACTIVATION == 0:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == 1:
        value = tl.minimum(
            tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0, propagate_nan=tl.PropagateNan.ALL
        )
    elif ACTIVATION == 2:
        value = value * tl.sigmoid(value)
    elif ACTIVATION == 3:
        value = value * tl.minimum(tl.maximum(value + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    return value
