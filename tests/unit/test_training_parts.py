"""Learning rates, measures, flat copies and random states, each against something known."""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from torch import nn

from nimble_jobs.errors import JobFailed, ModelError
from nimble_jobs.spec import CheckpointSpec, EarlyStoppingSpec, LrScheduleSpec, OptimizerSpec
from nimble_jobs.workloads.training.gauge import curves
from nimble_jobs.workloads.training.keep.flat import Flat
from nimble_jobs.workloads.training.keep.state import Progress, better, random_states, restore_random, seed_random
from nimble_jobs.workloads.training.step.learning_rate import LearningRate
from nimble_jobs.workloads.training.step.setup import freeze, in_training, recipe

CPU = torch.device("cpu")


@pytest.mark.parametrize("steps", [2, 3, 4, 10, 57])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "one_cycle"])
def test_rates_are_those_of_torch(name: str, steps: int) -> None:
    """Each schedule has the shape of torch's scheduler of that name."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedulers = torch.optim.lr_scheduler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedulers that are stepped without an optimizer
        scheduler = {
            "constant": lambda: schedulers.ConstantLR(optimizer, factor=1.0),
            "linear": lambda: schedulers.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps),
            "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, T_max=steps),
            "one_cycle": lambda: schedulers.OneCycleLR(optimizer, max_lr=0.3, total_steps=steps, cycle_momentum=False),
        }[name]()
        rate = LearningRate(LrScheduleSpec(name=name), 0.3, steps)  # type: ignore[arg-type]
        for step in range(steps):
            assert rate(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-9), step
            if step < steps - 1:
                optimizer.step()
                scheduler.step()


def test_warm_up() -> None:
    """During the warm-up the rate rises by equal steps to the base; then the schedule's shape follows."""
    rate = LearningRate(LrScheduleSpec(name="linear", warmup_steps=4), 1.0, 14)
    assert [rate(i) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rate(13) == pytest.approx(0.1)


def test_a_warm_up_that_never_ends() -> None:
    """A warm-up longer than the training is refused, with the number of steps."""
    with pytest.raises(JobFailed, match=r"warmup_steps: found 20, but the training has 20 steps; expected fewer"):
        LearningRate(LrScheduleSpec(warmup_steps=20), 1.0, 20)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=6),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans()),
        max_size=8,
    )
)
def test_flat_copies_are_safetensors(shapes: dict[str, tuple[torch.dtype, list[int], bool]]) -> None:
    """Whatever the types, shapes and strides, safetensors reads back the values at the time of the copy."""
    tensors = {}
    for name, (dtype, shape, turned) in shapes.items():
        tensor = torch.randint(0, 2, shape).to(dtype)
        tensors[name] = tensor.transpose(0, -1) if turned and shape else tensor
    flat = Flat(tensors, CPU)
    flat.take(tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    found = load(flat.head + bytes(flat.values()))
    assert found.keys() == before.keys()
    for name, tensor in found.items():
        assert tensor.dtype == before[name].dtype
        assert tensor.equal(before[name])


def test_flat_copies_find_what_is_not_finite() -> None:
    """Only the names asked for are looked at."""
    tensors = {"a": torch.ones(3), "b": torch.tensor([1.0, math.inf]), "c": torch.tensor([math.nan])}
    flat = Flat(tensors, CPU)
    flat.take(tensors)
    assert [flat.not_finite(n) for n in (["a"], ["a", "b"], ["c"])] == [None, "b", "c"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_in_any_type(dtype: torch.dtype, value: float) -> None:
    """A value that is not finite is found among tensors of other types and empty ones."""
    bad = torch.ones(5, dtype=dtype)
    tensors = {"a": torch.ones(3), "b": bad, "c": torch.zeros(0), "d": torch.ones(2, dtype=torch.int32)}
    flat = Flat(tensors, CPU)
    flat.take(tensors)
    assert flat.not_finite(tensors) is None
    bad[3] = value
    flat.take(tensors)
    assert flat.not_finite(tensors) == "b"


def test_random_states_come_back() -> None:
    """Every generator continues where it was, after a way through JSON."""
    seed_random(5, CPU)
    torch.rand(3), np.random.rand(3), random.gauss(0, 1), np.random.randn()
    states = json.loads(json.dumps(random_states(CPU)))
    first = (torch.rand(4).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random())
    seed_random(6, CPU)
    restore_random(states, CPU)
    assert (torch.rand(4).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random()) == first


@pytest.mark.parametrize(
    ("metric", "value", "than", "answer"),
    [
        ("val_loss", 1.0, 2.0, True),
        ("val_loss", 2.0, 2.0, False),
        ("accuracy", 0.9, 0.8, True),
        ("accuracy", 0.8, None, True),
        ("loss", math.nan, None, False),
        ("loss", None, 1.0, False),
    ],
)
def test_what_is_better(metric: str, value: float | None, than: float | None, answer: bool) -> None:
    """More accuracy or less loss is better; NaN never is."""
    assert better(metric, value, than) is answer


def test_early_stopping_counts_measurements() -> None:
    """A training ends after `patience` measurements without an improvement by min_delta; other epochs do not count."""
    stopping = EarlyStoppingSpec(metric="val_loss", patience=2, min_delta=0.125)
    progress = Progress()
    ended = []
    for epoch, value in enumerate([1.0, None, 0.9375, 0.75, 0.6875, None, 0.625], start=1):
        metrics = {"epoch": epoch, **({} if value is None else {"val_loss": value})}
        progress.note(metrics, CheckpointSpec(best="val_loss"), stopping)
        ended.append(progress.finished)
    assert ended == [False] * 6 + [True]
    assert progress.best == {"step": 0, "epoch": 7, "metric": "val_loss", "value": 0.625}
    assert Progress(**json.loads(json.dumps(asdict(progress)))) == progress


def test_frozen_norms_keep_their_statistics() -> None:
    """A norm whose parameters are all frozen stays in evaluation mode; others train."""
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    freeze(net, ["0.*", "1.*", "3.bias"])
    in_training(net)
    assert [m.training for m in net] == [True, False, True, True]
    assert [n for n, p in net.named_parameters() if p.requires_grad] == ["2.weight", "2.bias", "3.weight"]
    with pytest.raises(ModelError, match="every parameter of the model is frozen"):
        freeze(net, ["*"])


@pytest.mark.parametrize("steps", [1, 2, 99, 1999, 2001, 30_011])
def test_curves(steps: int, tmp_path: Path) -> None:
    """Curves hold the extremes of any number of steps and the means that they announce, without a warning."""
    loss = np.random.default_rng(steps).exponential(size=steps)
    numbers, values = curves.envelope(loss)
    assert len(numbers) == len(values) <= 2000
    assert (numbers[0], values.min(), values.max()) == (1, loss.min(), loss.max())
    assert all(a <= b <= steps for a, b in itertools.pairwise(numbers))
    width = max(1, steps // 50)
    assert curves.running_mean(loss, width) == pytest.approx(np.convolve(loss, np.full(width, 1 / width), "valid"))
    curves.draw(tmp_path / "curves.png", loss, [{"step": steps, "accuracy": 0.5}], title="any")
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_what_does_not_decay() -> None:
    """Norms, biases and one-dimensional parameters do not decay, and all others do. Without the switch all decay."""
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.LayerNorm([4, 8, 8]), nn.BatchNorm2d(4), nn.Linear(8, 2))
    module[0].bias = nn.Parameter(torch.zeros(4, 1, 1))
    module.register_parameter("scale", nn.Parameter(torch.ones(4)))
    module.register_parameter("places", nn.Parameter(torch.ones(1, 4)))
    spec = OptimizerSpec(name="adamw", weight_decay=0.1, no_decay_on_norms=True)
    found = recipe(module, spec)
    decays = {name for name, _ in module.named_parameters() if found.weight_decay_of(name)}
    assert decays == {"0.weight", "3.weight", "places"}
    everything = recipe(module, spec.model_copy(update={"no_decay_on_norms": False}))
    assert all(everything.weight_decay_of(name) == 0.1 for name, _ in module.named_parameters())
