"""The launches of a plan under CUDA Stream Sanitizer's own analysis, with the CPU as the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nimble_jobs.engine.bind import Bound
from nimble_jobs.graph import make_plan, single_stream
from nimble_jobs.graph.memory import plan_memory
from tests.nets import SHAPE, bound_to, filling, net, recorded
from tests.sanitizer import CAPS, FORK, WHOLE, CpuDevice, marked
from tests.threads import syncs_of, without


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    return CpuDevice()


def planned(name: str, bound: int | None, *, arena: bool) -> tuple[Bound, int]:
    module = net(name)
    recording = recorded(module, torch.zeros(SHAPE))
    recording = filling(recording) if arena else recording
    plan, _ = make_plan(recording.program, max_streams=bound)
    return bound_to(module, recording, plan), plan.streams


@pytest.mark.parametrize("arena", [False, True], ids=["as recorded", "arena"])
@pytest.mark.parametrize("bound", CAPS)
@pytest.mark.parametrize("name", WHOLE)
def test_a_plan_is_clean_and_without_any_one_wait_or_event_it_is_not(
    name: str, bound: int | None, arena: bool, device: CpuDevice
) -> None:
    """Nothing is reported of the plan; a data race is as soon as one wait is left out, or one event not recorded."""
    ready, streams = planned(name, bound, arena=arena)
    x = torch.randn(SHAPE)
    assert device.check(ready, streams, x) is None
    syncs = list(syncs_of(ready))
    assert syncs
    for sync in syncs:
        assert "possible data race" in str(device.check(without(ready, sync), streams, x)), sync
    for number in range(FORK, marked(ready) + 1):
        assert "possible data race" in str(device.check(ready, streams, x, missing=number)), number
    assert device.check(ready, streams, x) is None


@pytest.mark.parametrize("name", WHOLE)
def test_launches_in_a_row_are_clean(name: str, device: CpuDevice) -> None:
    """The next launch over the same buffers comes after the last, through the streams' common start and end."""
    ready, streams = planned(name, None, arena=True)
    assert device.check(ready, streams, torch.randn(SHAPE), times=3) is None


@pytest.mark.parametrize("name", WHOLE)
def test_memory_by_program_order_is_a_race(name: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of parallel branches at the same place of the arena are reported."""
    monkeypatch.setattr(
        "nimble_jobs.engine.bind.plan_memory",
        lambda program, _plan, among=None: plan_memory(program, single_stream(program)[0], among=among),
    )
    monkeypatch.setattr("nimble_jobs.engine.bind.check_memory", lambda *_, **__: None)
    ready, streams = planned(name, None, arena=True)
    assert "possible data race" in str(device.check(ready, streams, torch.randn(SHAPE)))
