"""Loading a stored schedule: its model is observed again only if calls of it leave a trace."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs import planner
from nimble_jobs.engine import device as devices
from nimble_jobs.engine.held import Held
from nimble_jobs.engine.observe import Watched
from nimble_jobs.errors import EngineError
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.job import Hit
from nimble_jobs.planner import Prepared, Request
from nimble_jobs.planner.forward import restore as restoring
from nimble_jobs.planner.jobs import take
from nimble_jobs.planner.jobs.loaded import Loaded, Siblings
from nimble_jobs.planner.lookup.stored import Taken
from nimble_jobs.planner.sources.source import Source
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


def test_a_model_that_no_longer_shares_its_weights_is_noted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shared one holds would look like traces of a call."""
    shared, own = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    monkeypatch.setattr(take, "source_of", lambda _: Source(kernels="eager", layout="channels-last"))
    monkeypatch.setattr(take, "build_module", lambda *_: own)
    siblings: Any = Siblings()
    request: Any = None
    loaded = Loaded(key="", request=request, device=CPU, module=shared, siblings=siblings, uncalled=Held(shared))
    schedule: Any = None
    take._keep_apart(loaded, schedule)
    assert loaded.module is own
    watched = Watched(own, CPU, loaded.uncalled)
    watched(torch.ones(1, 3, 4, 4))
    assert not watched.left_traces


def _in_flight(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored schedule keeps so many replays in flight, and the CPU can do that."""
    read = take.read_stored

    def read_stored(*args: Any) -> Any:
        found = read(*args)
        assert isinstance(found, Taken)
        schedule = replace(found.value.schedule, in_flight=count)
        return replace(found, value=replace(found.value, schedule=schedule))

    monkeypatch.setattr(take, "read_stored", read_stored)
    monkeypatch.setattr(take, "able", lambda _: replace(devices.able(CPU), streams=True))


@pytest.mark.parametrize(
    ("name", "in_flight", "first"), [("Plain", 3, 1), ("Plain", 1, 1), ("Caches", 3, 1), ("Counts", 3, 3)]
)
def test_a_stored_schedule_begins_with_one_instance(
    name: str, in_flight: int, first: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its model had to be observed. Others are counted, and compared with it when they are captured. If the
    program writes the model's tensors, nothing is captured later.
    """
    prepared(name, store, tmp_path)
    _in_flight(in_flight, monkeypatch)
    compared: list[dict[str, Any]] = []
    real = take.check_alike
    monkeypatch.setattr(take, "check_alike", lambda *a, **k: (compared.append(k), real(*a, **k)))
    loaded = prepared(name, store, tmp_path).loaded
    assert (len(loaded.instances), loaded.in_flight) == (first, in_flight)
    assert (loaded.further is None) == (in_flight == first)
    before = loaded.bytes
    every = loaded.every_instance()
    assert (len(every), len(compared), loaded.in_flight, loaded.bytes) == (
        in_flight,
        in_flight - first,
        in_flight,
        before,
    )
    x, found = torch.randn(2, 3), []
    for instance in every:
        (given,) = instance.inputs.values()
        given.copy_(x)
        instance.replay()
        found.append(instance.outputs["output"].clone())
    if name != "Counts":
        assert all(torch.equal(one, found[0]) for one in found)
    loaded.close()
    assert loaded.further is None
    with pytest.raises(EngineError, match="closed"):
        every[-1].replay()


def test_a_loaded_model_is_freed_without_the_collector(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could capture further instances does not refer to it."""
    prepared("Plain", store, tmp_path)
    _in_flight(2, monkeypatch)
    with collector_paused():
        loaded = prepared("Plain", store, tmp_path).loaded
        left = weakref.ref(loaded)
        assert loaded.further is not None
        del loaded
        assert left() is None


def test_another_thread_captures_with_what_the_first_instance_was_given(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it runs the tasks once before, and some cannot take zeros. No batch is kept for that."""
    prepared("Plain", store, tmp_path)
    _in_flight(3, monkeypatch)
    given: list[tuple[list[str], bool]] = []
    real = restoring.capture_several

    def several(recording: Any, *args: Any, again: bool = False) -> Any:
        given.append((list(recording.example), again))
        return real(recording, *args, again=again)

    monkeypatch.setattr(restoring, "capture_several", several)
    loaded = prepared("Plain", store, tmp_path).loaded
    assert loaded.further is not None
    loaded.further.take(lambda made: made)
    thread = threading.Thread(target=loaded.every_instance)
    thread.start()
    thread.join()
    assert given == [(["x"], False), ([], True), (["x"], False)]
