"""What a checkpoint holds of a module: always what its state dict would say now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn
from torch.nn.utils import parametrizations

from nimble_jobs.errors import ModelError
from nimble_jobs.workloads.training.keep.flat import Flat
from nimble_jobs.workloads.training.keep.state import Live

CPU = torch.device("cpu")


class Holds(nn.Module):
    """Parameters, buffers of both kinds, tied weights and one child at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.second = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.second.weight
        self.again = self.first
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)


def test_names_and_values_are_those_of_the_state_dict() -> None:
    """The tensors are the module's own, even after values changed, tensors moved, and buffers were replaced."""
    module = Holds()
    live = Live(module)
    with torch.no_grad():
        module.scale.add_(1)
        module.second.weight.data = module.second.weight.data.clone()
        module.seen = torch.ones(3)
        module.hidden = torch.full((3,), 2.0)
    found, expected = live.weights(), module.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name].data_ptr() == tensor.data_ptr() for name, tensor in expected.items())
    assert live.unsaved().keys() == {"hidden"}
    assert live.unsaved()["hidden"] is module.hidden


def _hooked() -> nn.Module:
    module = nn.Linear(2, 2)

    def add_one(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}bias"] = state[f"{prefix}bias"] + 1

    module.register_state_dict_post_hook(add_one)
    return module


@pytest.mark.parametrize("make", [_hooked, lambda: parametrizations.weight_norm(nn.Linear(2, 2))])
def test_state_that_is_computed_is_computed_each_time(make: Callable[[], nn.Module]) -> None:
    """State that hooks or parametrizations make is made each time."""
    module = make()
    live = Live(module)
    for _ in range(2):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        found, expected = live.weights(), module.state_dict()
        assert found.keys() == expected.keys()
        assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_state_that_is_no_tensor_is_refused() -> None:
    """State that is not a tensor is refused."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return 3

    with pytest.raises(ModelError, match="_extra_state of the model's state is a int, not a tensor"):
        Live(Extra(1, 1))


def test_state_that_is_not_dense_is_refused() -> None:
    """A tensor that is not dense is refused by name."""
    module = nn.Linear(1, 1)
    module.register_buffer("matrix", torch.eye(2).to_sparse())
    with pytest.raises(ModelError, match="matrix of the model's state is not dense; a checkpoint cannot hold it"):
        Live(module)


def test_copies_follow_tensors_that_move() -> None:
    """A second copy has the tensors' values, wherever and however they lie by then."""
    weight = nn.Parameter(torch.randn(4, 3, 2, 2))
    narrow = nn.Parameter(torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last))
    tensors: dict[str, torch.Tensor] = {"weight": weight, "narrow": narrow, "count": torch.tensor(1)}
    flat = Flat(tensors, CPU)

    def same() -> bool:
        flat.take(tensors)
        found = load(flat.head + bytes(flat.values()))
        return all(found[name].equal(tensor) for name, tensor in tensors.items())

    assert same()
    weight.data = weight.data.add(1).contiguous(memory_format=torch.channels_last)
    assert same()
    weight.data.mul_(2)
    narrow.data.mul_(2)
    tensors["count"] = torch.tensor(7)
    assert same()
    weight.data = weight.data.as_strided((4, 3, 2, 2), (12, 4, 2, 1))  # the same memory, read in another order
    assert same()


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            torch.ones(5, 4),
            r"bank of the training's state is .*\[5, 4\] now; expected torch\.float32\[3, 4\]",
        ),
        (torch.ones(3, 4).double(), r"is torch\.float64\[3, 4\] now"),
        (None, "is NoneType now"),
    ],
)
def test_tensors_that_become_others_are_refused(now: torch.Tensor | None, said: str) -> None:
    """A tensor whose shape or type has changed is refused."""
    tensors: dict[str, Any] = {"bank": torch.zeros(3, 4)}
    flat = Flat(tensors, CPU)
    flat.take(tensors)
    tensors["bank"] = now
    with pytest.raises(ModelError, match=said):
        flat.take(tensors)


def test_a_tensor_that_shrinks_in_place_is_refused() -> None:
    """A tensor that shrinks in place is refused, though it is the same object at the same address."""
    bank = torch.zeros(3, 4)
    flat = Flat({"bank": bank}, CPU)
    flat.take({"bank": bank})
    bank.resize_(2, 4)
    with pytest.raises(ModelError, match=r"\[2, 4\] now; expected torch\.float32\[3, 4\]"):
        flat.take({"bank": bank})
