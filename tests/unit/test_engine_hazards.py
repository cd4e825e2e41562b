"""Plans with their memory, simulated in any order that they allow: no task ever sees what it should not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.bench import zoo
from nimble_jobs.bench.zoo.nasnet import NORMAL, REDUCTION, NASNet
from nimble_jobs.engine.record import state_of
from nimble_jobs.engine.step import record_step
from nimble_jobs.graph import make_plan, single_stream
from nimble_jobs.graph.memory import plan_memory
from nimble_jobs.graph.release import releases
from nimble_jobs.schedule import Plan, Program
from tests.interleavings import interleaving
from tests.marked_memory import Hazards, allocated_places, arena_places, delayed, returned
from tests.nets import SHAPE, net, recorded
from tests.strategies import flows, programs

TRIALS = 1_000  # interleavings of each network


def nasnet() -> Program:
    """All of NASNet-A with one cell a stage and a few filters."""
    module = NASNet(
        NORMAL, REDUCTION, repeats=1, filters=8, stem_filters=4, skip_reductions=True, num_classes=3
    )  # fmt: skip
    return recorded(module.eval(), torch.zeros(1, 3, 32, 32)).program


def googlenet() -> Program:
    return recorded(zoo.create("googlenet"), torch.zeros(1, 3, 16, 16)).program


def backward() -> Program:
    """The backward pass of a cell in training mode."""
    module = net("nas").train()
    x = torch.zeros(SHAPE)
    leaves = dict(module.named_parameters())
    return record_step(module, {"x": x}, leaves, state_of(module), x.device, module=module).backward.program


@pytest.fixture(scope="module", params=[nasnet, googlenet, backward], ids=lambda made: made.__name__)
def network(request: pytest.FixtureRequest) -> Program:
    program: Program = request.param()
    return program


@settings(max_examples=50, deadline=None)
@given(flows() | programs(), st.none() | st.integers(1, 3))
def test_drawn_programs_meet_no_hazard(some: Program, bound: int | None) -> None:
    """With the arena and with an allocator that serves each stream alone, twenty interleavings each."""
    plan, _ = make_plan(some, max_streams=bound)
    for places in (arena_places(some, plan_memory(some, plan)), allocated_places(some, plan)):
        hazards = Hazards(some, places)
        for seed in range(20):
            assert hazards.first(interleaving(plan, seed)) is None


@settings(max_examples=50, deadline=None)
@given(flows(), st.none() | st.integers(2, 3))
def test_every_wait_of_drawn_programs_is_needed(some: Program, bound: int | None) -> None:
    """Without a wait, the order in which only the task waited for is late meets a hazard."""
    plan, _ = make_plan(some, max_streams=bound)
    hazards = Hazards(some, arena_places(some, plan_memory(some, plan)))
    every_wait_is_needed(hazards, plan)


@pytest.mark.parametrize("bound", [None, 3])
def test_a_thousand_interleavings_of_a_network(network: Program, bound: int | None) -> None:
    """Recorded networks in their planned arena: a thousand interleavings without a hazard."""
    plan, facts = make_plan(network, max_streams=bound)
    assert facts.streams > 2
    places = arena_places(network, plan_memory(network, plan))
    hazards = Hazards(network, places)
    for seed in range(TRIALS // 2):
        assert hazards.first(interleaving(plan, seed)) is None


def test_blocks_that_operators_allocate(network: Program) -> None:
    """The same where each stream's allocator reuses blocks as soon as the plan lets go of them."""
    plan, _ = make_plan(network)
    hazards = Hazards(network, allocated_places(network, plan))
    for seed in range(TRIALS // 5):
        assert hazards.first(interleaving(plan, seed)) is None


@pytest.mark.parametrize("bound", [None, 3])
def test_every_wait_of_a_network_is_needed(network: Program, bound: int | None) -> None:
    """Recorded networks too: no wait is there for nothing."""
    plan, _ = make_plan(network, max_streams=bound)
    assert plan.syncs
    every_wait_is_needed(Hazards(network, arena_places(network, plan_memory(network, plan))), plan)


def test_memory_by_program_order_meets_hazards(network: Program) -> None:
    """An arena that was planned for one stream does not serve several."""
    plan, _ = make_plan(network)
    hazards = Hazards(network, arena_places(network, plan_memory(network, single_stream(network)[0])))
    assert any(hazards.first(interleaving(plan, seed)) is not None for seed in range(100))


@pytest.mark.parametrize("made", [nasnet, googlenet])
def test_releases_by_launch_order_meet_hazards(made: Callable[[], Program]) -> None:
    """Nor do blocks that are let go of as if all streams ran in launch order, where operators allocate most of them."""
    network = made()
    plan, _ = make_plan(network)
    one = Plan(order=plan.order, stream_of=(0,) * len(plan.order), syncs=())
    hazards = Hazards(network, allocated_places(network, plan, releases(network, one, returned(network))))
    assert any(hazards.first(interleaving(plan, seed)) is not None for seed in range(100))


def test_random_draws_out_of_turn_are_hazards() -> None:
    """Masks depend on the order of the draws from one generator."""
    some = recorded(net("dropouts"), torch.zeros(SHAPE)).program
    plan, _ = make_plan(some)
    hazards = Hazards(some, arena_places(some, plan_memory(some, plan)))
    assert all(hazards.first(interleaving(plan, seed)) is None for seed in range(50))
    draws = [t.index for t in some.tasks if t.random]
    assert len(draws) == 3
    swapped = {draws[0]: draws[1], draws[1]: draws[0]}
    found = Hazards(some, arena_places(some, plan_memory(some, single_stream(some)[0]))).first(
        swapped.get(i, i) for i in range(len(some.tasks))
    )
    assert found is not None


def every_wait_is_needed(hazards: Hazards, plan: Plan) -> None:
    """Without it, the order in which only the task waited for is late is possible, and meets a hazard."""
    for sync in plan.syncs:
        assert delayed(plan, sync.before, sync.after) is None
        fewer = dataclasses.replace(plan, syncs=tuple(s for s in plan.syncs if s is not sync))
        order = delayed(fewer, sync.before, sync.after)
        assert order is not None
        assert hazards.first(order) is not None, sync
