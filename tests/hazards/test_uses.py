"""Hostile uses of recorded modules: shared state, threads, feedback, own buffers, modes, several signatures."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs.errors import NimbleError, UsageError

QUICK: dict[str, Any] = {"fuse": "off", "streams": 1, "eager": "reference"}


class Counts(nn.Module):
    """Advances two buffers, one of them by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.mean.mul_(0.5).add_(x.mean(0))
        return self.drop(self.linear(x)) * self.n - self.mean


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Adds(nn.Module):
    """Writes into a buffer that callers may pass in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(3, 4))
        self.w = nn.Parameter(torch.full((3, 4), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.add_(1)
        return x * 2


def pair(cls: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two modules that start the same."""
    torch.manual_seed(0)
    module = cls().eval()
    return module, copy.deepcopy(module)


def prepared(module: nn.Module, example: Any, **options: Any) -> Nimble:
    nimble = Nimble(module)
    nimble.prepare(example, **QUICK, **options)
    return nimble


def eager(module: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        return module(*args)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


def same_state(module: nn.Module, twin: nn.Module) -> None:
    for name, tensor in twin.state_dict().items():
        same(module.state_dict()[name], tensor)


def test_eager_calls_between_replays_share_the_state() -> None:
    """Whoever is called advances the same buffers."""
    module, twin = pair(Counts)
    nimble = prepared(module, torch.randn(3, 4))
    assert nimble.schedule is not None
    for turn in range(6):
        x = torch.randn(3, 4)
        found = eager(module, x.clone()) if turn % 2 else nimble(x.clone())
        same(found, eager(twin, x))
        same_state(module, twin)


def test_two_nimbles_of_one_module_share_its_state() -> None:
    """Preparing the second does not disturb the first, and calls of both count."""
    module, twin = pair(Counts)
    first = prepared(module, torch.randn(3, 4))
    x = torch.randn(3, 4)
    same(first(x), eager(twin, x))
    second = prepared(module, torch.randn(3, 4))
    same_state(module, twin)
    for nimble in (second, first, first, second):
        x = torch.randn(3, 4)
        same(nimble(x), eager(twin, x))
    same_state(module, twin)


def test_signatures_share_the_state() -> None:
    """Two shapes of one stateful module, called in turn."""
    module, twin = pair(Counts)
    nimble = prepared(module, torch.randn(3, 4))
    x = torch.randn(3, 4)
    same(nimble(x), eager(twin, x))
    nimble.prepare(torch.randn(5, 4), **QUICK)
    for n in (5, 3, 3, 5):
        x = torch.randn(n, 4)
        same(nimble(x), eager(twin, x))
        same_state(module, twin)


def test_a_call_that_is_refused_leaves_the_state() -> None:
    """A wrong shape counts for nothing."""
    module, twin = pair(Counts)
    nimble = prepared(module, torch.randn(3, 4))
    for given in (torch.randn(2, 4), torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, requires_grad=True)):
        with pytest.raises(UsageError):
            nimble(given)
        same_state(module, twin)
    x = torch.randn(3, 4)
    same(nimble(x), eager(twin, x))


def test_a_state_that_is_loaded_between_calls_counts() -> None:
    """`load_state_dict` sets buffers and weights in place, also back to where they were."""
    module, twin = pair(Counts)
    start = copy.deepcopy(module.state_dict())
    nimble = prepared(module, torch.randn(3, 4))
    for turn in range(6):
        if turn == 3:
            module.load_state_dict(start)
            twin.load_state_dict(start)
        x = torch.randn(3, 4)
        same(nimble(x), eager(twin, x))


def test_outputs_as_inputs() -> None:
    """A loop that feeds results back, through the static tensors too."""
    module, twin = pair(Plain)
    nimble = prepared(module, torch.randn(3, 4))
    x = y = torch.randn(3, 4)
    for _ in range(5):
        x, y = nimble(x), eager(twin, y)
        same(x, y)
    static = nimble.inputs["args.0"]
    static.copy_(torch.arange(12.0).view(3, 4))
    expected = eager(twin, static.clone())
    same(nimble(static), expected)
    result = nimble.outputs["output"]
    expected = eager(twin, result.clone())
    same(nimble(result), expected)


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("name", ["b", "w", "view"])
def test_its_own_tensors_as_inputs(name: str, fallback: bool) -> None:
    """Called with a buffer that forward writes, forward sees what it wrote: the call is refused, or runs in eager."""
    module, twin = pair(Adds)
    with torch.no_grad():
        nimble = prepared(module, torch.ones(3, 4), fallback=fallback)
        given, own = ([m.b[:] if name == "view" else getattr(m, name) for _ in range(5)] for m in (module, twin))
        for mine, theirs in zip(given, own, strict=True):
            if name == "w" or fallback:
                same(nimble(mine), eager(twin, theirs))
                assert (nimble.fallback is None) == (name == "w")
            else:
                with pytest.raises(UsageError, match=r"^args\.0: shares memory with the module's own 'b'"):
                    nimble(mine)
            same_state(module, twin)
        same(nimble(torch.ones(3, 4)), torch.full((3, 4), 2.0))
        assert nimble.fallback is None


def test_outputs_kept_are_not_changed_by_later_calls() -> None:
    """Neither are the inputs of earlier calls."""
    module, twin = pair(Counts)
    nimble = prepared(module, torch.randn(3, 4))
    given = [torch.randn(3, 4) for _ in range(5)]
    kept = [nimble(x) for x in given]
    for x, found in zip(given, kept, strict=True):
        same(found, eager(twin, x))
        found.zero_()
    x = torch.randn(3, 4)
    same(nimble(x), eager(twin, x))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_around_prepare_and_calls(mode: Callable[[], Any]) -> None:
    """Whatever mode the caller is in, values and state are eager's."""
    module, twin = pair(Counts)
    with mode():
        nimble = prepared(module, torch.randn(3, 4))
        for _ in range(3):
            x = torch.randn(3, 4)
            same(nimble(x), eager(twin, x))
    x = torch.randn(3, 4)
    same(nimble(x), eager(twin, x))
    same_state(module, twin)


def test_a_module_in_training_mode_is_prepared_for_evaluation() -> None:
    """Modes are as before, submodule by submodule."""
    module, twin = pair(Counts)
    module.train()
    module.linear.eval()  # type: ignore[operator]
    nimble = prepared(module, torch.randn(3, 4))
    for _ in range(3):
        x = torch.randn(3, 4)
        same(nimble(x), eager(twin, x))
    assert [m.training for m in module.modules()] == [True, False, True]


def test_weights_of_an_optimizer_between_calls() -> None:
    """A training in eager, evaluated by replays."""
    module, _ = pair(Plain)
    nimble = prepared(module, torch.randn(3, 4))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(5):
        x = torch.randn(3, 4)
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
        same(nimble(x), eager(module, x))


class Outer(nn.Module):
    """Calls a module that is itself a replay."""

    def __init__(self, inner: Nimble) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def test_a_replay_within_a_module() -> None:
    """Recorded or refused, never the example's result."""
    module, twin = pair(Plain)
    inner = prepared(module, torch.randn(3, 4))
    try:
        outer = prepared(Outer(inner), torch.randn(3, 4))
    except NimbleError:
        x = torch.randn(3, 4)
        same(inner(x), eager(twin, x))
        return
    for _ in range(5):
        x = torch.randn(3, 4)
        same(outer(x), eager(twin, x) + 1)


def in_threads(work: Callable[[int], None], count: int = 6) -> None:
    """Raises what any of the threads did."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as e:  # noqa: BLE001 - raised below
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_on_one_signature() -> None:
    """Each gets the result of its own input."""
    module, twin = pair(Plain)
    nimble = prepared(module, torch.randn(3, 4))

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for _ in range(50):
            x = torch.randn(3, 4, generator=generator)
            same(nimble(x), eager(twin, x))

    in_threads(work)


def test_threads_count_in_the_state() -> None:
    """No call is lost: the counter says how many there were."""
    module, _ = pair(Counts)
    nimble = prepared(module, torch.randn(3, 4))

    def work(_: int) -> None:
        for _i in range(50):
            nimble(torch.zeros(3, 4))

    in_threads(work)
    assert float(module.n) == 300  # type: ignore[arg-type]


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) * float(x.sum())


def test_threads_in_eager() -> None:
    """With `fallback` dropout is off in each call, and the module's mode is its own in the end."""
    module = Reads()
    nimble = prepared(module, torch.randn(3, 4), fallback=True)
    assert nimble.fallback is not None

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for _ in range(100):
            x = torch.randn(3, 4, generator=generator)
            same(nimble(x), x * float(x.sum()))

    in_threads(work)
    assert all(m.training for m in module.modules())


@pytest.mark.parametrize("cls", [Counts, Plain])
def test_a_stored_schedule_takes_over_the_state(cls: type[nn.Module], tmp_path: Path) -> None:
    """What another process stored is right for a module in another state."""
    for turn in range(3):
        torch.manual_seed(turn)
        module = cls().eval()
        if isinstance(module, Counts):
            module.n.fill_(turn)  # type: ignore[operator]
        twin = copy.deepcopy(module)
        nimble = prepared(module, torch.randn(3, 4), store=tmp_path / "state")
        assert nimble.hit.value == ("stored" if turn else "miss")
        same_state(module, twin)
        for _ in range(5):
            x = torch.randn(3, 4)
            same(nimble(x), eager(twin, x))
        same_state(module, twin)


class Named(nn.Module):
    """Returns what is no tensor beside its result."""

    def __init__(self, name: str, scale: float) -> None:
        super().__init__()
        self.name, self.scale = name, scale

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": x * self.scale, "name": self.name}


def test_a_stored_schedule_is_not_another_modules(tmp_path: Path) -> None:
    """Constants of Python are part of what is looked up, or of each module's own structure."""
    for name, scale in (("a", 2.0), ("b", 2.0), ("b", 3.0), ("a", 2.0)):
        nimble = prepared(Named(name, scale), torch.randn(3, 4), store=tmp_path / "state")
        x = torch.randn(3, 4)
        found = nimble(x)
        assert found["name"] == name
        same(found["y"], x * scale)


def test_preparing_again_takes_a_changed_module() -> None:
    """After a change that is refused at the call, `prepare` again goes on with the module as it is."""
    module, _ = pair(Plain)
    nimble = prepared(module, torch.randn(3, 4))
    module.linear = nn.Linear(4, 4, bias=False)
    with pytest.raises(NimbleError):
        nimble(torch.randn(3, 4))
    nimble.prepare(torch.randn(3, 4), **QUICK)
    x = torch.randn(3, 4)
    same(nimble(x), eager(module, x))


def test_a_released_module_is_eagers_again() -> None:
    """And another Nimble of it goes on."""
    module, twin = pair(Counts)
    first, second = prepared(module, torch.randn(3, 4)), prepared(module, torch.randn(3, 4))
    x = torch.randn(3, 4)
    same(first(x), eager(twin, x))
    first.release()
    same(second(x), eager(twin, x))
    same(eager(module, x), eager(twin, x))
