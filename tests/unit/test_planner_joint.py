"""Whether the ranks of a training hold the same values is told by digests."""

from __future__ import annotations

import pytest
import torch

from nimble_jobs.planner.step import joint
from nimble_jobs.planner.step.joint import differing, digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_digest_tells_values_and_places(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values in another layout are equal; swapped ones, in one piece or across two, and a changed bit are not."""
    monkeypatch.setattr(joint, "_PIECE", 10)
    ours = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    other = ours.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not other.is_contiguous()
    assert digests({"w": ours}) == digests({"w": other})
    changed = ours.clone()
    changed.view(-1)[7] = torch.nextafter(changed.view(-1)[7], torch.tensor(9.0, dtype=dtype))
    for swapped in (ours.flip(0), ours.view(-1)[[1, 0, *range(2, 24)]], ours.roll(10), changed):
        assert differing([digests({"w": ours}), digests({"w": swapped})]) == "w"


def test_what_has_no_digest() -> None:
    """Empty tensors and whole numbers; a number alone has one."""
    found = digests({"n": torch.arange(3), "e": torch.empty(0), "lr": torch.tensor(0.5)})
    assert list(found) == ["lr"]
    assert digests({}) == {}
