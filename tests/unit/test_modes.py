"""The mode of a module under threads: evaluation where asked for, its own elsewhere, and nothing left over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs.planner.module.modes import eval_mode, own_mode, own_modes

THREADS, CALLS = 6, 300  # calls of each thread


class Refused(nn.Module):
    """Cannot be recorded. In training everything is dropped, in evaluation nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Dropout(1.0), nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) > 1e9:
            return x
        return self.inner(x)


def together(*work: Callable[[], None]) -> None:
    """Run all of it at once, each in a thread of its own; what one raises is raised."""
    start = threading.Barrier(len(work))

    def go(each: Callable[[], None]) -> None:
        start.wait()
        each()

    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(go, each) for each in work]:
            done.result(timeout=120)


def all_training(module: nn.Module) -> bool:
    return all(m.training for m in module.modules())


def test_eager_fallbacks_of_many_threads_evaluate_and_leave_the_mode() -> None:
    """Dropout is active in none of 1,800 calls, and the module is in training mode after them as it was before."""
    net = Refused()
    nimble = Nimble(net)
    nimble.prepare(torch.ones(3), fallback=True)
    assert nimble.fallback is not None

    def calls() -> None:
        for i in range(CALLS):
            x = torch.full((3,), float(i + 1))
            assert torch.equal(nimble(x), x)

    together(*[calls] * THREADS)
    assert all_training(net)


def test_training_and_evaluation_in_eager_take_turns() -> None:
    """Eager calls with gradients see training mode, and those without see evaluation mode, also where one module is
    part of the other.
    """
    net = Refused()
    around = nn.Sequential(net)
    training, evaluating = Nimble(around), Nimble(net)
    training.prepare(torch.ones(3), training=True, fallback=True)
    evaluating.prepare(torch.ones(3), fallback=True)
    x = torch.ones(3)

    def trains() -> None:
        for _ in range(CALLS):
            assert torch.equal(training(x), torch.zeros(3))

    def evaluates() -> None:
        for _ in range(CALLS):
            assert torch.equal(evaluating(x), x)

    together(*[trains] * (THREADS // 2), *[evaluates] * (THREADS // 2))
    assert all_training(around)


def test_preparing_beside_calls_leaves_the_mode() -> None:
    """While a thread prepares other signatures, calls of others evaluate; afterwards the mode is the module's own."""
    net = Refused()
    own, around = Nimble(net), Nimble(nn.Sequential(net))
    for nimble in (own, around):
        nimble.prepare(torch.ones(3), fallback=True)

    def prepares() -> None:
        for size in range(4, 8):
            own.prepare(torch.ones(size), fallback=True)

    def calls() -> None:
        for _ in range(CALLS // 3):
            for nimble in (own, around):
                assert torch.equal(nimble(torch.ones(3)), torch.ones(3))

    together(prepares, *[calls] * (THREADS - 1))
    assert all_training(net)


def test_a_call_finds_the_schedule_of_its_mode_beside_evaluations() -> None:
    """A module in training mode is called through its training schedule, also while another thread evaluates it."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0))
    nimble = Nimble(net)
    nimble.prepare(torch.ones(3))
    nimble.prepare(torch.ones(3), training=True)
    with eval_mode(net):
        assert not net.training
        assert own_mode(net)
        assert torch.equal(nimble(torch.ones(3)), torch.zeros(3))
    assert all_training(net)


def test_modes_are_put_back_each_to_its_own_however_uses_overlap() -> None:
    """The first to begin need not be the last to end; submodules keep modes of their own; errors change nothing."""
    net = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    net[1].eval()
    outer, inner = eval_mode(net), eval_mode(net[1])
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert [m.training for m in net.modules()] == [True, True, False, False]
    inner.__exit__(None, None, None)
    with pytest.raises(ValueError, match="wrong"), eval_mode(net):
        raise ValueError("wrong")
    assert [m.training for m in net.modules()] == [True, True, False, False]


def test_train_in_another_thread_is_kept() -> None:
    """A module that is set to training mode while a call evaluates it stays in training mode."""
    net = nn.Sequential(nn.Dropout()).eval()
    with eval_mode(net):
        net.train()
    assert all_training(net)


def test_uses_within_a_use_do_not_wait_for_each_other() -> None:
    """What evaluates inside of what trains goes on, though another thread does the same."""
    net = nn.Sequential(nn.Dropout())

    def both() -> None:
        for _ in range(20):
            with own_modes(net), eval_mode(net):
                assert not net.training

    together(both, both)
    assert all_training(net)
