"""Loading a stored schedule: its model is observed again only if calls of it leave a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs import planner
from nimble_jobs.engine.observe import Watched
from nimble_jobs.job import Hit
from nimble_jobs.planner import Prepared, Request
from nimble_jobs.planner.jobs import take
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents
from tests.one_batch import outputs_of

CPU = torch.device("cpu")
CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(3))
        self.table = None
        self.calls = []

class Plain(Net):
    def forward(self, x):
        return self.norm(self.linear(x)).relu()

class Counts(Net):
    def forward(self, x):
        self.count += 1
        return self.linear(x) + self.count

class Caches(Net):
    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(3.0)
        return self.linear(x) + self.table

class Notes(Net):
    def forward(self, x):
        self.calls[:] = ["called"]
        return self.linear(x)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def prepared(name: str, store: Store, folder: Path) -> Prepared:
    """What a new process makes of a model of CODE."""
    path = folder / "net.py"
    path.write_text(CODE)
    request = Request(
        model=ModelSpec(source=f"python:{path}:{name}"),
        shape=(3,),
        dtype="float32",
        batch_size=2,
        schedule=ScheduleSpec(fuse="off", streams=1, in_flight=1, progressive=False),
        allowed_python=(folder,),
    )
    return planner.prepare(request, device=CPU, store=store, residents=Residents(1 << 30))


@pytest.mark.parametrize(("name", "observed"), [("Plain", 0), ("Counts", 1), ("Caches", 1), ("Notes", 1)])
def test_only_what_leaves_a_trace_is_observed_again(
    name: str, observed: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored hit in each case, with eager's results, batch after batch."""
    assert prepared(name, store, tmp_path).hit is Hit.MISS
    calls: list[Any] = []
    real = take.observe_calls

    def observe(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(take, "observe_calls", observe)
    loaded = prepared(name, store, tmp_path)
    assert (loaded.hit, len(calls)) == (Hit.STORED, observed)
    assert bool(loaded.loaded.instances), "it runs by its schedule"
    assert (loaded.loaded.altered() is not None) == (name == "Counts")
    eager = planner.jobs.prepare.build_module(loaded.loaded.request, CPU)
    with torch.no_grad():
        for seed in range(3):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(outputs_of(loaded.loaded, x)["output"], eager(x))


class Calls(nn.Module):
    """Does what it is told to in its forward pass."""

    def __init__(self, trace: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.kept: list[Any] = [torch.zeros(1)]
        self._trace = trace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._trace(self, x)
        return self.linear(x)


def _fail(*_: Any) -> None:
    raise ValueError("no call for this")


@pytest.mark.parametrize(
    ("trace", "left"),
    [
        pytest.param(lambda m, x: x.add_(1), False, id="its input is written"),
        pytest.param(lambda m, x: torch.rand(1), False, id="torch's random numbers"),
        pytest.param(lambda m, x: m.mean.add_(1), True, id="a buffer"),
        pytest.param(lambda m, x: m.linear.bias.data.add_(1), True, id="a parameter"),
        pytest.param(lambda m, x: m.kept[0].add_(1), True, id="a tensor in a list"),
        pytest.param(lambda m, x: m.kept.append(x), True, id="a list"),
        pytest.param(lambda m, x: setattr(m, "mean", m.mean.clone()), True, id="another tensor of the same values"),
        pytest.param(lambda m, x: setattr(m, "last", x), True, id="a new tensor"),
        pytest.param(lambda m, x: setattr(m, "number", 1), True, id="an attribute"),
        pytest.param(lambda m, x: m.train(), True, id="its mode"),
        pytest.param(lambda m, x: random.random(), True, id="Python's random numbers"),
        pytest.param(lambda m, x: np.random.rand(), True, id="numpy's random numbers"),
        pytest.param(_fail, True, id="an error"),
    ],
)
def test_traces_are_seen_and_taken_back(trace: Any, left: bool) -> None:
    """After `put_back` the module is what it was."""
    module = Calls(trace).eval()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    held = set(vars(module))
    watched = Watched(module, CPU)
    assert not watched.left_traces
    with torch.no_grad():
        if trace is _fail:
            with pytest.raises(ValueError, match="no call"):
                watched(torch.ones(1, 2))
        else:
            watched(torch.ones(1, 2))
    assert watched.left_traces == left
    watched.put_back()
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert (set(vars(module)), module.training, len(module.kept)) == (held, False, 1)
