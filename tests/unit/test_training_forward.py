"""Validations replay the model over its live weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs.errors import CheckFailed, DeviceFault, JobFailed
from nimble_jobs.job import Hit
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.step import forward_parts
from nimble_jobs.planner.lookup.obtain import by_spec
from nimble_jobs.planner.step import validation as forward_prepare
from nimble_jobs.planner.step.validation import PreparedForward, prepare_forward
from nimble_jobs.store import ScheduleState, Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.training.step import validation
from nimble_jobs.workloads.training.step.setup import evaluating
from nimble_jobs.workloads.training.step.validation import Forward
from tests.trainings import Attempt, lay_out, metrics, spec_of

STEP = {"model.source": "test", "mode": "training", "input": "x, y", "train.loss": "mse", "train.optimizer": "sgd"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as found:
        yield found


def captured(forward: Forward, x: torch.Tensor, store: Store, *, on_miss: str = "build") -> PreparedForward | str:
    return forward.capture(
        x,
        lambda module: prepare_forward(
            module,
            x,
            forward_parts(STEP, x, "given"),
            options=BuildOptions(layout="given", tolerance=0.05),
            store=store,
            on_miss=by_spec(on_miss, "for validations, "),
        ),
    )


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(48, 4))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stored", [False, True])
def test_replays_follow_the_weights(dtype: str, stored: bool, store: Store) -> None:
    """What a training changes between validations, weights and statistics, is what the next one sees, also where the
    schedule comes from the store.
    """
    module = net().train()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    forward = Forward(module, dtype)
    x = torch.randn(6, 1, 6, 6)
    if stored:
        captured(Forward(net(), dtype), x, store)
    state = torch.get_rng_state()
    found = captured(forward, x, store, on_miss="fail" if stored else "build")
    assert isinstance(found, PreparedForward)
    assert (found.failure, found.hit) == (None, Hit.STORED if stored else Hit.MISS)
    assert torch.get_rng_state().equal(state)
    assert all(part.training for part in module.modules())
    assert all(t.equal(before[name]) for name, t in module.state_dict().items())
    seen = []
    for _ in range(2):
        with evaluating(module):
            expected = Forward(module, dtype)(x)
            outputs = forward(x)
            assert torch.allclose(outputs, expected, rtol=1e-5, atol=1e-6)
            short = forward(x[:2])
            assert torch.allclose(short, expected[:2], rtol=0.1, atol=1e-2)
        seen.append(outputs.clone())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1)
        module(torch.randn(9, 1, 6, 6))  # moves the statistics
    assert not torch.allclose(*seen)
    forward.close()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x) * self.count


def test_a_module_that_counts_its_calls(store: Store) -> None:
    """A stored schedule is loaded and checked; a counter in the module is unchanged afterwards."""
    x = torch.randn(4, 3)
    for hit in (Hit.MISS, Hit.STORED):
        module = Counts()
        forward = Forward(module, "fp32")
        found = captured(forward, x, store)
        assert isinstance(found, PreparedForward)
        assert (found.hit, found.failure) == (hit, None)
        assert float(module.count) == 0
        forward.close()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x), "twice": self.layer(x) * 2}


class Reads(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(x) * float(x.abs().max())


class FailsWhenRecorded(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if torch._C._len_torch_dispatch_stack():
            raise KeyError("mode")
        return self.layer(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Reads, "host|item|_local_scalar_dense"),
        (FailsWhenRecorded, "the model fails while it is recorded: KeyError: 'mode'"),
    ],
)
def test_what_cannot_be_replayed_runs_in_eager(kind: type[nn.Module], why: str, store: Store) -> None:
    """A module that cannot be replayed runs in eager, and the reason is given."""
    module = kind().train()
    forward = Forward(module, "fp32")
    x = torch.randn(4, 3)
    reason = captured(forward, x, store)
    assert isinstance(reason, str)
    assert any(word in reason for word in why.split("|")), reason
    with evaluating(module):
        found, expected = forward(x), module(x)
    assert isinstance(found, type(expected))


@pytest.mark.parametrize("by_name", [True, False])
def test_several_outputs_are_replayed_for_whoever_takes_them_by_name(by_name: bool, store: Store) -> None:
    """Others, a loss of the user's say, get them as the module returned them, in eager."""
    module = Two().train()
    forward = Forward(module, "fp32", by_name=by_name)
    x = torch.randn(4, 3)
    found = captured(forward, x, store)
    assert forward.replays == by_name
    assert isinstance(found, PreparedForward) or "a container of tensors" in found
    y = torch.randn(4, 3)
    with evaluating(module):
        replayed, expected = forward(y), module(y)
    assert replayed.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(replayed[name], expected[name])
    forward.close()


def test_one_that_was_quarantined_is_built_again(store: Store) -> None:
    """On a miss the reason is given and a schedule is built, unless nothing may be built."""
    x = torch.randn(6, 1, 6, 6)
    with pytest.raises(JobFailed, match=r"on_miss is fail, and .*: for validations, no schedule is stored"):
        captured(Forward(net(), "fp32"), x, store, on_miss="fail")
    in_eager = captured(Forward(net(), "fp32"), x, store, on_miss="eager")
    assert isinstance(in_eager, PreparedForward)
    assert str(in_eager.failure).startswith("schedule.on_miss is eager")
    first = captured(Forward(net(), "fp32"), x, store)
    assert isinstance(first, PreparedForward)
    store.schedules.quarantine(first.key, "a test", 0.0)
    again = captured(Forward(net(), "fp32"), x, store)
    assert isinstance(again, PreparedForward)
    assert (again.hit, again.failure) == (Hit.MISS, None)
    assert "a test" in str(again.miss_reason)
    assert [entry.state for entry in store.schedules.list()] == [ScheduleState.READY]


def test_one_that_fails_its_check_when_it_is_loaded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that fails its check is quarantined and built again; a device fault is raised."""
    x = torch.randn(6, 1, 6, 6)
    captured(Forward(net(), "fp32"), x, store)
    problems: list[Exception] = [CheckFailed("differs"), DeviceFault("gone")]

    def fails(*_: Any, **__: Any) -> None:
        raise problems.pop(0)

    monkeypatch.setattr(forward_prepare, "check_loaded", fails)
    again = captured(Forward(net(), "fp32"), x, store)
    assert isinstance(again, PreparedForward)
    assert (again.hit, again.failure) == (Hit.MISS, None)
    assert again.miss_reason == "the stored schedule was not used: differs"
    counted = {"no schedule is stored under this key": 1, "the stored schedule was not used": 1}
    assert store.schedules.uses().misses == counted
    with pytest.raises(DeviceFault, match="gone"):
        captured(Forward(net(), "fp32"), x, store)
    assert [entry.state for entry in store.schedules.list()] == [ScheduleState.READY]


def test_a_job_replays_its_validations_and_the_next_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed validations measure what eager measures. If nothing may be built, the job says why they run in eager."""
    lay_out(tmp_path)
    measured = []
    monkeypatch.setattr(validation, "able", lambda _: SimpleNamespace(graphs=True))
    for number, on_miss in enumerate(("eager", "build", "fail", "eager")):
        spec = spec_of(tmp_path, output=f"out-{number}/net", schedule__on_miss=on_miss, model__args={"dropout": 0.0})
        attempt = Attempt(spec, home=tmp_path / "home")
        schedule = attempt.run().schedule
        measured.append([line["val_loss"] for line in metrics(Path(spec.output.path), "epoch")])
        said = [text for text in attempt.said("schedule") if text.startswith("validation: ")]
        if number == 0:
            assert schedule["validation"] == "eager"
            (why,) = (text for text in attempt.said("fallback") if text.startswith("validation "))
            assert why.startswith(
                "validation runs in eager: schedule.on_miss is eager, and there is no stored schedule"
            )
        else:
            assert schedule["validation"] == "schedule", attempt.said("fallback")
            assert said[0].startswith("validation: miss " if on_miss == "build" else "validation: stored ")
    assert measured[3] == measured[2] == measured[1] == pytest.approx(measured[0], rel=1e-4)


def test_a_resume_says_that_other_kernels_validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations with other kernels can measure other bits, on which the best epoch or an early stop can depend."""
    lay_out(tmp_path)
    spec = spec_of(tmp_path)
    Attempt(spec, stop=lambda asked: Stop.DRAIN if asked == 4 else Stop.GO).run()
    monkeypatch.setattr(validation, "able", lambda _: SimpleNamespace(graphs=True))
    second = Attempt(spec, number=2)
    assert second.run().schedule["validation"] == "schedule"
    (text,) = second.said("resumed")
    assert 'not bit for bit like an uninterrupted training: validation.digest was "eager" and is' in text


def test_the_key_is_of_the_forward_pass_alone() -> None:
    x = torch.randn(6, 1, 6, 6)
    parts = forward_parts(STEP, x, "channels-last")
    assert parts == {
        "model.source": "test",
        "mode": "training",
        "input": "x:float32[6, 1, 6, 6]",
        "weights.memory_format": "channels-last",
        "train.program": "validation",
    }
