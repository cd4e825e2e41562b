"""What holds for every search: a compiler that fails is a row, compilers are stopped, untested ones are not tried."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from nimble_jobs.engine import device as devices
from nimble_jobs.engine.private import compilers
from nimble_jobs.nimble import Nimble
from nimble_jobs.planner.forward.build import build_best
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.step.build import OptimizerRecipe, StepRequest, prepare_step
from nimble_jobs.schedule import Candidate

CPU = torch.device("cpu")
COMPILED_BY = ("planner.sources.source", "planner.step.record", "nimble.pair_target")


def forward_pass() -> tuple[Candidate, ...]:
    built = build_best(nn.Linear(3, 2).eval(), {"x": torch.zeros(2, 3)}, "key", BuildOptions(), CPU)
    return built.schedule.candidates


def training_step() -> tuple[Candidate, ...]:
    request = StepRequest(
        module=nn.Linear(3, 2),
        x=torch.zeros(4, 3),
        y=torch.zeros(4, dtype=torch.int64),
        loss=cross_entropy,
        loss_name="cross_entropy",
        optimizer=OptimizerRecipe(name="sgd"),
    )
    step = prepare_step(request, device=CPU)
    assert step.schedule is not None
    return step.schedule.candidates


def pair() -> tuple[Candidate, ...]:
    nimble = Nimble(nn.Linear(3, 2))
    nimble.prepare(torch.zeros(4, 3), training=True)
    assert nimble.schedule is not None
    return nimble.schedule.candidates


TARGETS = pytest.mark.parametrize("search", [forward_pass, training_step, pair])
Searched = Callable[[], tuple[Candidate, ...]]


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU is given compilers. Notes each time that they are stopped; none are started."""
    able = replace(devices.able(CPU), compilers=True)
    monkeypatch.setattr(devices, "able", lambda _: able)
    noted: list[str] = []
    monkeypatch.setattr(compilers, "start_compilers", lambda: None)
    monkeypatch.setattr(compilers, "stop_compilers", lambda: noted.append("stopped"))
    return noted


def compiler(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    """Have compiling fail when the model is first called. Notes each call."""
    calls: list[str] = []

    def fails(*_: Any, **__: Any) -> Any:
        calls.append("called")
        raise error

    for place in COMPILED_BY:
        monkeypatch.setattr(sys.modules[f"nimble_jobs.{place}"], "compile_module", lambda *_, **__: fails)
    return calls


@TARGETS
@pytest.mark.parametrize("error", [RuntimeError("nvcc says\nno"), AssertionError(), KeyError("lowering")])
def test_a_compiler_that_fails_is_a_row(
    search: Searched, error: Exception, stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises, eager kernels win, the table says why the others are not in it, and compilers are stopped."""
    calls = compiler(monkeypatch, error)
    rows = {c.name: c for c in search()}
    assert calls
    failed = [c.reason for name, c in rows.items() if name.startswith("inductor kernels")]  # with and without ours
    first = str(error).partition("\n")[0]
    assert failed == [f"not built: {type(error).__name__}" + (f": {first}" if first else "")] * len(calls)
    assert any(c.replay_us is not None for name, c in rows.items() if name.startswith("eager kernels"))
    assert stopped == ["stopped"]


@TARGETS
def test_compilers_are_stopped_after_an_interrupt_too(
    search: Searched, stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that ends early leaves no compile processes behind."""
    compiler(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        search()
    assert stopped == ["stopped"]


@TARGETS
def test_compilers_of_an_untested_torch_are_not_tried(
    search: Searched, stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table says why; nothing is compiled, and there is nothing to stop."""
    for module in (sys.modules["nimble_jobs.planner.search.search"], compilers):
        monkeypatch.setattr(module, "tested_version", lambda: "torch 9 was not tested")
    calls = compiler(monkeypatch, RuntimeError("no"))
    rows = {c.name: c.reason for c in search()}
    assert rows["inductor kernels"] == "not tried: torch 9 was not tested"
    assert (calls, stopped) == ([], [])
