"""How far two tensors are from each other."""

from __future__ import annotations

import math

import torch

_SMALL = 1 << 18  # elements; a new process copies so many faster than it loads a dozen operators onto a GPU


def relative_norm(found: torch.Tensor, expected: torch.Tensor, *, on_host: int = _SMALL) -> float:
    """||found - expected|| / ||expected|| in float64; infinite if NaN or Inf are in different places.

    A complex number counts as two real ones. Tensors of up to `on_host` elements are compared on the host.
    """
    if found.shape != expected.shape or found.is_complex() != expected.is_complex():
        return float("inf")
    if expected.numel() <= on_host:
        found, expected = found.cpu(), expected.cpu()
    a, b = in_double(found), in_double(expected)
    difference, scale = torch.stack([(a - b).norm(), b.norm()]).tolist()
    if math.isfinite(difference) and scale > 0:
        return float(difference / scale)
    finite = torch.isfinite(b)
    same_specials = torch.allclose(a[~finite], b[~finite], rtol=0, atol=0, equal_nan=True)
    if not same_specials or not bool(torch.isfinite(a[finite]).all()):
        return float("inf")
    a, b = a[finite], b[finite]
    scale = float(b.norm())
    difference = float((a - b).norm())
    return difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """The values as float64 in one dimension. A complex number becomes two real ones."""
    found = tensor.detach()
    if found.is_complex():
        found = torch.view_as_real(found.resolve_conj())
    return found.double().flatten()
