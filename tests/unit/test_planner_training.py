"""Training steps on the CPU: as torch's own training loop computes them, step by step."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from nimble_jobs.engine.capture import _CallInstance
from nimble_jobs.engine.verify import TOLERANCE
from nimble_jobs.errors import EngineError, UsageError
from nimble_jobs.graph import Analysis
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.search import search as searching
from nimble_jobs.planner.search.candidate import MeasuredCandidate
from nimble_jobs.planner.search.plans import few_plans
from nimble_jobs.planner.search.search import Search
from nimble_jobs.planner.search.target import Programs
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.planner.step import live as step_live
from nimble_jobs.planner.step.build import (
    EagerStep,
    OptimizerRecipe,
    StepRequest,
    TrainingStep,
    default_tolerance,
    prepare_step,
)
from nimble_jobs.planner.step.live import LiveStep
from nimble_jobs.planner.step.target import StepInstances, StepTarget
from nimble_jobs.schedule import GraphFacts, Plan, Program, Schedule

CPU = torch.device("cpu")
STEPS = 20


def images(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),  # before a norm its gradient would be noise around zero
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(4 * 9, 5),
    )


def batches(count: int = STEPS, size: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield (
            torch.randn(size, 3, 8, 8, generator=generator),
            torch.randint(0, 5, (size,), generator=generator),
        )


def lr_at(step: int) -> float:
    return 0.1 / (1 + step)


def request_for(module: nn.Module, optimizer: OptimizerRecipe, **more: Any) -> StepRequest:
    x, y = next(batches(1))
    return StepRequest(
        module=module.train(),
        x=x,
        y=y,
        loss=nn.functional.cross_entropy,
        loss_name="cross_entropy",
        optimizer=optimizer,
        **more,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe, and the same as torch's own optimizer."""

    recipe: OptimizerRecipe
    torch_optimizer: Any
    kwargs: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)


NORMS = ("1.weight", "1.bias", "6.bias")
CASES = {
    "sgd": Case(recipe=OptimizerRecipe(name="sgd"), torch_optimizer=torch.optim.SGD, kwargs={}),
    "momentum": Case(
        recipe=OptimizerRecipe(name="sgd", momentum=0.9, weight_decay=0.01),
        torch_optimizer=torch.optim.SGD,
        kwargs={"momentum": 0.9, "weight_decay": 0.01},
    ),
    "nesterov": Case(
        recipe=OptimizerRecipe(name="sgd", momentum=0.9, nesterov=True),
        torch_optimizer=torch.optim.SGD,
        kwargs={"momentum": 0.9, "nesterov": True},
    ),
    "adam": Case(
        recipe=OptimizerRecipe(name="adam", betas=(0.8, 0.99), weight_decay=0.01),
        torch_optimizer=torch.optim.Adam,
        kwargs={"betas": (0.8, 0.99), "weight_decay": 0.01},
    ),
    "adamw": Case(
        recipe=OptimizerRecipe(name="adamw", eps=1e-6, weight_decay=0.1),
        torch_optimizer=torch.optim.AdamW,
        kwargs={"eps": 1e-6, "weight_decay": 0.1},
    ),
    "groups": Case(
        recipe=OptimizerRecipe(name="adamw", weight_decay=0.1, groups=((NORMS, 0.0),)),
        torch_optimizer=torch.optim.AdamW,
        kwargs={"weight_decay": 0.1},
    ),
    "clipped": Case(
        recipe=OptimizerRecipe(name="sgd", momentum=0.9),
        torch_optimizer=torch.optim.SGD,
        kwargs={"momentum": 0.9},
        more={"clip_norm": 0.5},
    ),
    "accumulated": Case(
        recipe=OptimizerRecipe(name="sgd", momentum=0.9),
        torch_optimizer=torch.optim.SGD,
        kwargs={"momentum": 0.9},
        more={"accumulate": 4},
    ),
    "bf16": Case(
        recipe=OptimizerRecipe(name="adam"),
        torch_optimizer=torch.optim.Adam,
        kwargs={},
        more={"precision": "bf16"},
    ),
}


def torch_loop(module: nn.Module, case: Case) -> list[float]:
    """Losses of the training loop as it is written everywhere."""
    names = dict(module.named_parameters())
    plain = [n for group, _ in case.recipe.groups for n in group]
    groups = [{"params": [p for n, p in names.items() if n not in plain]}]
    if plain:
        groups.append({"params": [names[n] for n in plain], "weight_decay": 0.0})
    optimizer = case.torch_optimizer(groups, lr=0.1, **case.kwargs)
    accumulate, losses = case.more.get("accumulate", 1), []
    for step, (x, y) in enumerate(batches()):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        with torch.autocast("cpu", torch.bfloat16, enabled="precision" in case.more):
            loss = nn.functional.cross_entropy(module(x), y)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (step + 1) % accumulate == 0:
            if "clip_norm" in case.more:
                nn.utils.clip_grad_norm_(module.parameters(), case.more["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
    return losses


def run(step: TrainingStep, accumulate: int = 1, *, start: int = 0, stop: int = STEPS) -> list[float]:
    losses = []
    for number, (x, y) in list(enumerate(batches()))[start:stop]:
        step.run(x, y, lr_at(number), (number + 1) % accumulate == 0)
        losses.append(float(step.loss))
    return losses


def eager(request: StepRequest) -> TrainingStep:
    return EagerStep(request, CPU)


def captured(request: StepRequest) -> TrainingStep:
    step = prepare_step(request, device=CPU)
    assert step.fallback is None
    return step


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("made", [eager, captured])
def test_twenty_steps_equal_torchs_own_loop(name: str, made: Callable[[StepRequest], TrainingStep]) -> None:
    """Losses and weights after 20 steps with a changing learning rate agree with torch.optim's to 1e-5."""
    case = CASES[name]
    module, twin = images(), images()
    step = made(request_for(module, case.recipe, **case.more))
    losses = run(step, case.more.get("accumulate", 1))
    expected = torch_loop(twin, case)
    assert losses == pytest.approx(expected, rel=1e-5)
    for key, tensor in twin.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], tensor, rtol=1e-4, atol=1e-6, msg=key)
    assert int(module[1].num_batches_tracked) == STEPS


def test_frozen_parameters_stay_and_have_no_state() -> None:
    """Without requires_grad a parameter gets neither gradient nor slots, and does not move."""
    module = images()
    module[0].requires_grad_(False)
    before = module[0].weight.clone()
    step = eager(request_for(module, OptimizerRecipe(name="adamw", weight_decay=0.1)))
    run(step)
    assert torch.equal(module[0].weight, before)
    assert module[0].weight.grad is None
    assert not [n for n in step.state_dict() if n.startswith("optimizer.0.")]


def test_the_state_of_a_step_goes_on_exactly() -> None:
    """A second step that takes over weights and state after 7 batches ends with the bits of the first."""
    recipe = OptimizerRecipe(name="adamw", weight_decay=0.1)
    module = images()
    step = eager(request_for(module, recipe, accumulate=2))
    run(step, 2, stop=7)
    weights = copy.deepcopy(module.state_dict())
    state = {n: t.clone() for n, t in step.state_dict().items()}
    run(step, 2, start=7)
    other = images()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    later = eager(request_for(other, recipe, accumulate=2))
    other.load_state_dict(weights)
    later.load_state_dict(state)
    run(later, 2, start=7)
    for key, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key
    for key, tensor in step.state_dict().items():
        assert torch.equal(tensor, later.state_dict()[key]), key


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    """A missing, an unknown and a misshapen tensor are each named."""
    step = eager(request_for(images(), OptimizerRecipe(name="sgd", momentum=0.9)))
    state = step.state_dict()
    name = "optimizer.0.weight.momentum_buffer"
    with pytest.raises(UsageError, match=f"'{name}' is missing"):
        step.load_state_dict({n: t for n, t in state.items() if n != name})
    with pytest.raises(UsageError, match=r"'optimizer\.9\.step' is not known"):
        step.load_state_dict({**state, "optimizer.9.step": torch.zeros(())})
    with pytest.raises(UsageError, match=r"torch.float32\[2\]; expected"):
        step.load_state_dict({**state, name: torch.zeros(2)})


def test_loss_scaling_skips_steps_that_overflow() -> None:
    """In fp16 an input that is not finite leaves the weights and slots as they are, and halves the scale."""
    module = images()
    step = eager(request_for(module, OptimizerRecipe(name="adam"), precision="fp16"))
    run(step, stop=3)
    before = {n: p.clone() for n, p in module.named_parameters()}
    state = {n: t.clone() for n, t in step.state_dict().items()}
    x, y = next(batches(1))
    step.run(torch.full_like(x, float("inf")), y, 0.1)
    assert bool(step.found_inf)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]), name
    for name, tensor in step.state_dict().items():
        if name == "scaler.scale":
            assert float(tensor) == float(state[name]) / 2
        elif name != "scaler.growth_tracker":
            assert torch.equal(tensor, state[name]), name


def test_right_answers_are_counted() -> None:
    """`correct` counts the labels that have the highest score; a regression has none."""
    module = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.eye(3))
    x, y = torch.eye(3), torch.tensor([0, 1, 0])
    request = request_for(module, OptimizerRecipe(name="sgd"))
    step = eager(replace(request, x=x, y=y))
    step.run(x, y, 0.0)
    assert int(step.correct) == 2
    step = eager(replace(request, x=x, y=x, loss=nn.functional.mse_loss, loss_name="mse"))
    step.run(x, x, 0.0)
    assert int(step.correct) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": 0}, "accumulate: found 0"),
        ({"clip_norm": 0.0}, "clip_norm: found 0.0"),
        ({"optimizer": OptimizerRecipe(name="sgd", groups=((("nope",), 0.0),))}, "no parameter 'nope'"),
    ],
)
def test_requests_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    """The error names the field and what was expected."""
    with pytest.raises(UsageError, match=message):
        replace(request_for(images(), OptimizerRecipe(name="sgd")), **change)


def test_a_captured_step_equals_the_eager_one_bit_by_bit() -> None:
    """With dropout, accumulation, clipping and a short batch amid the steps; both draw from the same random state."""
    recipe = OptimizerRecipe(name="adamw", weight_decay=0.1, groups=((NORMS, 0.0),))
    results = []
    for made in (eager, captured):
        module = images(dropout=0.5)
        step = made(request_for(module, recipe, accumulate=2, clip_norm=0.5))
        torch.manual_seed(3)
        losses = run(step, 2, stop=7)
        x, y = next(batches(1))
        step.run(x[:3], y[:3], 0.1)
        losses.append(float(step.loss))
        losses += run(step, 2, start=8)
        assert step.grad_norm is not None
        results.append((losses, float(step.grad_norm), {**module.state_dict(), **step.state_dict()}))
    assert results[0][:2] == results[1][:2]
    for name, tensor in results[0][2].items():
        assert torch.equal(tensor, results[1][2][name]), name


def test_preparing_leaves_no_trace() -> None:
    """Weights, statistics, the optimizer's state, modes, gradients and random states are as they were."""
    module = images(dropout=0.5)
    before = copy.deepcopy(module.state_dict())
    places = {n: p.data_ptr() for n, p in module.named_parameters()}
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    step = captured(request_for(module, OptimizerRecipe(name="sgd", momentum=0.9)))
    assert torch.equal(torch.rand(3), expected)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert places == {n: p.data_ptr() for n, p in module.named_parameters()}
    assert all(p.grad is None for p in module.parameters())
    assert module.training
    assert all(not t.any() for t in step.state_dict().values())


def test_every_replay_draws_a_mask_of_its_own() -> None:
    """With weights that stay as they are, the loss of one batch varies under dropout."""
    step = captured(request_for(images(dropout=0.5), OptimizerRecipe(name="sgd")))
    x, y = next(batches(1))
    losses = set()
    for _ in range(8):
        step.run(x, y, 0.0)
        losses.add(float(step.loss))
    assert len(losses) > 4


def test_the_learning_rate_of_each_run_counts() -> None:
    """A rate of 0 moves nothing; the same gradient at twice the rate moves weights twice as far."""
    moved = []
    for lr in (0.0, 0.25, 0.5):
        module = images()
        step = captured(request_for(module, OptimizerRecipe(name="sgd")))
        before = module[6].weight.detach().clone()
        step.run(*next(batches(1)), lr)
        moved.append(module[6].weight.detach() - before)
    assert not moved[0].any()
    torch.testing.assert_close(moved[2], 2 * moved[1], rtol=1e-3, atol=1e-7)


def test_the_whole_step_is_one_schedule() -> None:
    """Forward, loss, backward and update are tasks of one program; what was tried is kept; it survives JSON."""
    step = captured(request_for(images(), OptimizerRecipe(name="adam"), clip_norm=1.0))
    schedule = step.schedule
    assert schedule is not None
    ops = [t.op for t in schedule.program.tasks]
    kinds = ("convolution.default", "nll_loss_forward", "convolution_backward", "_foreach_norm", "_fused_adam_")
    places = [next(i for i, op in enumerate(ops) if kind in op) for kind in kinds]
    assert places == sorted(places)
    assert [c.name for c in schedule.candidates] == ["eager", "eager kernels, 1 stream"]
    assert schedule.candidates[1].chosen
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_tied_gradients_are_scaled_once() -> None:
    """Two parameters for which autograd returns one and the same gradient are clipped as torch clips them."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.first + self.second)

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    module, twin = Tied(), Tied()
    request = replace(
        request_for(module, OptimizerRecipe(name="sgd"), clip_norm=0.1),
        x=x,
        y=y,
        loss=nn.functional.mse_loss,
        loss_name="mse",
    )
    step = captured(request)
    step.run(x, y, 0.5)
    nn.functional.mse_loss(twin(x), y).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    torch.testing.assert_close(module.first, twin.first)
    torch.testing.assert_close(module.second, twin.second)


class ReadsOnTheHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, 0, 0, :6]) * (2.0 if float(x.sum()) > 0 else 1.0)


def test_what_no_schedule_can_hold_runs_in_eager_and_says_why() -> None:
    """The model reads a value on the host: the step falls back, trains nonetheless, and leaves no trace before."""
    module = ReadsOnTheHost()
    before = copy.deepcopy(module.state_dict())
    step = prepare_step(request_for(module, OptimizerRecipe(name="sgd")), device=CPU)
    assert step.schedule is None
    assert step.fallback is not None
    assert "reads a value of the device on the host" in step.fallback
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    run(step, stop=2)
    assert not torch.equal(module.linear.weight, before["linear.weight"])


def recorded() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


class FailsInForward(nn.Module):
    """Only while it is recorded, or ever after that."""

    def __init__(self, *, ever_after: bool = False) -> None:
        super().__init__()
        self.net, self.ever_after, self.broken = images(dropout=0.5), ever_after, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        if recorded() or self.broken:
            self.broken += [True] * self.ever_after
            raise KeyError("late" if self.broken else "mode")
        return found


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, g: torch.Tensor) -> torch.Tensor:
        if recorded():
            raise KeyError("mode")
        return g


class FailsInBackward(FailsInForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _FailsInBackward.apply(self.net(x))
        return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [FailsInForward, FailsInBackward])
def test_what_fails_only_while_it_is_recorded_trains_as_in_eager(kind: type[FailsInForward], accumulate: int) -> None:
    """The fallback says why, and losses, weights, statistics and the optimizer's state have the bits of eager."""
    recipe, results = OptimizerRecipe(name="adamw", weight_decay=0.1), []
    for made in (eager, lambda request: prepare_step(request, device=CPU)):
        torch.manual_seed(3)
        module = kind()
        step = made(request_for(module, recipe, accumulate=accumulate))
        losses = run(step, accumulate, stop=6)
        results.append((step, losses, {**module.state_dict(), **step.state_dict()}, torch.get_rng_state()))
    (_, *expected), (step, *found) = results
    assert (step.schedule, step.fallback) == (None, "the model fails while it is recorded: KeyError: 'mode'")
    assert found[0] == expected[0]
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in found[1].items())
    assert torch.equal(found[2], expected[2])


class Remembers(nn.Module):
    """What its calls leave behind is there from the first one on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = images(dropout=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        self.last = found.detach()
        return found


class RemembersSome(Remembers):
    """In a shape that depends on the mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        self.positive = found[found > 0]
        return found


class RemembersInput(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return super().forward(x)


class RemembersOneForMany(Remembers):
    """Elements that share memory cannot be written back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        self.mean = found.detach().mean(0, keepdim=True).expand(3, -1)
        return found


class MakesOnce(Remembers):
    """What the first call makes, the others read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.mask = torch.linspace(0.5, 1.5, x.shape[-1])
        return super().forward(x * self.mask)


@pytest.mark.parametrize("kind", [Remembers, RemembersSome, RemembersInput, RemembersOneForMany, MakesOnce])
@pytest.mark.parametrize("called", ["never", "before", "in inference mode"])
def test_what_calls_leave_behind_is_no_matter(kind: type[Remembers], called: str) -> None:
    """Whether or not it was there before; where its shape depends on the data, the step runs in eager."""
    torch.manual_seed(3)
    module = kind()
    if called != "never":
        with torch.inference_mode(called == "in inference mode"):
            module(next(batches(1))[0])
    before, weights = set(vars(module)), copy.deepcopy(module.state_dict())
    step = prepare_step(request_for(module, OptimizerRecipe(name="sgd")), device=CPU)
    assert set(vars(module)) == before
    assert (step.fallback is None) == (kind is not RemembersSome), step.fallback
    assert all(torch.equal(t, weights[n]) for n, t in module.state_dict().items())
    twin = kind()
    twin.load_state_dict(weights)
    losses = []
    for each in (step, eager(request_for(twin, OptimizerRecipe(name="sgd")))):
        torch.manual_seed(4)
        losses.append(run(each, stop=6))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


class Smooths(nn.Module):
    """Subtracts a mean that moves slowly, which it writes in place or replaces."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = images(dropout=0.0), how
        if how in ("in place", "a buffer"):
            self.register_buffer("mean", torch.zeros(()))
        elif how == "a buffer that is not saved":
            self.register_buffer("mean", torch.zeros(()), persistent=False)
        elif how == "an attribute":
            self.mean = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        mean = self.mean if hasattr(self, "mean") else torch.zeros(())
        new = 0.999 * mean + 0.001 * found.detach().mean()
        if self.how == "in place":
            found = found - mean
            mean.copy_(new)
            return found
        self.mean = new
        return found - mean


class Aliases(Smooths):
    """Its attribute comes to lie in the weights' memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = next(self.net.parameters()).detach()
        found: torch.Tensor = self.net(x)
        return found


class Grows(Smooths):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.resize_(self.mean.numel() + 1)
        found: torch.Tensor = self.net(x)
        return found


class Settles(Smooths):
    """Its first call makes what later ones read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.mean.dim():
            self.mean = torch.full((1,), 0.5)
        found: torch.Tensor = self.net(x)
        return found - self.mean


class Normed(Smooths):
    """Hooks set the weight anew at each call, from others; at first it lies in their memory."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it is the older way
            nn.utils.spectral_norm(self.net[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found


@pytest.mark.parametrize(
    ("kind", "how", "reason"),
    [
        (Smooths, "in place", None),
        (Smooths, "a buffer", "replaces its tensor 'mean'"),
        (Smooths, "an attribute", "replaces its tensor 'mean'"),
        (Smooths, "made at the first call", "replaces its tensor 'mean'"),
        (Smooths, "a buffer that is not saved", "replaces its tensor 'mean'"),
        (Aliases, "an attribute", None),
        (Settles, "a buffer that is not saved", None),
        (Settles, "a buffer", "replaces its tensor 'mean'"),
        (Normed, "unread", None),
        (Grows, "a buffer", "changes the shape of its tensor 'mean'"),
    ],
)
def test_a_replay_does_not_go_on_with_a_tensor_that_calls_replace(
    kind: type[Smooths], how: str, reason: str | None
) -> None:
    """It would be wrong by too little for the check to see. Weights and buffers are as they were."""
    module = kind(how)
    before = copy.deepcopy(module.state_dict())
    step = prepare_step(request_for(module, OptimizerRecipe(name="sgd")), device=CPU)
    assert (step.fallback is None) if reason is None else (reason in str(step.fallback))
    after = module.state_dict()
    assert all(torch.equal(after[n], t) for n, t in before.items())


def test_what_fails_in_eager_too_ends_with_its_own_error() -> None:
    """No fallback hides it, and the module is as it was."""
    module = FailsInForward(ever_after=True)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(KeyError, match="late"):
        prepare_step(request_for(module, OptimizerRecipe(name="sgd")), device=CPU)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


class Counting(nn.Module):
    """Each call multiplies by another constant, which a replay cannot know, and which is none of its own."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return self.linear(x.flatten(1)) * float(Counting.calls)


def test_a_schedule_that_disagrees_with_eager_is_not_used() -> None:
    """The check finds the tensor that differs, and the step runs in eager."""
    step = prepare_step(request_for(Counting(), OptimizerRecipe(name="sgd")), device=CPU)
    assert step.fallback is not None
    assert "'loss' differs from eager" in step.fallback


@pytest.mark.parametrize("wrong", ["last weights", "first weights", "slots", "statistics"])
@pytest.mark.parametrize("recipe", [OptimizerRecipe(name="sgd", momentum=0.9), OptimizerRecipe(name="adamw")])
def test_the_check_sees_a_step_that_is_wrong(
    wrong: str, recipe: OptimizerRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimizer state or statistics that end elsewhere than in eager fail the check."""
    module = images()
    request = request_for(module, recipe)
    replay = _CallInstance.replay

    def spoilt(self: _CallInstance) -> None:
        replay(self)
        state = self._bound.fixed if self._bound is not None else {}
        names = {p.name: p.view.buffer for p in programs[-1].state}
        target = {
            "last weights": "6.weight",
            "first weights": "0.weight",
            "slots": next(n for n in names if n.startswith("@optimizer.6.weight.")),
            "statistics": "1.running_mean",
        }[wrong]
        state[names[target]].mul_(1.05).add_(1e-2)

    programs: list[Program] = []
    real = step_live.capture

    def keeping(program: Program, *args: Any, **kwargs: Any) -> Any:
        programs.append(program)
        return real(program, *args, **kwargs)

    monkeypatch.setattr(step_live, "capture", keeping)
    monkeypatch.setattr(_CallInstance, "replay", spoilt)
    step = prepare_step(request, device=CPU)
    assert step.fallback is not None
    assert "differs from eager" in step.fallback


def bottleneck() -> nn.Module:
    """The second norm's mean is exactly 0 but for rounding, as the first one's output has none."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 5),
    )


@pytest.mark.parametrize(("moved_by", "accepted"), [(1e-7, True), (1e-3, False)])
def test_a_mean_of_zero_is_measured_by_its_norms_spread(
    moved_by: float, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a linear bottleneck a running mean is rounding only: other rounding passes, another mean does not."""
    programs: list[Program] = []
    capture, replay = step_live.capture, _CallInstance.replay

    def keeping(program: Program, *args: Any, **kwargs: Any) -> Any:
        programs.append(program)
        return capture(program, *args, **kwargs)

    def moving(self: _CallInstance) -> None:
        replay(self)
        state = self._bound.fixed if self._bound is not None else {}
        buffer = next(p.view.buffer for p in programs[-1].state if p.name == "3.running_mean")
        state[buffer].add_(moved_by)

    monkeypatch.setattr(step_live, "capture", keeping)
    monkeypatch.setattr(_CallInstance, "replay", moving)
    step = prepare_step(request_for(bottleneck(), OptimizerRecipe(name="sgd")), device=CPU)
    assert (step.fallback is None) == accepted
    if step.fallback is not None:
        assert "'3.running_mean' differs from eager" in step.fallback


class Sharp(nn.Module):
    """A rounding error in the weights grows a hundredfold with each update."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3 * 64, 16)
        self.outer = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.sin(SHARPNESS * self.inner(x.flatten(1))))


SHARPNESS = 30.0


@pytest.mark.parametrize(("moved_by", "accepted"), [(1e-7, True), (1e-2, False)])
def test_rounding_that_grows_with_each_update_is_no_fault(
    moved_by: float, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager, with weights moved by a rounding error, ends elsewhere after three updates. Wrong steps are seen.

    The first loss then differs by less than 1e-4 on every processor, the third one by 1e-3 to 1e-1.
    """
    replay = _CallInstance.replay
    generator = torch.Generator().manual_seed(0)

    def moving(self: _CallInstance) -> None:
        state = self._bound.fixed if self._bound is not None else {}
        weight = next(t for t in state.values() if isinstance(t, torch.Tensor) and t.shape == (16, 3 * 64))
        with torch.no_grad():
            weight.mul_(1 + moved_by * (2 * torch.rand(weight.shape, generator=generator) - 1))
        replay(self)

    monkeypatch.setattr(_CallInstance, "replay", moving)
    step = prepare_step(request_for(Sharp(), OptimizerRecipe(name="sgd"), tolerance=1e-3), device=CPU)
    assert (step.fallback is None) == accepted, step.fallback


def test_a_closed_step_cannot_be_run() -> None:
    """Its memory is gone."""
    step = captured(request_for(images(), OptimizerRecipe(name="sgd")))
    step.close()
    with pytest.raises(EngineError, match="closed"):
        step.run(*next(batches(1)), 0.1)


def test_moved_weights_are_noticed() -> None:
    """A parameter that was replaced would train no more."""
    module = images()
    step = captured(request_for(module, OptimizerRecipe(name="sgd")))
    module[6].weight.data = module[6].weight.data.clone()
    with pytest.raises(EngineError, match=r"'6\.weight' was moved"):
        step.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_objective_can_be_compiled_whole(precision: str) -> None:
    """Dynamo takes module, loss, autocast and the count of right answers as one graph."""
    request = request_for(images(), OptimizerRecipe(name="sgd"), precision=precision)
    arithmetic = EagerStep(request, CPU).arithmetic
    objective, (x, y) = arithmetic.objective, next(batches(1))
    expected, _ = arithmetic.forward(objective, x, y)
    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        found, counters = arithmetic.forward(compiled, x, y)
        assert [id(c) for c in counters] == [id(objective.module[1].num_batches_tracked)]
        assert int(counters[0]) == 1  # the compiled forward leaves it alone
        torch.testing.assert_close(found[0], expected[0])
        assert int(found[1]) == int(expected[1])
    torch._dynamo.reset()


def test_batches_are_counted_in_one_task() -> None:
    """Norms that are called once share a task; one that is called twice counts twice, as in eager PyTorch."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))
            self.frozen = nn.BatchNorm2d(3)
            self.head = nn.Linear(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norms[2](self.norms[1](self.norms[0](self.norms[0](x))))
            return self.head(self.frozen(x).mean((2, 3)))

    module = Shared()
    request = request_for(module, OptimizerRecipe(name="sgd"))
    module.frozen.eval()
    step = captured(request)
    run(step, stop=3)
    assert [int(n.num_batches_tracked) for n in module.norms] == [6, 3, 3]
    assert int(module.frozen.num_batches_tracked) == 0
    assert step.schedule is not None
    ops = [t.op for t in step.schedule.program.tasks]
    assert ops.count("aten._foreach_add_.Scalar") == 1
    assert ops.count("aten.add_.Tensor") == 2


def test_a_named_source_is_the_only_one_tried() -> None:
    """Its kernels and format are those of the schedule, and the optimizer's state lies as the weights do."""
    module, twin = images(), images()
    source = Source(kernels="eager", layout="channels-last")
    request = request_for(module, OptimizerRecipe(name="sgd", momentum=0.9), only=source)
    step = captured(request)
    assert step.schedule is not None
    assert (step.schedule.kernels, step.schedule.layout) == ("eager", "channels-last")
    assert [c.name for c in step.schedule.candidates] == ["eager", "eager kernels, channels-last, 1 stream"]
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    found = run(step)
    assert found == pytest.approx(run(eager(request_for(twin, request.optimizer))), rel=1e-5)
    state = step.state_dict()["optimizer.0.weight.momentum_buffer"]
    assert state.stride() == module[0].weight.stride()


def test_a_training_that_goes_on_is_checked_as_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A borderline step that passed once is not refused later: the last check's batches follow from the key."""
    seeds: list[int] = []
    real = step_live.check_step

    def checked(*args: Any, seed: int, **kwargs: Any) -> float:
        seeds.append(seed)
        return real(*args, seed=seed, **kwargs)

    monkeypatch.setattr(step_live, "check_step", checked)
    recipe = OptimizerRecipe(name="sgd")
    captured(request_for(images(), recipe))
    captured(request_for(images(), recipe, only=Source(kernels="eager", layout="given")))
    first, last, *resumed = seeds
    assert resumed == [last, last]
    assert first != last


LAST = Source(kernels="eager", layout="channels-last")


def searched(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Search, MeasuredCandidate]:
    """The search on the CPU over two layouts, with streams as on a GPU."""
    request = request_for(images(), OptimizerRecipe(name="sgd"), options=BuildOptions(**options))
    target = StepTarget(LiveStep(request, EagerStep(request, CPU), CPU, tolerance=1e-4), seed=0)
    monkeypatch.setattr(StepTarget, "further", lambda *_: [LAST])
    monkeypatch.setattr(searching, "may_have_streams", lambda *_: True)
    search = Search(target, request.options)
    return search, search.run()


def test_streams_are_searched_where_the_critical_path_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sources first run on one stream; then the others' rows say what stands against more."""
    replays_us = iter([280.0, 200.0, 190.0])
    paths_us = iter([150.0, 250.0])  # the fastest on one stream comes first
    asked: list[float] = []
    real = Analysis.single_stream

    def single_stream(self: Analysis, durations_us: Any = None) -> tuple[Plan, GraphFacts]:
        plan, facts = real(self, durations_us)
        return plan, facts if durations_us is None else replace(facts, critical_path_us=next(paths_us))

    def fastest(_: Search, one: MeasuredCandidate, name: str) -> Programs:
        asked.append(one.replay_us)
        return dict(one.programs)

    monkeypatch.setattr(Analysis, "single_stream", single_stream)
    monkeypatch.setattr(StepInstances, "times_us", lambda self: {Role.UPDATE: next(replays_us)})
    monkeypatch.setattr(Search, "_fastest_plans", fastest)
    search, found = searched(monkeypatch)
    assert asked == [200.0]
    assert (found.source, found.replay_us) == (LAST, 190.0)
    rows = {c.name: c for c in search.candidates}
    assert [c.replay_us for c in search.candidates] == [280.0, 200.0, 190.0, None]
    assert rows["eager kernels, 1 stream"].replay_us == 280.0
    reason = "not tried: the critical path alone takes 250 us, and eager kernels, channels-last, 1 stream takes 190 us"
    assert rows["eager kernels, several streams"].reason == reason


def test_time_is_asked_for_inside_of_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded when the time is over is not measured; the first source on one stream always is."""
    real, recorded = step_live.record_step, 0

    def record(*args: Any, **kwargs: Any) -> Any:
        nonlocal recorded
        recorded += 1
        if recorded == 2:
            monkeypatch.setattr(searching, "time", Mock(monotonic=lambda: math.inf))
        return real(*args, **kwargs)

    monkeypatch.setattr(step_live, "record_step", record)
    monkeypatch.setattr(Search, "_try_several_streams", lambda *_: None)
    search, found = searched(monkeypatch)
    assert recorded == 2
    assert found.source == Source(kernels="eager", layout="given")
    spent = "not tried: the budget of 900 s was used up"
    assert [(c.name, c.reason) for c in search.candidates][1:] == [(LAST.name, spent)]


def test_few_plans_are_measured() -> None:
    """The widest, bounded, then with 8 and 4 streams."""
    program = Mock()
    program.analysis.plan = lambda *, max_streams, **_: (Mock(streams=max_streams), Mock())
    few = few_plans(program, [(Mock(streams=n), Mock()) for n in (2, 4, 8, 16, 99)])
    assert [plan.streams for plan, _ in few] == [32, 8, 4]
    assert few_plans(program, []) == []


def test_no_plan_is_captured_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several streams get a row that says why; one stream works."""
    monkeypatch.setattr(searching, "_HOPELESS", 0.0)
    monkeypatch.setattr(searching, "plans_with_streams", lambda one, *_: ([one.analysis.plan(max_streams=2)], None))
    monkeypatch.setattr(StepTarget, "alone_us", lambda *_: pytest.fail("captured after the deadline"))
    search, found = searched(monkeypatch, budget_s=0.0)
    assert found.row.name == "eager kernels, 1 stream"
    spent = "not tried: the budget of 0 s was used up"
    names = [LAST.name, "eager kernels, several streams"]
    assert [(c.name, c.reason) for c in search.candidates][1:] == [(name, spent) for name in names]


def test_the_default_tolerance_is_that_of_what_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 on a GPU means TF32 unless that is forbidden; autocast means its own type."""
    request = request_for(images(), OptimizerRecipe(name="sgd"))
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert default_tolerance(request, CPU) == TOLERANCE["fp32"]
    assert default_tolerance(request, gpu) == TOLERANCE["fp16"]
    assert default_tolerance(replace(request, precision="bf16"), gpu) == TOLERANCE["bf16"]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert default_tolerance(request, gpu) == TOLERANCE["fp32"]
