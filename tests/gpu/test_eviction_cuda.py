"""Eviction next to graphs that stay: what one graph held must not be what another one still uses.

A library's workspace that was made while one graph was captured, and that another captured too, may be freed with the
first (https://github.com/pytorch/pytorch/issues/193402). Freed memory is overwritten here at once, so that a graph
which still uses it would give other bits.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nimble_jobs import planner
from nimble_jobs.engine.capture import Instance, capture
from nimble_jobs.engine.device import synchronize
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.graph import make_plan, single_stream
from nimble_jobs.job import Hit
from nimble_jobs.models.build import build
from nimble_jobs.planner import Loaded, Request
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents
from tests.one_batch import outputs_of

ROUNDS = 200
WIDTHS = (256, 384, 512, 640)
CODE = """
import torch
from torch import nn


class Products(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.branches = nn.ModuleList(nn.Linear(width, width, bias=i % 2 == 0) for i in range(4))
        self.conv = nn.Conv1d(4, 8, 3)

    def forward(self, x):
        x = self.first(x).relu()
        stacked = torch.stack([branch(x) for branch in self.branches], dim=1)
        mixed = torch.bmm(stacked, stacked.transpose(1, 2))
        return torch.cat([torch.bmm(mixed, stacked).mean(1), self.conv(stacked).flatten(1)], dim=1)


def products(width):
    return Products(width).eval()
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "products.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def request(code: Path, width: int, fuse: str = "off") -> Request:
    return Request(
        model=ModelSpec(source=f"python:{code}:products", args={"width": width}),
        shape=(width,),
        dtype="float32",
        batch_size=16,
        schedule=ScheduleSpec(fuse=fuse),  # type: ignore[arg-type]
        allowed_python=(code.parent,),
    )


def batch(width: int) -> torch.Tensor:
    return torch.randn(16, width, generator=torch.Generator().manual_seed(width))


def output(loaded: Loaded, x: torch.Tensor) -> torch.Tensor:
    return outputs_of(loaded, x)["output"].clone()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def overwrite_free_memory(device: torch.device) -> None:
    """Take what is free in the allocator, and some more, fill it with values that no result survives, and free it."""
    synchronize(device)
    blocks = [
        torch.full((size,), float("nan"), device=device) for size in (2**8, 2**14, 2**18, 2**20) for _ in range(8)
    ]
    blocks.append(torch.full((2**26,), float("nan"), device=device))
    synchronize(device)
    del blocks
    if device.type == "cuda":
        torch.cuda.empty_cache()


def test_what_stays_is_right_after_each_eviction(store: Store, code: Path, device: torch.device) -> None:
    """200 times: a model comes, others go, and all that stayed replay to the bits that they gave when they came."""
    chance = random.Random(0)
    wanted = {width: request(code, width) for width in WIDTHS}
    sizes = {}
    for width in WIDTHS:
        alone = Residents(2**40)
        made = planner.prepare(wanted[width], device=device, store=store, residents=alone)
        assert made.summary()["runs"] == "schedule"
        sizes[width] = made.loaded.bytes
        alone.clear()
    budget = sum(sizes.values()) - min(sizes.values()) // 2  # all but one
    kept: dict[str, tuple[int, Loaded]] = {}
    came: dict[str, str] = {}  # digest of the first output of each that is there
    evicted = 0

    def changed(held: dict[str, int]) -> None:
        nonlocal evicted
        for key in [k for k in kept if k not in held]:
            del kept[key], came[key]
            evicted += 1

    residents = Residents(budget, on_change=changed)
    for _ in range(ROUNDS):
        width = chance.choice(WIDTHS)
        residents.begin()
        made = planner.prepare(wanted[width], device=device, store=store, residents=residents)
        assert made.hit in (Hit.STORED, Hit.RESIDENT)
        assert residents.used_bytes <= budget
        key = residents.keys[-1]
        if made.hit is Hit.STORED:
            first = output(made.loaded, batch(width))
            with torch.no_grad():
                expected = made.loaded.module(batch(width).to(device)).cpu()
            assert relative_norm(first, expected) < 1e-3
            kept[key], came[key] = (width, made.loaded), digest(first)
        overwrite_free_memory(device)
        assert set(kept) == set(residents.keys)
        order = list(kept)
        chance.shuffle(order)
        for each in order:
            its_width, loaded = kept[each]
            assert digest(output(loaded, batch(its_width))) == came[each], f"width {its_width}, {evicted} evictions"
    assert evicted > ROUNDS // 10
    residents.clear()


@pytest.mark.parametrize("streams", [1, 4])
def test_graphs_closed_in_any_order(code: Path, device: torch.device, streams: int) -> None:
    """Without anything between: graphs come and go in random order, and each replay of the others keeps its bits."""
    chance = random.Random(streams)
    alive: list[tuple[Instance, torch.nn.Module, str]] = []

    def replayed(instance: Instance) -> str:
        for tensor in instance.outputs.values():
            tensor.fill_(float("nan"))
        instance.replay()
        synchronize(device)
        return digest(instance.outputs["output"].cpu())

    for _ in range(ROUNDS):
        if len(alive) < 3 or (len(alive) < 8 and chance.random() < 0.5):
            width = chance.choice(WIDTHS)
            module = build(request(code, width).model, device=str(device), allowed_python=(code.parent,))
            x = batch(width).to(device)
            recording = record(module, {"x": x}, state_of(module), device, module)
            plan, _ = (
                single_stream(recording.program) if streams == 1 else make_plan(recording.program, max_streams=streams)
            )
            instance = capture(
                recording.program, plan, state=state_of(module), constants=recording.constants, device=device
            )
            instance.inputs["x"].copy_(x)
            alive.append((instance, module, replayed(instance)))
        else:
            alive.pop(chance.randrange(len(alive)))[0].close()
        overwrite_free_memory(device)
        for instance, _, first in chance.sample(alive, len(alive)):
            assert replayed(instance) == first
    for instance, _, _ in alive:
        instance.close()


def test_the_bytes_of_residents_are_those_that_the_device_lost(store: Store, code: Path, device: torch.device) -> None:
    """What they say that they hold is near what the allocator took for them, and clearing gives it back."""

    def reserved() -> int:
        synchronize(device)
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(device))

    wanted = [request(code, width, fuse="auto") for width in (1024, 2048)]
    for each in wanted:  # builds them; libraries make what they keep for good
        residents = Residents(2**40)
        planner.prepare(each, device=device, store=store, residents=residents)
        residents.clear()
    before = reserved()
    residents = Residents(2**40)
    for each in wanted:
        found = planner.prepare(each, device=device, store=store, residents=residents)
        assert found.hit is Hit.STORED
        said = residents.used_bytes
        found.loaded.every_instance()  # their memory counts before they are captured
        assert residents.used_bytes == said
    taken = reserved() - before
    segments = 32 * 2**20  # of the allocator, taken whole
    assert abs(taken - residents.used_bytes) <= 0.1 * taken + segments
    residents.clear()
    assert reserved() - before <= segments
