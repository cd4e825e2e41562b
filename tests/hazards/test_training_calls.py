"""What autograd, its hooks and its surroundings can ask of a prepared call: as in eager, or refused in words."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs.errors import CannotRecord, EngineError, UsageError

X = torch.arange(12.0).view(4, 3) / 12


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def prepared(module: nn.Module, example: Any = X, *, grad: bool = False, **options: Any) -> Nimble:
    nimble = Nimble(module)
    example = example.clone().requires_grad_() if grad else example
    nimble.prepare(example, training=True, streams=1, fuse="off", **options)
    return nimble


def gradients(call: Callable[..., Any], module: nn.Module, x: torch.Tensor = X) -> list[torch.Tensor | None]:
    module.zero_grad()
    call(x).square().sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_alike(nimble: Nimble, module: nn.Module, twin: nn.Module, x: torch.Tensor = X) -> None:
    for found, expected in zip(gradients(nimble, module, x), gradients(twin, twin, x), strict=True):
        assert (found is None) is (expected is None)
        if expected is not None:
            torch.testing.assert_close(found, expected)


def test_hooks_on_gradients_run_once_and_by_their_state_at_each_call() -> None:
    """A hook that was there before, one that comes later, one that goes: the gradient is eager's each time."""
    module = layers()
    twin = copy.deepcopy(module)
    early = [m[0].weight.register_hook(lambda g: 2 * g) for m in (module, twin)]
    nimble = prepared(module)
    assert_alike(nimble, module, twin)
    late = [m[2].bias.register_hook(lambda g: g + 1) for m in (module, twin)]
    assert_alike(nimble, module, twin)
    for handle in early:
        handle.remove()
    assert_alike(nimble, module, twin)
    for handle in late:
        handle.remove()
    assert_alike(nimble, module, twin)


def test_hooks_after_accumulation_run_once_a_backward() -> None:
    """`register_post_accumulate_grad_hook` sees what eager would leave in the gradient, and not while preparing."""
    module = layers()
    twin = copy.deepcopy(module)
    seen: list[float] = []
    for m in (module, twin):
        m[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    nimble = prepared(module)
    assert seen == []
    assert_alike(nimble, module, twin)
    assert len(seen) == 2
    assert seen[0] == pytest.approx(seen[1])


def test_a_norm_put_in_evaluation_mode_after_it_was_prepared() -> None:
    """The guard tells; with a fallback the call runs in eager, and says why."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    nimble = prepared(module)
    module[1].eval()
    with pytest.raises(EngineError, match=r"'1\.training' was True, and is False"):
        nimble(X)
    module[1].train()
    nimble = prepared(module, fallback=True)
    module[1].eval()
    assert_alike(nimble, module, copy.deepcopy(module))
    assert "changed after it was prepared" in str(nimble.fallback)


def test_a_backward_hook_that_comes_later_is_noticed() -> None:
    """A replay would not call it."""
    module = layers()
    nimble = prepared(module)
    module[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(EngineError, match="hook"):
        nimble(X)


def test_a_hook_on_the_input_sees_eagers_gradient() -> None:
    """The input's gradient passes the hooks of the tensor that was given."""
    module = layers()
    nimble = prepared(module, grad=True)
    found = []
    for call in (nimble, module):
        x = X.clone().requires_grad_()
        x.register_hook(lambda g: found.append(g.clone()))
        call(x).sum().backward()
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("way", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_are_refused(way: str) -> None:
    """A replay would call none of them."""
    module = layers()
    getattr(module[2], way)(lambda *_: None)
    with pytest.raises(CannotRecord, match=r"^the module '2' has backward hooks, which a replay would not call"):
        prepared(module)
    nimble = prepared(module, fallback=True)
    assert nimble.fallback is not None


def test_a_backward_hook_of_every_module_is_refused() -> None:
    """Also one that torch keeps for all modules."""
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(CannotRecord, match="has backward hooks"):
            prepared(layers())
    finally:
        handle.remove()


def test_a_gradient_penalty_is_refused_in_words() -> None:
    """Second derivatives through a replay raise; the first ones of the same graph are right."""
    module = layers()
    nimble = prepared(module, grad=True)
    x = X.clone().requires_grad_()
    y = nimble(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    torch.testing.assert_close(g.detach(), expected)
    assert g.requires_grad
    with pytest.raises(EngineError, match=r"^create_graph=True needs second derivatives"):
        (y.square().sum() + g.norm()).backward()


def test_a_loss_differentiated_with_create_graph_raises_only_where_it_is_used() -> None:
    """`create_graph=True` alone costs nothing."""
    module = layers()
    nimble = prepared(module)
    found = torch.autograd.grad(nimble(X).sum(), list(module.parameters()), create_graph=True)
    expected = torch.autograd.grad(module(X).sum(), list(module.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other)
    with pytest.raises(EngineError, match="second derivative"):
        torch.autograd.grad(found[0].sum(), module[0].weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.func imports
@pytest.mark.parametrize(
    "use",
    [
        lambda f: torch.func.grad(lambda x: f(x).sum())(X),
        lambda f: torch.func.vmap(f)(torch.stack([X, X])),
        lambda f: torch.func.jvp(f, (X,), (X,)),
        lambda f: torch.func.jacrev(f)(X),
        lambda f: torch.autograd.functional.jvp(f, X, X, strict=False),
    ],
    ids=["grad", "vmap", "jvp", "jacrev", "double backward"],
)
def test_transforms_of_torch_func_are_refused_in_words(use: Callable[..., Any]) -> None:
    """What rewrites the operators of a call cannot see those of a replay."""
    nimble = prepared(layers(), grad=True)
    with pytest.raises((UsageError, EngineError), match=r"called inside|second derivative"):
        use(nimble)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch imports for it
def test_forward_mode_is_refused_in_words() -> None:
    """A tangent would be lost."""
    nimble = prepared(layers())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(UsageError, match=r"^called inside forward-mode differentiation"):
            nimble(dual)
    nimble(X).sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.func imports
def test_with_a_fallback_such_a_call_runs_in_eager() -> None:
    """And says why; the next one replays again."""
    module = layers()
    nimble = prepared(module, grad=True, fallback=True)
    torch.testing.assert_close(
        torch.func.grad(lambda x: nimble(x).sum())(X), torch.func.grad(lambda x: module(x).sum())(X)
    )
    assert str(nimble.fallback).startswith("called inside a transform of torch.func")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nimble(X).dtype is torch.bfloat16
    assert str(nimble.fallback).startswith("called under torch.autocast")
    nimble(X).sum().backward()
    assert nimble.fallback is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch imports for it
def test_a_call_without_gradients_loses_no_tangent() -> None:
    """Forward mode also differentiates what runs under `no_grad`."""
    nimble = Nimble(layers().eval())
    nimble.prepare(X, streams=1, fuse="off")
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UsageError, match="forward-mode differentiation"):
        nimble(torch.autograd.forward_ad.make_dual(X, torch.ones_like(X)))


def test_saved_tensor_hooks_around_a_call_are_refused() -> None:
    """They would not see what the replay saves."""
    nimble = prepared(layers())
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        pytest.raises(UsageError, match="saved_tensors_hooks"),
    ):
        nimble(X)


def test_two_backwards_of_one_call() -> None:
    """With `retain_graph` the second adds the same gradients again, without it raises as eager does."""
    module = layers()
    twin = copy.deepcopy(module)
    nimble = prepared(module)
    for call, of in ((nimble, module), (twin, twin)):
        of.zero_grad()
        y = call(X)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.sum().backward()
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_gradients_of_only_some_tensors() -> None:
    """`autograd.grad` by one parameter or input leaves all others alone."""
    module = layers()
    nimble = prepared(module, grad=True)
    x = X.clone().requires_grad_()
    for leaf in (module[0].weight, x):
        (found,) = torch.autograd.grad(nimble(x).sum(), leaf)
        (expected,) = torch.autograd.grad(module(x).sum(), leaf)
        torch.testing.assert_close(found, expected)
    assert all(t.grad is None for t in (x, *module.parameters()))


@pytest.mark.parametrize("guard", ["on", "off"])
def test_frozen_after_it_was_prepared(guard: Any) -> None:
    """The guard tells of a parameter that is frozen; without it, the parameter gets no gradient, and thaws again."""
    module = layers()
    twin = copy.deepcopy(module)
    nimble = prepared(module, guard=guard)
    for m in (module, twin):
        m[0].requires_grad_(False)
    if guard == "on":
        with pytest.raises(EngineError, match=r"'0\.weight' was changed: its requires_grad was True, and is False"):
            nimble(X)
        return
    assert_alike(nimble, module, twin)
    for m in (module, twin):
        m[0].requires_grad_(True)
    assert_alike(nimble, module, twin)
    for m in (module, twin):
        m.requires_grad_(False)
    assert nimble(X).requires_grad is twin(X).requires_grad is False


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def test_an_output_of_frozen_layers_does_not_require_grad() -> None:
    """Each output requires grad where it would in eager."""
    module = Two()
    nimble = prepared(module, guard="off")
    module.second.requires_grad_(False)
    assert [t.requires_grad for t in nimble(X)] == [t.requires_grad for t in module(X)] == [True, False]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_leave_later_ones_alone(mode: Callable[[], Any]) -> None:
    """Outputs are eager's and need no gradient; the next call has gradients again."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    twin = copy.deepcopy(module)
    nimble = prepared(module)
    with mode():
        found, expected = nimble(X), twin(X)
        torch.testing.assert_close(found, expected)
        assert not found.requires_grad
        assert found.is_inference() == expected.is_inference()
    assert_alike(nimble, module, twin)
    for (name, one), other in zip(module.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_autocast_around_call_or_backward_is_refused() -> None:
    """A replay would compute in other types than eager there."""
    nimble = prepared(layers())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError, match=r"under torch\.autocast"):
        nimble(X)
    y = nimble(X)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError, match=r"^backward was called under"):
        y.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError, match=r"under torch\.autocast"):
        prepared(layers())


class Inner(nn.Module):
    """Mixed precision of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x)


def test_autocast_inside_of_a_model_is_recorded() -> None:
    """The types are the model's own."""
    module = Inner()
    twin = copy.deepcopy(module)
    for found, expected in zip(gradients(prepared(module), module), gradients(twin, twin), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)


class Raises(nn.Module):
    """Fails on the call of the given number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.at = nn.Linear(3, 2), at
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        if len(self.seen) == self.at:
            raise ValueError("the model's own words")
        return self.layer(x)


def test_what_a_model_raises_in_eager_comes_through() -> None:
    """The first call's own error is the caller's to see, with and without a fallback."""
    for fallback in (True, False):
        module = Raises(1)
        with pytest.raises(ValueError, match=r"^the model's own words$"):
            prepared(module, fallback=fallback)
        assert module.seen == []


@pytest.mark.parametrize("at", [2, 3, 4, 5, 6, 8, 12])
def test_a_model_that_fails_only_at_a_later_call_is_refused(at: int) -> None:
    """What fails only because it is prepared is no raw exception."""
    module = Raises(at)
    nimble = prepared(module, fallback=True)
    assert nimble.fallback is not None
    assert module.seen == []
    nimble(X).sum().backward()
    assert module.seen == [1]


def test_random_states_and_attributes_are_as_before() -> None:
    """Of torch, Python and numpy, after a preparation that worked."""
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), torch.get_rng_state().tolist()
    prepared(module)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
