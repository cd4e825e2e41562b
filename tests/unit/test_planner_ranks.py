"""A training step on several ranks: losses and weights of one process, by collectives inside the schedule."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.collectives import rehearsing
from nimble_jobs.errors import CaptureFailed, CheckFailed, EngineError, JobFailed, NoJointReplay, RankLost
from nimble_jobs.graph import Analysis
from nimble_jobs.graph.collectives import collectives
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.step.build import CapturedStep, EagerStep, TrainingStep, prepare_step
from nimble_jobs.planner.step.live import Capturable
from nimble_jobs.planner.step.request import OptimizerRecipe, Ranks, StepRequest
from nimble_jobs.schedule import ALL_REDUCE
from tests.ranks import Threads, as_ranks

Programs = Mapping[Role, Capturable]
CPU = torch.device("cpu")
COUNT, BATCH, STEPS = 2, 8, 6
# Sums of a few hundred fp32 numbers in another order, over six updates.
ROUNDING = 1e-5


def net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    first: nn.Module = nn.BatchNorm2d(4) if norm else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=not norm), first, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 16), nn.Linear(16, 5)
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(BATCH, 3, 6, 6, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


def request(module: nn.Module, size: int, ranks: Ranks | None, **more: object) -> StepRequest:
    x, y = batches()[0]
    return StepRequest(
        module=module,
        x=x[:size],
        y=y[:size],
        loss=nn.CrossEntropyLoss(),
        loss_name="cross_entropy",
        optimizer=OptimizerRecipe(name="sgd", momentum=0.9),
        clip_norm=1.0,
        ranks=ranks,
        **more,  # type: ignore[arg-type]
    )


def in_eager(wanted: StepRequest) -> TrainingStep:
    return EagerStep(wanted, CPU)


def captured(wanted: StepRequest) -> TrainingStep:
    step = prepare_step(wanted, device=CPU)
    assert isinstance(step, CapturedStep), step.fallback
    return step


def alone(*, norm: bool = False, accumulate: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    module = net(norm=norm).train()
    step = in_eager(request(module, BATCH, None, accumulate=accumulate))
    losses = []
    for i, (x, y) in enumerate(batches()):
        step.run(x, y, 0.1, (i + 1) % accumulate == 0)
        losses.append(float(step.loss))
    return losses, [p.detach() for p in module.parameters()]


def as_two(
    tmp_path: Path,
    make: Callable[[StepRequest], TrainingStep],
    cuts: tuple[int, ...] = (4,),
    *,
    norm: bool = False,
    accumulate: int = 1,
    bucket_bytes: int = 600,
) -> list[tuple[list[float], list[int], nn.Module]]:
    """Losses, right answers and the module of each rank. Batch i is cut at `cuts[i % len(cuts)]`."""
    prepared = []
    for _ in range(COUNT):  # one after another, because building looks at random states of the whole process
        module = net(norm=norm).train()
        ranks = Ranks(count=COUNT, bucket_bytes=bucket_bytes)
        with rehearsing():
            prepared.append((module, make(request(module, BATCH // COUNT, ranks, accumulate=accumulate))))

    def work(peers: Threads) -> tuple[list[float], list[int], nn.Module]:
        module, step = prepared[peers.rank]
        step.join(peers)
        losses, right = [], []
        for i, (x, y) in enumerate(batches()):
            cut = cuts[i % len(cuts)]
            mine = slice(cut) if peers.rank == 0 else slice(cut, None)
            step.weigh(len(y[mine]) / BATCH)
            last = (i + 1) % accumulate == 0
            if len(y[mine]):
                step.run(x[mine], y[mine], 0.1, last)
            else:
                step.sit_out(0.1, last)
            losses.append(float(step.loss))
            right.append(int(step.correct))
        return losses, right, module

    return as_ranks(COUNT, tmp_path / "meeting", work)


@pytest.mark.parametrize("make", [in_eager, captured])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_and_weights_are_those_of_one_process(
    tmp_path: Path, make: Callable[[StepRequest], TrainingStep], accumulate: int
) -> None:
    """Up to rounding, also where shares are unequal or empty; and all ranks have the same bits."""
    losses, weights = alone(accumulate=accumulate)
    first, second = as_two(tmp_path, make, (4, 5, 8), accumulate=accumulate)
    assert first[0] == pytest.approx(losses, rel=ROUNDING)
    assert first[:2] == second[:2]
    for mine, other, one in zip(first[2].parameters(), second[2].parameters(), weights, strict=True):
        assert torch.equal(mine, other)
        assert torch.allclose(mine, one, rtol=ROUNDING, atol=ROUNDING)


def test_replays_and_eager_are_the_same_bits(tmp_path: Path) -> None:
    """The captured step sums in the order of the eager one, in several buckets."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    replayed, eager = as_two(tmp_path / "a", captured)[0], as_two(tmp_path / "b", in_eager)[0]
    assert replayed[:2] == eager[:2]


def test_running_statistics_are_the_means_of_all_ranks(tmp_path: Path) -> None:
    """The running mean is that of whole batches, and every rank has the same bits; normalisation itself is by share."""
    first, second = as_two(tmp_path, captured, norm=True)
    for name, mine in first[2].state_dict().items():
        assert torch.equal(mine, second[2].state_dict()[name]), name
    whole = net(norm=True).train()
    conv, norm = whole[0], whole[1]
    assert isinstance(norm, nn.BatchNorm2d)
    x = batches()[0][0]
    mean = conv(x).mean((0, 2, 3)) * norm.momentum

    with rehearsing():
        steps = [in_eager(request(net(norm=True).train(), BATCH // COUNT, Ranks(count=COUNT))) for _ in range(COUNT)]

    def one_step(peers: Threads) -> torch.Tensor:
        step = steps[peers.rank]
        assert isinstance(step, EagerStep)
        step.join(peers)
        step.weigh(0.5)
        step.run(*(t[4 * peers.rank :][:4] for t in batches()[0]), 0.1)
        found = step.arithmetic.tensors["1.running_mean"]
        return found.clone()

    for found in as_ranks(COUNT, tmp_path / "second", one_step):
        assert torch.allclose(found, mean, rtol=ROUNDING, atol=ROUNDING)


def test_collectives_are_tasks_that_run_beside_the_backward_pass() -> None:
    """All in one order, each as early as its gradients allow, on a stream of their own."""
    with rehearsing():
        step = captured(request(net().train(), 4, Ranks(count=COUNT, bucket_bytes=600)))
    assert step.schedule is not None
    program = step.schedule.program
    summed = collectives(program)
    assert len(summed) == 4  # the last layer with the bias before it, that one's weight, the first layer, figures
    analysis = Analysis.of(program)
    for before, after in itertools.pairwise(summed):
        assert before in analysis.dag.preds[after]
    last_gradient = max(t.index for t in program.tasks if "convolution_backward" in t.op)
    assert summed[0] < summed[1] < last_gradient < summed[2]
    plan, _ = analysis.single_stream()
    assert {i for i, stream in enumerate(plan.stream_of) if stream == 1} == set(summed)
    assert plan.streams == 2


def test_a_rehearsed_step_does_not_train() -> None:
    """Outside of a group, sums are refused, and so is what was captured without them."""
    with rehearsing():
        eager, replayed = (make(request(net().train(), 4, Ranks(count=COUNT))) for make in (in_eager, captured))
    x, y = batches()[0]
    with pytest.raises(EngineError, match=f"{ALL_REDUCE} is called, but this process is no rank"):
        eager.run(x[:4], y[:4], 0.1)
    with pytest.raises(EngineError, match="has not joined the other ranks"):
        replayed.run(x[:4], y[:4], 0.1)


def test_a_capture_without_the_sums_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks refuse a replay after which their weights differ."""
    with rehearsing():
        steps = [captured(request(net().train(), 4, Ranks(count=COUNT))) for _ in range(COUNT)]

    def work(peers: Threads) -> str:
        step = steps[peers.rank]
        assert isinstance(step, CapturedStep)
        assert step._rehearsed is not None
        live, _ = step._rehearsed
        real = live.capture

        def without(wanted: Programs) -> dict[Role, Instance]:
            made = real(wanted)
            for instance in made.values():
                replay = instance.replay

                def alone(replay: Callable[[], None] = replay) -> None:
                    with rehearsing():
                        replay()

                monkeypatch.setattr(instance, "replay", alone)
            return made

        monkeypatch.setattr(live, "capture", without)
        with pytest.raises(CheckFailed) as caught:
            step.join(peers)
        return str(caught.value)

    first, second = as_ranks(COUNT, tmp_path / "meeting", work)
    assert first == second
    assert "differs from eager" in first or "is not the same on all ranks" in first


@pytest.mark.parametrize("kind", ["parameter", "momentum"])
def test_a_capture_that_leaves_another_state_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The losses and sums of its replays are right and equal on all ranks; what an update leaves is not eager's."""
    with rehearsing():
        steps = [captured(request(net().train(), 4, Ranks(count=COUNT))) for _ in range(COUNT)]

    def work(peers: Threads) -> str:
        step = steps[peers.rank]
        assert isinstance(step, CapturedStep)
        assert step._rehearsed is not None
        live, _ = step._rehearsed
        real = live.capture
        name = "5.weight" if kind == "parameter" else "@optimizer.5.weight.momentum_buffer"

        def spoilt(wanted: Programs) -> dict[Role, Instance]:
            made = real(wanted)
            for instance in made.values():
                replay = instance.replay

                def twice(replay: Callable[[], None] = replay) -> None:
                    tensor = live.state()[name].detach()
                    before = tensor.clone()
                    replay()
                    tensor.add_(tensor - before)

                monkeypatch.setattr(instance, "replay", twice)
            return made

        monkeypatch.setattr(live, "capture", spoilt)
        with pytest.raises(CheckFailed) as caught:
            step.join(peers)
        return str(caught.value)

    first, second = as_ranks(COUNT, tmp_path / "meeting", work)
    assert first == second
    assert "5.weight" in first


def failing_in(
    role: Role, error: EngineError, on: int, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Threads], EngineError]:
    """For each of two ranks, what it raises if one of them cannot capture the program of this role. Values stay.

    CaptureFailed comes after the program has run, other errors before.
    """
    with rehearsing():
        wanted = [request(net().train(), 4, Ranks(count=COUNT), accumulate=2) for _ in range(COUNT)]
        steps = [captured(one) for one in wanted]

    def work(peers: Threads) -> EngineError:
        step = steps[peers.rank]
        assert isinstance(step, CapturedStep)
        assert step._rehearsed is not None
        live, _ = step._rehearsed
        real = live.capture
        before = {name: tensor.detach().clone() for name, tensor in live.state().items()}

        def refusing(wanted: Programs) -> dict[Role, Instance]:
            fails = peers.rank == on and role in wanted
            if fails and not isinstance(error, CaptureFailed):
                raise error
            made = real(wanted)
            if fails:
                raise error
            return made

        monkeypatch.setattr(live, "capture", refusing)
        with pytest.raises(EngineError) as caught:
            step.join(peers)
        assert all(torch.equal(tensor, before[name]) for name, tensor in live.state().items())
        return caught.value

    return work


@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("role", [Role.UPDATE, Role.ACCUMULATE])
def test_a_rank_whose_device_refuses_the_capture_tells_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, on: int
) -> None:
    """Its sums have run, so the others ask, too, before they begin with the next program."""
    work = failing_in(role, CaptureFailed("the schedule cannot be captured"), on, monkeypatch)
    for found in as_ranks(COUNT, tmp_path / "meeting", work):
        assert isinstance(found, NoJointReplay)
        assert str(found) == f"rank {on}: the schedule cannot be captured"


def test_a_rank_that_fails_before_its_sums_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may wait for its sums, and would not answer. Here the other one does nothing."""
    error = EngineError("no such kernel")
    work, left = failing_in(Role.ACCUMULATE, error, 1, monkeypatch), threading.Event()

    def one_of_two(peers: Threads) -> EngineError | None:
        if peers.rank == 0:
            left.wait()
            return None
        try:
            return work(peers)
        finally:
            left.set()

    found = as_ranks(COUNT, tmp_path / "meeting", one_of_two)
    assert found[1] is error


def test_a_rank_that_leaves_is_noticed(tmp_path: Path) -> None:
    """The next sum says so, instead of waiting."""
    with rehearsing():
        steps = [in_eager(request(net().train(), 4, Ranks(count=COUNT))) for _ in range(COUNT)]
    joined = threading.Barrier(COUNT)

    def work(peers: Threads) -> None:
        step = steps[peers.rank]
        step.join(peers)
        joined.wait()  # one that leaves earlier ends the others' attempt to join
        if peers.rank == 1:
            peers.close()
            return
        x, y = batches()[0]
        with pytest.raises(RankLost, match="another rank of the training is gone or does not answer: "):
            step.run(x[:4], y[:4], 0.1)

    as_ranks(COUNT, tmp_path / "meeting", work)


def test_other_gradients_than_before_are_refused() -> None:
    """A parameter without a gradient in one batch would make ranks sum different things."""
    with rehearsing():
        step = in_eager(request(net().train(), 4, Ranks(count=COUNT)))
        assert isinstance(step, EagerStep)
        x, y = batches()[0]
        step.run(x[:4], y[:4], 0.1)
        reduction = step.arithmetic.reduction
        assert reduction is not None
        with pytest.raises(JobFailed, match=r"run.gpus: the parameter '5.bias' had a gradient before and has none now"):
            reduction.gradients({n: p for n, p in step.arithmetic.parameters.items() if n != "5.bias"})
