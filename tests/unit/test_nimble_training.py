"""`Nimble` with `training=True` on the CPU: gradients, masks and statistics as in eager, or an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs.errors import CannotRecord, CheckFailed, EngineError, UsageError


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(4 * 9, 5),
    )


def trained(module: nn.Module, example: Any) -> Nimble:
    nimble = Nimble(module)
    nimble.prepare(example, training=True)
    return nimble


def test_on_a_cpu_eagers_kernels_are_all_that_is_tried() -> None:
    """Weights change with each step, so none are laid out beforehand."""
    schedule = trained(nn.Linear(4, 2), torch.randn(3, 4)).schedule
    assert schedule is not None
    assert schedule.kernels == "eager"
    assert [c.name for c in schedule.candidates] == ["eager", "eager kernels, 1 and 1 streams"]


def test_ten_steps_equal_eager_bit_by_bit() -> None:
    """Losses, weights and running statistics after ten steps with dropout, momentum and accumulation equal eager's."""
    module = images()
    twin = copy.deepcopy(module)
    nimble = trained(module, torch.randn(2, 3, 8, 8))
    generator = torch.Generator().manual_seed(5)
    data = [(torch.randn(2, 3, 8, 8, generator=generator), torch.tensor([i % 5, 1])) for i in range(20)]
    results = []
    for call, of in ((nimble, module), (twin, twin)):
        optimizer = torch.optim.SGD(of.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(7)
        losses = []
        for first, second in zip(data[::2], data[1::2], strict=True):
            optimizer.zero_grad()
            for x, target in (first, second):  # gradients of both add up
                loss = nn.functional.cross_entropy(call(x), target)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
        results.append((losses, of.state_dict()))
    assert results[0][0] == results[1][0]
    for name, tensor in results[0][1].items():
        assert torch.equal(tensor, results[1][1][name]), name
    assert int(module[1].num_batches_tracked) == 20


class Branches(nn.Module):
    """Several outputs, a tied weight, an unused parameter and an integer output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, ids: torch.Tensor, shift: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        x = self.words(ids) + shift
        y = self.norm(x + self.attention(x, x, x, need_weights=False)[0]) * self.frozen
        logits = self.head(y) * scale
        return {"logits": logits, "best": logits.argmax(-1), "more": (y.mean(1), shift)}


@pytest.mark.parametrize("used", ["logits", "more", "both"])
def test_gradients_of_parameters_and_inputs_equal_eagers(used: str) -> None:
    """Nested outputs of which only some are used, tied weights, kwargs and inputs that require grad."""
    torch.manual_seed(0)
    module = Branches()
    twin = copy.deepcopy(module)
    example = (torch.randint(0, 11, (2, 4)), torch.randn(4, 6, requires_grad=True)), {"scale": 0.5}
    nimble = trained(module, example)
    for _ in range(3):
        ids, shift = torch.randint(0, 11, (2, 4)), torch.randn(4, 6)
        found: list[list[torch.Tensor | None]] = []
        for call, of in ((nimble, module), (twin, twin)):
            of.zero_grad()
            leaf = shift.clone().requires_grad_()
            out = call(ids, leaf * 1.0, scale=0.5)
            assert not out["best"].requires_grad
            loss = torch.zeros(())
            if used != "more":
                loss = loss + out["logits"].square().sum()
            if used != "logits":
                loss = loss + (out["more"][0] * 3).sum() + out["more"][1].sin().sum()
            loss.backward()
            found.append([leaf.grad, *(p.grad for p in of.parameters())])
        for a, b in zip(*found, strict=True):
            assert (a is None) is (b is None)  # zeros would move weights that have momentum
            if b is not None:
                torch.testing.assert_close(a, b)
    assert module.unused.grad is None
    assert module.frozen.grad is None


def test_each_replay_draws_a_new_mask_and_the_backward_uses_it() -> None:
    """With identity weights, the gradient shows the mask that the output shows; two calls differ."""
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
    with torch.no_grad():
        module[0].weight.copy_(torch.eye(64))
    nimble = trained(module, torch.ones(1, 64, requires_grad=True))
    masks = []
    for _ in range(4):
        x = torch.ones(1, 64, requires_grad=True)
        y = nimble(x)
        y.sum().backward()
        assert torch.equal(y.detach(), x.grad)
        masks.append(tuple(y[0].tolist()))
    assert len(set(masks)) == 4


def test_gradients_are_the_callers_to_keep() -> None:
    """A gradient that was kept is not overwritten by the next backward."""
    module = nn.Linear(3, 2)
    nimble = trained(module, torch.randn(4, 3))
    nimble(torch.ones(4, 3)).sum().backward()
    kept, before = module.weight.grad, module.weight.grad.clone()
    module.zero_grad(set_to_none=True)
    nimble(torch.full((4, 3), 9.0)).sum().backward()
    assert torch.equal(kept, before)
    assert not torch.equal(kept, module.weight.grad)


def test_calls_without_grad_and_raw_replays() -> None:
    """Under `no_grad` no graph is made; `replay` runs both passes over the static tensors."""
    module = nn.Linear(3, 2)
    nimble = trained(module, torch.randn(4, 3))
    with torch.no_grad():
        assert not nimble(torch.randn(4, 3)).requires_grad
    x = torch.randn(4, 3)
    nimble.inputs["args.0"].copy_(x)
    nimble.inputs["grad.output"].fill_(1.0)
    nimble.replay()
    torch.testing.assert_close(nimble.outputs["output"], module(x).detach())
    torch.testing.assert_close(nimble.outputs["grad.weight"], x.sum(0).expand(2, 3))
    assert nimble.schedule is not None
    assert nimble.backward_schedule is not None
    assert nimble.backward_schedule.program.tasks


def test_a_backward_after_another_call_is_an_error() -> None:
    """What an earlier call saved is gone; its gradients would be wrong."""
    nimble = trained(nn.Linear(3, 2), torch.randn(4, 3))
    first = nimble(torch.randn(4, 3))
    second = nimble(torch.randn(4, 3))
    with pytest.raises(EngineError, match=r"^the module was called again before this backward"):
        first.sum().backward()
    second.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        second.sum().backward()


def test_a_step_between_forward_and_backward_is_an_error() -> None:
    """The backward reads the weights: they must be those of the forward."""
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    nimble = trained(module, torch.randn(4, 3))
    y = nimble(torch.randn(4, 3))
    with torch.no_grad():
        module[2].weight.mul_(2.0)
    with pytest.raises(EngineError, match=r"^a parameter was changed in place between forward and backward$"):
        y.sum().backward()


def test_what_was_not_differentiated_when_prepared_is_refused() -> None:
    """Inputs and parameters that require grad only now would silently get none."""
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    nimble = trained(module, torch.randn(4, 3))
    with pytest.raises(UsageError, match=r"^args\.0: requires grad; the example that was prepared did not$"):
        nimble(torch.randn(4, 3, requires_grad=True))
    module.bias.requires_grad_(True)
    with pytest.raises(UsageError, match=r"^the parameter 'bias' requires grad"):
        nimble(torch.randn(4, 3))


def test_training_and_inference_side_by_side() -> None:
    """The module's own mode says which of two schedules of one signature a call means."""
    module = images()
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(UsageError, match=r"^training: the module is in evaluation mode"):
        trained(module.eval(), x)
    module.train()
    nimble = trained(module, x)
    module.eval()
    with pytest.raises(UsageError, match="prepared with training=True only"):
        nimble(x)
    nimble.prepare(x)
    with torch.no_grad():
        expected = module(x)
    torch.testing.assert_close(nimble(x), expected)
    assert not nimble(x).requires_grad
    module.train()
    assert nimble(x).requires_grad
    with pytest.raises(UsageError, match=r"^in_flight: found 2; expected 1 with training=True$"):
        nimble.prepare(x, training=True, in_flight=2)


def test_two_models_interleaved() -> None:
    """Forwards of two models may come before the backward of either."""
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    first, second = trained(a, torch.randn(4, 3)), trained(b, torch.randn(4, 3))
    for _ in range(20):
        x = torch.randn(4, 3)
        a.zero_grad(), b.zero_grad()
        (first(x).square().sum() + second(x).cos().sum()).backward()
        expected = torch.autograd.grad(a(x).square().sum() + b(x).cos().sum(), [*a.parameters(), *b.parameters()])
        for p, g in zip([*a.parameters(), *b.parameters()], expected, strict=True):
            torch.testing.assert_close(p.grad, g)


class HostInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * float(g.sum())


class RandomInBackward(HostInBackward):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * torch.rand_like(g)


class FailsWhenRecorded(HostInBackward):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise KeyError("mode")
        return g


class AnotherEachTime(HostInBackward):
    turn = 0

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        AnotherEachTime.turn += 1
        return g * AnotherEachTime.turn


class Through(nn.Module):
    def __init__(self, function: type[HostInBackward]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.norm(x))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (HostInBackward, CannotRecord, "_local_scalar_dense.* at backward "),
        (RandomInBackward, CannotRecord, "in the backward pass draws random numbers"),
        (FailsWhenRecorded, CannotRecord, "^the model fails while it is recorded: KeyError: 'mode'"),
        (AnotherEachTime, CheckFailed, r"^'grad\.norm\.\w+' differs from eager by a relative norm"),
    ],
)
def test_a_backward_that_cannot_be_trusted_is_refused_and_leaves_no_trace(
    function: type[HostInBackward], error: type[EngineError], message: str
) -> None:
    """What a backward pass must not do, or fails at when it is recorded, is an error; the module is as before."""
    module = Through(function)
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    nimble = Nimble(module)
    x = torch.arange(12.0).view(4, 3)
    with pytest.raises(error, match=message):
        nimble.prepare(x, training=True)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert module.training
    nimble.prepare(x, training=True, fallback=True)
    assert nimble.fallback is not None
    nimble(x).sum().backward()
    assert module.norm.weight.grad is not None


def test_preparing_leaves_no_trace() -> None:
    """After a preparation that worked, statistics, gradients and random numbers are as before too."""
    module = images()
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    x = torch.zeros(2, 3, 8, 8)
    trained(module, x)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


class Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_nothing_to_differentiate_is_refused() -> None:
    """A model without parameters, on inputs that do not require grad, has no backward."""
    with pytest.raises(CannotRecord, match=r"^no output of the model depends on a tensor that requires grad$"):
        trained(Fixed(), torch.randn(3))
    x = torch.randn(3, requires_grad=True)
    trained(Fixed(), x)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 1.0]
