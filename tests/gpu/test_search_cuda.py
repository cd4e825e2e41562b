"""Schedules from the search, on a real GPU: streams, Inductor's kernels, replays in flight, stored hits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from nimble_jobs import graph, planner
from nimble_jobs.engine.arrivals import Arrivals
from nimble_jobs.engine.capture import capture
from nimble_jobs.engine.device import memory_bytes
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.flight import Flight
from nimble_jobs.engine.private import compilers
from nimble_jobs.engine.private.compilers import keeping_compilers
from nimble_jobs.engine.private.runtime import keep_busy
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.engine.verify import check
from nimble_jobs.errors import CheckFailed
from nimble_jobs.job import Hit
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.planner import Request
from nimble_jobs.planner.forward.build import build_best
from nimble_jobs.planner.jobs import take
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.search.candidate import cost
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents
from tests.one_batch import outputs_of

CODE = '''
import torch
from torch import nn


class Branches(nn.Module):
    """Six branches of convolutions over one input: work for several streams."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.AvgPool2d(3, 1, 1), nn.Conv2d(16, 8, 1),
            )
            for _ in range(6)
        )
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        x = self.stem(x).relu()
        x = torch.cat([branch(x) for branch in self.branches], dim=1)
        return self.head(x.mean((2, 3)))


def branches():
    return Branches()
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "branches.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def module_of(device: torch.device, dtype: torch.dtype = torch.float16) -> nn.Module:
    scope: dict[str, type[nn.Module]] = {}
    exec(CODE, scope)
    torch.manual_seed(0)
    return scope["Branches"]().eval().to(device, dtype)


def test_every_number_of_streams_gives_eagers_results(device: torch.device) -> None:
    """The same program on one, two and as many streams as branches agrees with eager on ten inputs each."""
    module = module_of(device)
    x = torch.zeros(1, 3, 32, 32, device=device, dtype=torch.float16)
    recording = record(module, {"x": x}, state_of(module), device, module)
    for limit in (1, 2, 3, None):
        plan, facts = graph.make_plan(recording.program, max_streams=limit)
        graph.check_plan(recording.program, plan)
        if limit is None:
            assert plan.streams >= 6
            assert facts.syncs_used == facts.syncs_needed == facts.meg_edges - facts.matching
        instance = capture(
            recording.program, plan, state=state_of(module), constants=recording.constants, device=device
        )
        for seed in range(5):
            check(instance, module, recording.program.inputs, device, tolerance=1e-2, seed=seed)
        instance.close()


def test_the_search_measures_and_keeps_the_best(device: torch.device) -> None:
    """One stream is always a candidate, the least time for its memory wins, and the weights keep their values."""
    module = module_of(device)
    before = {n: t.clone() for n, t in state_of(module).items()}
    x = torch.zeros(1, 3, 32, 32, device=device, dtype=torch.float16)
    built = build_best(module, {"x": x}, "key", BuildOptions(), device)
    names = {c.name for c in built.schedule.candidates}
    assert {
        "eager",
        "eager kernels, 1 stream",
        "inductor kernels, fused convolutions, channels-last, 1 stream",
    } <= names
    measured = [c for c in built.schedule.candidates if c.replay_us is not None and c.name != "eager"]
    (chosen,) = (c for c in built.schedule.candidates if c.chosen)
    whole = memory_bytes(device)
    least = min(cost(c.replay_us or 0.0, c.peak_bytes, whole) for c in measured)
    assert cost(chosen.replay_us or 0.0, chosen.peak_bytes, whole) <= least / 0.98 + 1e-6
    assert all(torch.equal(before[n], t) for n, t in state_of(module).items())
    for seed in range(10):
        check(built.instance, module, built.schedule.program.inputs, device, tolerance=1e-2, seed=seed)
    built.close()


def test_other_processes_compile_what_a_search_times(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of our own are taken from them, and the schedule agrees with eager."""
    torch.manual_seed(0)
    depthwise = nn.Conv2d(48, 48, 5, padding=2, groups=48, bias=False)
    module = nn.Sequential(depthwise, nn.Conv2d(48, 40, 1)).eval().to(device, torch.float16)
    x = torch.zeros(1, 48, 31, 29, device=device, dtype=torch.float16)
    futures: list[Future[Any]] = []
    submit = compilers.submit

    def submitted(call: Callable[[], Any]) -> Future[Any] | None:
        future = submit(call)
        futures.extend([] if future is None else [future])
        return future

    monkeypatch.setattr(compilers, "submit", submitted)
    with keeping_compilers(), using(Choices()):
        compilers.start_compilers()
        end = time.monotonic() + 60
        while not compilers.ready() and time.monotonic() < end:
            time.sleep(0.1)
        built = build_best(module, {"x": x}, "key", BuildOptions(), device)
    assert futures
    assert all(isinstance(future.result(), StaticKernel) for future in futures)
    for seed in range(3):
        check(built.instance, module, built.schedule.program.inputs, device, tolerance=1e-2, seed=seed)
    built.close()


def request(code: Path, **schedule: object) -> Request:
    return Request(
        model=ModelSpec(source=f"python:{code}:branches", dtype="fp16"),
        shape=(3, 32, 32),
        dtype="float32",
        batch_size=4,
        schedule=ScheduleSpec(**schedule),  # type: ignore[arg-type]
        allowed_python=(code.parent,),
    )


def test_compiled_schedules_come_back_from_the_store(store: Store, code: Path, device: torch.device) -> None:
    """A schedule of Inductor's kernels is a stored hit for other residents, with the results of eager.

    One replay at a time: with several in flight, eager kernels may give more records a second for so small a network.
    """
    first = planner.prepare(request(code, in_flight=1), device=device, store=store, residents=Residents(2**34))
    assert first.hit is Hit.MISS
    assert first.loaded.schedule is not None
    assert first.loaded.schedule.kernels != "eager", [c.reason for c in first.loaded.schedule.candidates]
    again = planner.prepare(request(code, in_flight=1), device=device, store=store, residents=Residents(2**34))
    assert (again.hit, again.miss_reason) == (Hit.STORED, None)
    x = torch.randn(4, 3, 32, 32)
    found = outputs_of(again.loaded, x)
    with torch.no_grad():
        expected = again.loaded.module(x.to(device, torch.float16)).cpu()
    assert relative_norm(found["output"], expected) < 1e-2


def test_results_in_flight_keep_their_order(device: torch.device) -> None:
    """Forty different batches through four instances come back in order, each with its own results."""
    module = module_of(device, torch.float32)
    x = torch.zeros(2, 3, 32, 32, device=device)
    built = build_best(module, {"x": x}, "key", BuildOptions(purpose="throughput", in_flight=4, fuse="off"), device)
    assert len(built.instances) == built.schedule.in_flight == 4
    batches = [torch.randn(2, 3, 32, 32) for _ in range(40)]
    flight = Flight.of_replays(built.instances, device)
    arrivals = Arrivals((2, 3, 32, 32), torch.float32, device, in_flight=4)
    for round_ in range(2):
        seen = 0
        arrivals.begin()
        for landed in flight.run((arrivals.upload(b), i) for i, b in enumerate(batches)):
            number = landed.beside
            assert number == seen
            with torch.no_grad():
                expected = module(batches[number].to(device)).cpu()
            assert relative_norm(landed.outputs["output"], expected) < 1e-2, (round_, number)
            landed.release()
            seen += 1
        assert seen == 40
    built.close()


def slowly(outputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """A head that keeps its stream busy for 10 ms."""
    keep_busy(10_000, torch.device("cuda", 0))
    return {"output": outputs["output"] * 2}


@pytest.mark.parametrize("broken", [False, True])
def test_further_instances_come_when_batches_wait(
    store: Store, code: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """A stored schedule begins with one instance, and counts the memory of all. Without the others it goes on."""
    asked = request(code, fuse="off", in_flight=4)
    planner.prepare(asked, device=device, store=store, residents=Residents(2**34))
    if broken:
        monkeypatch.setattr(take, "check_alike", Mock(side_effect=CheckFailed("it differs")))
    loaded = planner.prepare(asked, device=device, store=store, residents=Residents(2**34)).loaded
    assert loaded.further is not None
    assert (len(loaded.instances), loaded.further.left, loaded.further.made) == (1, 3, [])
    loaded.take_off()
    _, whole = loaded.arrivals, loaded.bytes
    assert loaded.in_flight == 4
    assert outputs_of(loaded, torch.randn(4, 3, 32, 32)).keys() == {"output"}
    assert loaded.further.made == [], "one batch waits for nothing"
    batches = [torch.randn(4, 3, 32, 32) for _ in range(40)]
    with torch.no_grad():
        expected = [2 * loaded.module(x.to(device, torch.float16)).cpu() for x in batches]
    for _ in range(2):
        loaded.arrivals.begin()
        arrived = ((loaded.arrivals.upload(x), n) for n, x in enumerate(batches))
        for n, landed in enumerate(loaded.run(arrived, slowly)):
            assert landed.beside == n
            assert relative_norm(landed.outputs["output"], expected[n]) < 1e-2
            landed.release()
    assert (len(loaded.further.made), loaded.further.left) == ((0, 0) if broken else (3, 0))
    assert loaded.bytes == whole - (3 * loaded.instances[0].bytes if broken else 0)
    assert loaded.in_flight == len(loaded.every_instance()) == (1 if broken else 4)
    loaded.close()


def test_evicted_schedules_leave_the_others_right(store: Store, code: Path, device: torch.device) -> None:
    """Under a budget for one model, two models take turns; results stay those of eager."""
    residents = Residents(1)  # bytes: only what the present job uses stays
    for turn in range(4):
        residents.begin()
        made = planner.prepare(
            request(code, fuse="off", in_flight=1 + turn % 2), device=device, store=store, residents=residents
        )
        x = torch.randn(4, 3, 32, 32)
        found = outputs_of(made.loaded, x)
        with torch.no_grad():
            expected = made.loaded.module(x.to(device, torch.float16)).cpu()
        assert relative_norm(found["output"], expected) < 1e-2
        assert len(residents.keys) == 1
        assert made.hit is (Hit.MISS if turn < 2 else Hit.STORED)
