"""Fingerprints tell tensors apart by their bits, whatever their type and layout."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from nimble_jobs.engine import fingerprints as module
from nimble_jobs.engine.fingerprints import fingerprints

KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "channels last": lambda t: t[None].contiguous(memory_format=torch.channels_last),
    "part": lambda t: t.view(-1)[1:].view(t[:, :, :1].numel() * 5 - 1),
    "gaps": lambda t: t[:, ::2],
}


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, the one of devices with memory of their own by a stand-in."""
    if request.param == "device":
        monkeypatch.setattr(module, "able", lambda device: SimpleNamespace(separate_memory=True))
    return str(request.param)


def written(tensor: torch.Tensor) -> int:
    return fingerprints({"t": tensor})["t"]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_counts(dtype: torch.dtype, layout: str) -> None:
    tensor = LAYOUTS[layout](torch.randint(1, 99, (3, 4, 5)).to(dtype))
    before = written(tensor)
    assert written(tensor) == before
    for index in torch.cartesian_prod(*(torch.arange(n) for n in tensor.shape)).view(-1, tensor.dim()).tolist():
        old = tensor[tuple(index)].clone()
        tensor.data[tuple(index)] = 0
        assert written(tensor) != before, index
        tensor.data[tuple(index)] = old
    assert written(tensor) == before


@pytest.mark.usefixtures("place")
def test_tensors_of_odd_kinds() -> None:
    odd = {
        "flag": torch.tensor([True, False]),
        "complex": torch.zeros(3, dtype=torch.complex64),
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
        "expanded": torch.zeros(1).expand(3),
        "number": torch.tensor(2.0),
        "empty": torch.empty(0, 3),
    }
    before = fingerprints(odd)
    assert sorted(before) == sorted(odd)
    odd["flag"][1], odd["complex"][2], odd["number"][()] = True, 1j, 3.0
    after = fingerprints(odd)
    assert {name for name in odd if before[name] != after[name]} == {"flag", "complex", "number"}


@pytest.mark.usefixtures("place")
def test_signs_that_change_together_count() -> None:
    tensor = torch.ones(8)
    before = written(tensor)
    tensor[1], tensor[5] = -1.0, -1.0
    assert written(tensor) != before


def test_values_that_swap_places_count_in_host_memory() -> None:
    tensor = torch.arange(1000.0)
    before = written(tensor)
    assert written(tensor.flip(0)) != before
    tensor[[3, 4]] = tensor[[4, 3]]
    assert written(tensor) != before
