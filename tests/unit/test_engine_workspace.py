"""What a plan needs beside its buffers: workspaces of matrix products, by stream, device and environment."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from nimble_jobs.engine.bind import arena_plan, planned_bytes
from nimble_jobs.engine.workspace import workspace_bytes
from nimble_jobs.errors import OutOfMemory
from nimble_jobs.graph import single_stream
from nimble_jobs.planner.forward.build import build_best
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.schedule import Plan, Program
from tests.strategies import program, task

GPU = torch.device("cuda", 0)
MIB = 1 << 20


def launching(*ops: str) -> Program:
    """Independent tasks of these operators, which touch nothing."""
    return program([replace(task(i), op=op) for i, op in enumerate(ops)], [])


def on_streams(*stream_of: int) -> Plan:
    return Plan(order=tuple(range(len(stream_of))), stream_of=stream_of, syncs=())


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("ops", "stream_of", "count"),
    [
        (("aten.relu.default", "aten.convolution.default", "triton_mm_0"), (0, 1, 2), 0),
        (("aten.addmm.out", "aten.mm.default"), (0, 0), 1),
        (("aten.bmm.out", "aten.relu.default", "aten._scaled_mm.default"), (0, 1, 2), 2),
        ((), (), 0),
    ],
)
def test_one_workspace_for_each_stream_with_a_product(
    ops: tuple[str, ...], stream_of: tuple[int, ...], count: int
) -> None:
    """32 MiB on Hopper, for streams on which a matrix product runs; none on the CPU."""
    some, plan = launching(*ops), on_streams(*stream_of)
    assert workspace_bytes(some, plan, GPU) == count * 32 * MIB
    assert workspace_bytes(some, plan, torch.device("cpu")) == 0
    assert planned_bytes(some, plan, arena_plan(some, plan), GPU) == count * 32 * MIB


@pytest.mark.parametrize(
    ("capability", "config", "expected"),
    [
        ((8, 0), None, 8 * MIB + 128 * 1024),
        ((10, 0), None, 8 * MIB + 128 * 1024),
        ((9, 0), ":4096:8", 32 * MIB),
        ((9, 0), ":16:8", 128 * 1024),
        ((8, 0), ":4096:2:16:8", 8 * MIB + 128 * 1024),
        ((8, 0), ":0:0", 0),
        ((9, 0), "many", 32 * MIB),
    ],
)
def test_sizes(capability: tuple[int, int], config: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment asks for, else the device's default, also where the text cannot be read."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    if config is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert workspace_bytes(launching("aten.mm.default"), on_streams(0), GPU) == expected


def test_a_candidate_that_workspaces_make_too_large_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that buffers alone would meet is refused before anything is captured or timed."""

    def on_a_gpu(some: Program, plan: Plan, _device: torch.device) -> int:
        assert [t.op for t in some.tasks] == ["aten.addmm.out"]
        assert plan == single_stream(some)[0]
        return 32 * MIB

    for place in ("engine.bind", "planner.search.plans"):
        monkeypatch.setattr(sys.modules[f"nimble_jobs.{place}"], "workspace_bytes", on_a_gpu)
    options = BuildOptions(memory_bytes=MIB)
    expected = r"needs 335\d{5} bytes, 33554432 of them as workspaces of matrix products, more than the 1048576 that"
    with pytest.raises(OutOfMemory, match=expected):
        build_best(nn.Linear(3, 2).eval(), {"x": torch.zeros(2, 3)}, "key", options, torch.device("cpu"))
