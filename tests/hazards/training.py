"""The judge of trainings: five steps equal to eager's, or a refusal that leaves nothing behind."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs.errors import EngineError
from nimble_jobs.nimble.signature import read, split
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.step.build import OptimizerRecipe, StepRequest, prepare_step

STEPS = 5

Make = Callable[[], nn.Module]
Draw = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a training ended."""

    kind: Literal["equal", "refused"]
    reason: str | None = None


def seeded(seed: int) -> None:
    """Set every random state that a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def judge(make: Make, draw: Draw = lambda: torch.randn(4, 3), *, grad: bool = False) -> Verdict:
    """Train two copies for five steps, one through `Nimble`. Raises AssertionError where they part in silence.

    `draw` makes an example or a batch; with `grad` its first tensor requires grad, and its gradient is compared.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a module warns of in eager, it may warn of here
        return _judge(make, draw, grad=grad)


def _judge(make: Make, draw: Draw, *, grad: bool) -> Verdict:
    seeded(0)
    module = make()
    seeded(0)
    twin = make()  # with hooks, which copies lack
    example = _leaf(draw()) if grad else draw()
    seeded(1)
    before, states = _state(module), _random_states()
    nimble = Nimble(module)
    kind: Literal["equal", "refused"] = "equal"
    reason = None
    try:
        nimble.prepare(example, training=True, streams=1, fuse="off")
    except EngineError as e:
        kind, reason = "refused", str(e)
        _assert_untouched(module, before, states)
        nimble.prepare(example, training=True, streams=1, fuse="off", fallback=True)
        assert nimble.fallback is not None
    _assert_untouched(module, before, states)
    seeded(2)
    batches = [_leaf(draw()) if grad else draw() for _ in range(STEPS)]
    found = _train(nimble, module, batches)
    expected = _train(twin, twin, batches)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys(), f"step {step}: {sorted(one.keys() ^ other.keys())} come or go"
        for name, value in other.items():
            assert (one[name] is None) is (value is None), f"step {step}: {name} is {one[name]}, in eager {value}"
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(one[name], value, rtol=2e-3, atol=1e-5, msg=f"step {step}: {name}")
            else:
                assert one[name] == value, f"step {step}: {name}"
    return Verdict(kind=kind, reason=reason)


def _leaf(example: Any) -> Any:
    args, kwargs = split(example)
    signature, tensors = read(args, kwargs)
    fresh = [t.detach().clone().requires_grad_(i == 0) for i, t in enumerate(tensors)]
    return signature.arguments(tuple(fresh))


def _train(call: Callable[..., Any], module: nn.Module, batches: list[Any]) -> list[dict[str, Any]]:
    """Steps of SGD with momentum: outputs, gradients and state of each."""
    seeded(3)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9) if parameters else None
    steps = []
    for batch in batches:
        args, kwargs = split(batch)
        _, given = read(args, kwargs)
        for tensor in given:
            tensor.grad = None
        module.zero_grad()
        outputs = [t for t in _leaves(call(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        loss = sum(_scalar(t) for t in outputs if t.requires_grad)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        seen: dict[str, Any] = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
        seen |= {f"gradient of input {i}": _copy(t.grad) for i, t in enumerate(given)}
        seen |= {f"gradient of {n}": _copy(p.grad) for n, p in module.named_parameters()}
        if optimizer is not None:
            optimizer.step()
        seen |= {f"state {n}": t.detach().clone() for n, t in module.state_dict().items()}
        seen |= {f"attribute {n}": v for n, v in _attributes(module).items()}
        steps.append(seen)
    seen = {"random": random.random(), "numpy": float(np.random.rand()), "torch": float(torch.rand(()))}
    return [*steps, seen]


def _scalar(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return (tensor * torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape)).sum()


def _leaves(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone().to_dense()


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of the caller's by name."""
    return {
        f"{prefix}.{name}": copy.deepcopy(value)
        for prefix, child in module.named_modules()
        for name, value in vars(child).items()
        if not name.startswith("_") and type(value) in (int, float, str, bool, list, dict)
        if not any(isinstance(leaf, torch.Tensor) for leaf in _leaves(value))
    }


def _state(module: nn.Module) -> dict[str, Any]:
    tensors = {n: t.detach().clone() for n, t in module.state_dict().items()}
    return {**tensors, **{f"attribute {n}": v for n, v in _attributes(module).items()}}


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def _assert_untouched(module: nn.Module, before: dict[str, Any], states: tuple[Any, ...]) -> None:
    after = _state(module)
    assert after.keys() == before.keys()
    for name, value in before.items():
        same = torch.equal(after[name], value) if isinstance(value, torch.Tensor) else after[name] == value
        assert same, f"preparing changed {name}"
    assert all(p.grad is None for p in module.parameters())
    assert _random_states() == states, "preparing changed a random state"
    assert module.training


def judge_step(
    make: Make,
    make_loss: Callable[[], Callable[[Any, torch.Tensor], torch.Tensor]],
    draw: Draw = lambda: torch.randn(4, 3),
    **options: Any,
) -> Verdict:
    """Train two copies for five updates, one by a job's step, the other by plain torch. Raises AssertionError where
    they part; `options` are those of a `StepRequest`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a module warns of in eager, it may warn of here
        seeded(0)
        module = make()
        seeded(0)
        twin = make()  # with hooks, which copies lack
        seeded(1)
        request = StepRequest(
            module=module,
            x=draw(),
            y=torch.randint(0, 3, (4,)),
            loss=make_loss(),
            loss_name="judged",
            optimizer=OptimizerRecipe(name="sgd", momentum=0.9),
            options=BuildOptions(streams=1, fuse="off"),
            **options,
        )
        before, states = _state(module), _random_states()
        step = prepare_step(request, device=torch.device("cpu"))
        _assert_untouched(module, before, states)
        seeded(2)
        batches = [(draw(), torch.randint(0, 3, (4,))) for _ in range(STEPS * request.accumulate)]
        found = _course_of_step(step, module, batches, request.accumulate)
        expected = _course(twin, make_loss(), batches, request.accumulate, request.clip_norm)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(one[name], value, rtol=2e-3, atol=1e-5, msg=f"update {i}: {name}")
            else:
                assert one[name] == value, f"update {i}: {name}"
    return Verdict(kind="equal" if step.fallback is None else "refused", reason=step.fallback)


def _course_of_step(step: Any, module: nn.Module, batches: list[Any], accumulate: int) -> list[dict[str, Any]]:
    seeded(3)
    seen = []
    for i, (x, y) in enumerate(batches):
        step.run(x, y, 0.05, i % accumulate == accumulate - 1)
        seen.append({"loss": step.loss.clone(), **_state(module)})
    return seen


def _course(
    module: nn.Module, loss: Callable[..., torch.Tensor], batches: list[Any], accumulate: int, clip: float | None
) -> list[dict[str, Any]]:
    seeded(3)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    seen = []
    for i, (x, y) in enumerate(batches):
        value = loss(module(x), y)
        (value / accumulate).backward()
        if i % accumulate == accumulate - 1:
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            optimizer.zero_grad()
        seen.append({"loss": value.detach().clone(), **_state(module)})
    return seen
