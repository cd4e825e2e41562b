"""Tensors without values: the same shapes, dtypes and strides as torch's, without the code that torch runs for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nimble_jobs.models.unfilled import Unfilled
from tests import prefork

CASES: list[Callable[[], Tensor]] = [
    lambda: nn.Embedding(5, 3, padding_idx=0, device="meta").weight,
    lambda: nn.Linear(4, 3, device="meta").bias,
    lambda: torch.arange(7, device="meta"),
    lambda: torch.arange(0, device="meta"),
    lambda: torch.arange(2, 7, device="meta"),
    lambda: torch.arange(7.0, device="meta"),
    lambda: torch.arange(7, device="cpu"),
    lambda: torch.arange(7, device=None),
    lambda: torch.empty_like(torch.empty(2, 3, device="meta", dtype=torch.float16), device="meta"),
    lambda: torch.empty_like(torch.empty(2, 3, device="meta").T, device="meta"),
    lambda: torch.empty_like(torch.empty(4, device="meta").expand(3, 4), device="meta"),
    lambda: nn.init.normal_(torch.empty(2, 2), generator=torch.Generator().manual_seed(0)),
]

FRESH = """
import sys, torch
from torch import nn
from nimble_jobs.models.unfilled import Unfilled
with Unfilled(), torch.device("meta"):
    embedding, linear = nn.Embedding(4, 2, padding_idx=0), nn.Linear(2, 2)
    positions = torch.arange(4).expand((1, -1))
    nn.init.normal_(linear.weight)
    torch.empty_like(positions, device="cpu")
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


@pytest.mark.parametrize("make", CASES)
def test_tensors_are_what_torch_makes(make: Callable[[], Tensor]) -> None:
    """Tensors with values keep theirs."""
    expected = make()
    with Unfilled():
        made = make()
    assert (made.shape, made.dtype, made.stride(), made.device) == (
        *(expected.shape, expected.dtype, expected.stride(), expected.device),
    )
    assert made.requires_grad == expected.requires_grad
    assert made.is_meta or torch.equal(made, expected)


def test_a_model_without_values_needs_no_compiler() -> None:
    """Neither SymPy nor torch's compiler is imported."""
    done = prefork.run_light(FRESH)
    assert done.stdout.strip() == "[]"
