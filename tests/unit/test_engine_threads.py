"""Plans run by threads as streams: whatever the interleaving, the results are eager's; with a hole in the plan, not."""

from __future__ import annotations

import os
from random import Random

import pytest
import torch

from nimble_jobs.engine.bind import Bound, bind
from nimble_jobs.engine.record import Recording, flatten_outputs, state_of
from nimble_jobs.engine.step import gradient_name, record_step
from nimble_jobs.errors import PlanError
from nimble_jobs.graph import check_plan, make_plan, single_stream
from nimble_jobs.graph.memory import MemoryPlan, arena_users, plan_memory
from nimble_jobs.graph.release import releases
from nimble_jobs.schedule import Plan, Program, Sync
from tests import prefork
from tests.nets import NETS, SHAPE, bound_to, filling, net, recorded
from tests.strategies import happens_before
from tests.threads import overwrite_intermediates, random_delays, run_by_threads, syncs_of, without

# Of each network, plan and kind of memory: 1,152 in all with `--all`.
RUNS = 32 if os.environ.get(prefork.COLD) else 8
CAPS = (None, 2, 3)
SEED = 5
BRANCHED = [name for name in NETS if name != "dropouts"]


class Case:
    """A network with its program: as recorded, or with all intermediates in the arena."""

    def __init__(self, name: str, *, arena: bool) -> None:
        self.module = net(name)
        own = recorded(self.module, torch.zeros(SHAPE))
        self.recording: Recording = filling(own) if arena else own
        self.program: Program = self.recording.program

    def bound(self, plan: Plan) -> Bound:
        bound = bound_to(self.module, self.recording, plan)
        overwrite_intermediates(bound, self.program)
        return bound

    def expected(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            torch.manual_seed(SEED)
            return {n: t.clone() for n, t in flatten_outputs(self.module(x.clone())).items()}


def put(bound: Bound, x: torch.Tensor) -> None:
    """Give input, and draw masks from where eager drew them."""
    bound.inputs["x"].copy_(x)
    torch.manual_seed(SEED)


def agree(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.allclose(found[n], expected[n], rtol=1e-5, atol=1e-6) for n in expected
    )


def wrong(found: dict[str, torch.Tensor] | None, expected: dict[str, torch.Tensor]) -> bool:
    return found is None or not agree(found, expected)


def held(bound: Bound, program: Program, x: torch.Tensor, hold: dict[int, int]) -> dict[str, torch.Tensor] | None:
    """Outputs of a run in which each task that is a key starts after its value; None where a task fails."""
    overwrite_intermediates(bound, program)
    put(bound, x)
    try:
        return run_by_threads(bound, hold=hold)[0]
    except (KeyError, RuntimeError):  # a tensor that is not there yet, or not any more
        return None


@pytest.mark.parametrize("arena", [False, True], ids=["as recorded", "arena"])
@pytest.mark.parametrize("bound", CAPS)
@pytest.mark.parametrize("name", NETS)
def test_every_interleaving_agrees_with_eager(name: str, bound: int | None, arena: bool) -> None:
    """Threads that start tasks late at random give eager's results on fresh inputs, in more than one order."""
    case = Case(name, arena=arena)
    plan, _ = make_plan(case.program, max_streams=bound)
    assert plan.streams >= 2
    ready = case.bound(plan)
    dice = Random(f"{name} {bound}")
    orders = set()
    for _ in range(RUNS):
        x = torch.randn(SHAPE)
        overwrite_intermediates(ready, case.program)
        put(ready, x)
        found, order = run_by_threads(ready, delays_s=random_delays(ready, dice))
        assert agree(found, case.expected(x)), order
        orders.add(tuple(order))
    assert len(orders) > 1


@pytest.mark.parametrize("arena", [False, True], ids=["as recorded", "arena"])
@pytest.mark.parametrize("bound", CAPS)
@pytest.mark.parametrize("name", BRANCHED)
def test_every_wait_is_needed(name: str, bound: int | None, arena: bool) -> None:
    """Without any one of the plan's waits, a run in which the task waited for is late is wrong or fails."""
    case = Case(name, arena=arena)
    plan, _ = make_plan(case.program, max_streams=bound)
    ready = case.bound(plan)
    x = torch.randn(SHAPE)
    expected = case.expected(x)
    assert set(syncs_of(ready)) == set(plan.syncs) != set()
    for sync in plan.syncs:
        assert wrong(held(without(ready, sync), case.program, x, {sync.before: sync.after}), expected), sync


@pytest.mark.parametrize("bound", CAPS)
@pytest.mark.parametrize("name", NETS)
def test_the_check_refuses_a_plan_without_any_one_wait(name: str, bound: int | None) -> None:
    """The proof of a recorded program's plan needs every synchronisation."""
    program = Case(name, arena=False).program
    plan, _ = make_plan(program, max_streams=bound)
    for sync in plan.syncs:
        fewer = Plan(order=plan.order, stream_of=plan.stream_of, syncs=tuple(s for s in plan.syncs if s is not sync))
        with pytest.raises(PlanError, match="no stream or synchronisation orders them"):
            check_plan(program, fewer)


def by_program_order(program: Program, plan: Plan, *, among: set[int] | None = None) -> MemoryPlan:
    """A memory plan for one stream."""
    return plan_memory(program, single_stream(program)[0], among=among)


@pytest.mark.parametrize("name", ["inception", "nas", "residual"])
def test_memory_by_program_order_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are free in program order may be in use on another stream; binding proves that and refuses."""
    case = Case(name, arena=True)
    plan, _ = make_plan(case.program)
    monkeypatch.setattr("nimble_jobs.engine.bind.plan_memory", by_program_order)
    with pytest.raises(PlanError, match="share bytes of the arena"):
        case.bound(plan)


@pytest.mark.parametrize("name", ["inception", "nas", "residual"])
def test_memory_by_program_order_gives_wrong_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the proof left out too, a reader that is late finds that its bytes, once written, are overwritten."""
    case = Case(name, arena=True)
    plan, _ = make_plan(case.program)
    monkeypatch.setattr("nimble_jobs.engine.bind.plan_memory", by_program_order)
    monkeypatch.setattr("nimble_jobs.engine.bind.check_memory", lambda *_, **__: None)
    ready = case.bound(plan)
    x = torch.randn(SHAPE)
    expected = case.expected(x)
    ordered = happens_before(plan)
    users = arena_users(case.program)
    places = by_program_order(case.program, plan).offsets
    ranges = {b: (places[b], places[b] + case.program.buffers[b].nbytes) for b in users if users[b]}
    overwritten = [
        (users[a][0], users[b][0], users[a][-1])
        for a, (start, end) in ranges.items()
        for b, (low, high) in ranges.items()
        if users[a][-1] < users[b][0] and start < high and low < end
    ]
    late = [
        {reader: over, over: writer}
        for writer, over, reader in overwritten
        if (reader, over) not in ordered and (over, writer) not in ordered
    ]
    assert late
    assert any(wrong(held(ready, case.program, x, hold), expected) for hold in late)


@pytest.mark.parametrize("name", ["inception", "nas", "residual"])
def test_releases_by_program_order_give_wrong_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's own block that is let go of when program order has done with it is missed on another stream."""
    case = Case(name, arena=False)
    plan, _ = make_plan(case.program)

    def early(program: Program, plan: Plan, buffers: set[int]) -> dict[int, tuple[int, ...]]:
        """As if all streams ran in launch order."""
        one = Plan(order=plan.order, stream_of=(0,) * len(plan.order), syncs=())
        return releases(program, one, buffers)

    monkeypatch.setattr("nimble_jobs.engine.bind.releases", early)
    ready = case.bound(plan)
    x = torch.randn(SHAPE)
    expected = case.expected(x)
    users = {
        buffer: [t for t, task in enumerate(case.program.tasks) if any(v.buffer == buffer for v in task.reads)]
        for step in ready.steps
        for buffer in step.drops
    }
    ordered = happens_before(plan)
    pairs = [(u, s.task) for s in ready.steps for b in s.drops for u in users[b] if (u, s.task) not in ordered]
    assert pairs
    assert all(wrong(held(ready, case.program, x, {late: early}), expected) for late, early in pairs)


@pytest.mark.parametrize("bound", CAPS)
def test_a_backward_pass_by_threads(bound: int | None) -> None:
    """Gradients of a step, whose backward pass is run by threads over what the forward pass saved, are autograd's."""
    module = net("nas").train()
    x = torch.randn(SHAPE)
    parameters = dict(module.named_parameters())
    state = state_of(module)
    step = record_step(module, {"x": x}, parameters, state, x.device, module=module)
    forward = bound_to(module, step.forward, single_stream(step.forward.program)[0])
    forward.inputs["x"].copy_(x)
    with torch.no_grad():
        saved = {**forward.run(), **forward.inputs}
    plan, _ = make_plan(step.backward.program, max_streams=bound)
    assert plan.streams >= 2
    ready = bind(
        step.backward.program,
        plan,
        state={**state, **{name: saved[source] for name, source in step.saved.items()}},
        constants=step.backward.constants,
        device=x.device,
    )
    dice = Random(f"backward {bound}")
    for _ in range(RUNS // 2):
        given = torch.randn_like(saved["output"])
        expected = torch.autograd.grad(module(x), list(parameters.values()), given)
        overwrite_intermediates(ready, step.backward.program)
        ready.inputs[gradient_name("output")].copy_(given)
        found, order = run_by_threads(ready, delays_s=random_delays(ready, dice))
        assert len(found) == len(parameters)
        for name, gradient in zip(parameters, expected, strict=True):
            assert torch.allclose(found[gradient_name(name)], gradient, rtol=1e-4, atol=1e-5), (name, order)


def test_a_thread_that_waits_for_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold that contradicts the plan is a deadlock, and ends as an error."""
    monkeypatch.setattr("tests.threads.PATIENCE_S", 0.2)
    case = Case("inception", arena=False)
    plan, _ = make_plan(case.program)
    sync: Sync = plan.syncs[0]
    with pytest.raises(TimeoutError, match="does not end"):
        run_by_threads(case.bound(plan), hold={sync.before: sync.after})
