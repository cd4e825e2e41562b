"""Which tensors differ in their bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nimble_jobs.engine import same_bytes
from nimble_jobs.engine.same_bytes import differing


def held() -> dict[str, torch.Tensor]:
    return {
        "mean": torch.arange(5.0),
        "calls": torch.tensor(3),
        "flag": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "nan": torch.tensor([float("nan"), 0.0]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "weight": nn.Parameter(torch.ones(2, 2)),
        "large": torch.zeros(70),
    }


@pytest.fixture(params=[False, True], ids=["each", "together"])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what was compared; also as on a device that is waited for."""
    sizes: list[int] = []
    equal = torch.equal

    def noted(one: torch.Tensor, other: torch.Tensor) -> bool:
        sizes.append(one.nbytes)
        return equal(one, other)

    monkeypatch.setattr(torch, "equal", noted)
    monkeypatch.setattr(same_bytes, "_waits", lambda device: request.param and device.type != "meta")
    monkeypatch.setattr(same_bytes, "_SMALL_BYTES", 256)
    return sizes


def test_equal_tensors_are_compared_together_where_that_pays(
    compared: list[int], request: pytest.FixtureRequest
) -> None:
    """One comparison for all small ones, one for each large one."""
    assert differing(held(), held()) == []
    together = request.node.callspec.params["compared"]
    assert len(compared) == (2 if together else len(held()))


@pytest.mark.parametrize("name", [name for name in held() if name != "empty"])
def test_the_one_that_differs_is_named(name: str, compared: list[int]) -> None:
    """Whatever its type and layout, and if only the sign of a zero differs."""
    others = held()
    with torch.no_grad():
        if name == "nan":
            others[name][1] = -0.0
        elif others[name].dtype is torch.bool:
            others[name].logical_not_()
        else:
            others[name].view(-1)[-1:].add_(1) if name != "turned" else others[name][2, 1].add_(1)
    assert differing(held(), others) == [name]
    assert compared


def test_other_shapes_and_types_differ(compared: list[int]) -> None:
    """Without looking at their bits."""
    some = {"shape": torch.zeros(2, 3), "type": torch.zeros(2), "meta": torch.zeros(2, device="meta")}
    others = {"shape": torch.zeros(3, 2), "type": torch.zeros(2, dtype=torch.int32), "meta": some["meta"]}
    assert differing(some, others) == ["shape", "type"]
    assert compared == []
