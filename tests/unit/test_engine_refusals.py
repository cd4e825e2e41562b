"""What is refused while a model is observed and recorded, and in which words; and what must not be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import dlpack

from nimble_jobs import Nimble
from nimble_jobs.engine.attributes import attributes
from nimble_jobs.errors import CannotRecord
from nimble_jobs.planner.module.carried import Carried

BY_ADDRESS = "reaches the memory of a tensor by its address at"


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def again(x: torch.Tensor) -> torch.Tensor:
    """The same memory, in a tensor of which torch does not know that it is shared."""
    return dlpack.from_dlpack(torch._C._to_dlpack(x.detach()))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x + again(x), BY_ADDRESS),
        (lambda x: x + again(x * 2), BY_ADDRESS),
        (lambda x: x * (2 if again(x)[0, 0] > -1e9 else 3), BY_ADDRESS),
        (lambda x: x * (1 + again(x)[0, 0].item() * 1e-9), "reads a value of the device on the host"),
        (lambda x: x.nonzero().numel() * 0 + x[again(x) > 0].sum(), "depends on the data"),
    ],
    ids=["an input", "an intermediate", "a comparison", "a number", "a mask"],
)
def test_memory_that_is_reached_by_its_address(function: Callable[[torch.Tensor], Any], why: str) -> None:
    """A tensor that was made of an address is neither a constant nor another tensor."""
    with pytest.raises(CannotRecord, match=why):
        Nimble(Calls(function)).prepare(torch.randn(2, 4), fuse="off", streams=1)


@pytest.mark.parametrize("lengths", [(5, 5), (5, 3)])
def test_padding_masks_that_become_nested_tensors(lengths: tuple[int, int]) -> None:
    """The refusal says how to make the encoder without them."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
            return self.encoder(x, src_key_padding_mask=mask)

    mask = torch.arange(5)[None, :] >= torch.tensor(lengths)[:, None]
    with pytest.raises(CannotRecord, match=r"build its nn.TransformerEncoder with enable_nested_tensor=False"):
        Nimble(Encoder().eval()).prepare((torch.randn(2, 5, 8), mask), fuse="off", streams=1)


@pytest.mark.parametrize("driver", ["gelsd", "gelss"])
def test_least_squares_whose_residuals_depend_on_the_rank(driver: str) -> None:
    """Refused: there are none where the rank is low."""
    model = Calls(lambda x: torch.linalg.lstsq(x, x.sum(1, keepdim=True), driver=driver).solution)
    with pytest.raises(CannotRecord, match=r"linalg_lstsq.* has an output whose shape depends on the data"):
        Nimble(model).prepare(torch.randn(5, 3), fuse="off", streams=1)


def test_lengths_that_vary_cannot_be_packed() -> None:
    """Lengths among the arguments are looked at on the host: the refusal names the operator and the line."""

    class Packs(nn.Module):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data.sum()

    given = (torch.randn(3, 6, 4), torch.tensor([6, 4, 2]))
    with pytest.raises(CannotRecord, match=r"pack_padded_sequence.* at .*test_engine_refusals.py:\d+ "):
        Nimble(Packs()).prepare(given, fuse="off", streams=1)


@dataclass(frozen=True)
class Many:
    """Objects in one another, each looked at through a copy of its attributes."""

    number: int
    inner: tuple[Many, ...] = ()


def test_attributes_that_do_not_change_look_the_same() -> None:
    """However often they are looked at, and wherever what is made meanwhile comes to lie."""
    module = nn.Module()
    module.many = Many(0, tuple(Many(i, (Many(i + 1), Many(i + 2))) for i in range(100)))
    first = attributes(module)
    kept = []
    for _ in range(30):
        kept.append([bytes(64) for _ in range(200)])
        assert attributes(module) == first


def odd_tensors() -> nn.Module:
    """A module whose tensors are not of the usual kinds."""
    module = nn.Module()
    module.complex = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    module.flag = nn.Parameter(torch.zeros(2, dtype=torch.bool), requires_grad=False)
    module.expanded = nn.Parameter(torch.zeros(1).expand(3))
    module.narrow = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn), requires_grad=False)
    module.number, module.empty = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0, 3))
    module.sparse = nn.Parameter(torch.eye(3).to_sparse())
    module.quantized = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        odd_tensors,
        lambda: nn.LazyLinear(3),
        lambda: nn.Linear(3, 2, device="meta"),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    ],
    ids=["odd", "lazy", "meta", "scripted", "parametrized"],
)
def test_any_module_can_be_looked_at(make: Callable[[], nn.Module]) -> None:
    """What a module carries is told for tensors of every kind; nothing was changed."""
    carried = Carried(make())
    assert carried.altered() is None
    assert carried.put_back()
