"""`Nimble` with a store: found again by what was recorded, never served wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs.engine import verify
from nimble_jobs.errors import CheckFailed, UsageError
from nimble_jobs.job import Hit
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve


class Net(nn.Module):
    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(self.linear(x), self.slope) * torch.tensor([1.0, self.slope])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def prepared(module: nn.Module, store: Store | str | Path, rows: int = 2) -> Nimble:
    nimble = Nimble(module)
    nimble.prepare(torch.randn(rows, 3), store=store)
    return nimble


def test_a_module_of_the_same_program_hits_with_other_weights(store: Store) -> None:
    """The schedule is built once; another instance with other weights finds it, and gives its own results."""
    first, second = Net(), Net()
    assert prepared(first, store).hit is Hit.MISS
    nimble = prepared(second, store)
    assert nimble.hit is Hit.STORED
    x = torch.randn(2, 3)
    torch.testing.assert_close(nimble(x), second(x).detach())
    (entry,) = store.schedules.list()
    assert entry.hits == 1
    assert "Net" in entry.model
    uses = store.schedules.uses()
    assert (uses.stored, uses.misses) == (1, {"no schedule is stored under this key": 1})


def test_whatever_changes_the_program_is_a_miss(store: Store) -> None:
    """A constant in the code and another shape are other schedules."""
    prepared(Net(), store)
    assert prepared(Net(slope=0.2), store).hit is Hit.MISS
    assert prepared(Net(), store, rows=3).hit is Hit.MISS
    assert len(store.schedules.list()) == 3


def test_a_state_folder_is_opened_and_closed(tmp_path: Path) -> None:
    """A path does as well as an open store; anything else is told."""
    home = tmp_path / "home"
    assert prepared(Net(), home).hit is Hit.MISS
    assert prepared(Net(), str(home)).hit is Hit.STORED
    with pytest.raises(UsageError, match=r"^store: found int; expected the path"):
        prepared(Net(), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^store: not supported with training=True yet$"):
        Nimble(Net()).prepare(torch.randn(2, 3), training=True, store=home)


def test_a_stored_schedule_that_disagrees_is_quarantined(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not used, neither now nor the next time, and the error says why."""
    prepared(Net(), store)

    def refuse(*_: object, **__: object) -> float:
        raise CheckFailed("output 'output' differs", error=1.0)

    with monkeypatch.context() as patched:
        patched.setattr(verify, "check", refuse)
        with pytest.raises(CheckFailed, match=r"^output 'output' differs$"):
            prepared(Net(), store)
    with pytest.raises(CheckFailed, match=r"output 'output' differs"):
        prepared(Net(), store)
    nimble = Nimble(Net())
    nimble.prepare(torch.randn(2, 3), store=store, fallback=True)
    assert nimble.fallback is not None
