"""Measuring training steps on the CPU: a tiny network through eager and ours; losses that go astray; one real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from nimble_jobs.bench import compare, training_systems
from nimble_jobs.bench import request as asked
from nimble_jobs.bench import training_request as trained
from nimble_jobs.bench.measure import measure
from nimble_jobs.bench.request import TRAINING_FAMILIES, Unit
from nimble_jobs.bench.results import Results
from nimble_jobs.bench.row import Row
from nimble_jobs.bench.settings import Settings
from nimble_jobs.bench.training_case import Case, case_of
from nimble_jobs.bench.training_cell import TrainingCell
from nimble_jobs.bench.training_request import BATCHES, TrainingRequest
from nimble_jobs.errors import ModelError, UsageError
from nimble_jobs.planner.step.request import OptimizerRecipe
from tests.cli import Cli

CPU = torch.device("cpu")
QUICK = Settings(sample_s=0.01, cold_caches=False)


def tiny() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


CASE = Case(
    make=lambda: tiny().train(),
    input_shape=(3, 8, 8),
    below=None,
    classes=5,
    recipe=OptimizerRecipe(name="sgd", momentum=0.9),
    lr=0.01,
)


@pytest.fixture
def cell() -> TrainingCell:
    """The tiny network at 8 pixels, batch 4."""
    return TrainingCell(CASE, "fp32", 4, CPU, None, steps=10)


def rows(cell: TrainingCell, family: str, layout: str = "contiguous") -> list[Row]:
    unit = Unit(model="tiny", dtype="fp32", batch=4, layout=layout, family=family, mode="training")
    return list(measure(cell, unit, QUICK))


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_eager_is_measured(cell: TrainingCell, layout: str) -> None:
    """Time of a step, records a second and memory have a figure, and losses are its own."""
    (row,) = rows(cell, "eager", layout)
    assert row.error is None
    assert row.mode == "training"
    assert row.replay_us is not None
    assert row.records_per_s == pytest.approx(4e6 / row.replay_us)
    assert row.relative_norm is not None
    assert row.relative_norm < 1e-4


def test_ours_is_measured(cell: TrainingCell) -> None:
    """The chosen schedule has times, facts and candidates; on a CPU there is nothing on several streams."""
    one, many, ours = rows(cell, "ours")
    assert [r.system for r in (one, many, ours)] == list(TRAINING_FAMILIES["ours"])
    assert one.replay_us is not None
    assert (many.replay_us, many.note) == (None, "no such candidate")
    assert ours.error is None
    assert ours.relative_norm is not None
    assert ours.relative_norm < 1e-5  # the same operators in the same order; threads may add in another
    assert ours.facts["tasks"] > 10
    assert ours.note == "eager kernels, 1 stream"


@pytest.mark.parametrize("family", [f for f in TRAINING_FAMILIES if f not in ("eager", "ours")])
def test_what_needs_a_gpu_says_so(cell: TrainingCell, family: str) -> None:
    """A row with the reason."""
    (row,) = rows(cell, family)
    assert row.error == "needs a CUDA device"


def test_losses_that_go_astray_are_an_error_and_no_time(cell: TrainingCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that trains otherwise is no competitor."""

    def faster(runner: training_systems.Loop) -> None:
        for group in runner.optimizer.param_groups:
            group["lr"] = 0.5

    cell.expect(training_systems.reference(cell))
    warm = training_systems._warm
    monkeypatch.setattr(training_systems, "_warm", lambda r, c, lay: (warm(r, c, lay), faster(r))[0])
    (row,) = rows(cell, "eager")
    assert row.replay_us is None
    assert "the losses of 10 steps differ from eager's" in (row.error or "")


def test_what_dropout_varies_is_forgiven() -> None:
    """Eager with another seed differs from itself; a system that draws other masks passes."""
    case = Case(
        make=lambda: nn.Sequential(nn.Dropout(0.9), tiny()).train(),
        input_shape=CASE.input_shape,
        below=None,
        classes=5,
        recipe=CASE.recipe,
        lr=CASE.lr,
    )
    cell = TrainingCell(case, "fp32", 4, CPU, 0.0, steps=10)
    cell.expect(training_systems.reference(cell))
    runner = training_systems.reference(cell)
    run = runner.run

    def with_other_masks() -> None:
        torch.rand(1)
        run()

    runner.run = with_other_masks  # type: ignore[method-assign]
    assert cell.check(runner, "contiguous") > 0


def test_a_reset_runner_trains_the_same_again(cell: TrainingCell) -> None:
    """Losses repeat bit by bit from the first step on."""
    runner = training_systems.reference(cell)
    assert torch.equal(cell._losses(runner, "contiguous", 1), cell._losses(runner, "contiguous", 1))


def test_units_are_the_papers() -> None:
    """Each model in its own batch sizes, all systems but the slow autotuning, one layout where there is no choice."""
    units = TrainingRequest(models=tuple(BATCHES)).units(cuda=True)
    assert {(u.model, u.batch) for u in units} == {(m, b) for m, sizes in BATCHES.items() for b in sizes}
    assert {u.family for u in units} == set(TRAINING_FAMILIES) - {"compile-max-autotune"}
    assert {u.layout for u in units if u.model == "bert_base" and u.family == "eager"} == {"contiguous"}
    assert {u.layout for u in units if u.family == "ours"} == {"own choice"}
    assert {u.mode for u in units} == {"training"}
    assert {u.family for u in TrainingRequest(models=("resnet50",)).units(cuda=False)} == {"eager", "ours"}


def test_names_are_checked() -> None:
    """An unknown network, side, dtype or system is named."""
    with pytest.raises(UsageError, match="unknown model 'resnet5'"):
        trained.models_of("resnet50,resnet5")
    with pytest.raises(UsageError, match="unknown model 'resnet50@big'"):
        trained.models_of("resnet50@big")
    with pytest.raises(UsageError, match="unknown dtype 'fp16'"):
        asked.dtypes_of("fp16", trained.DTYPES)
    with pytest.raises(UsageError, match="unknown system 'tensorrt'"):
        asked.families_of("tensorrt", TRAINING_FAMILIES)
    assert asked.families_of("compile,ours-1-stream", TRAINING_FAMILIES) == (
        "compile-default",
        "compile-reduce-overhead",
        "compile-max-autotune",
        "ours",
    )
    with pytest.raises(ModelError, match="no such network"):
        case_of("resnet5")


def test_training_and_inference_are_kept_apart() -> None:
    """Rows of both stand in one file, and are compared only among themselves."""
    values = {"model": "resnet50", "batch": 1, "dtype": "fp32", "layout": "contiguous"}
    results = Results()
    for mode, factor in (("inference", 1.0), ("training", 10.0)):
        results.add(
            Row(system=system, mode=mode, replay_us=us * factor, **values)  # type: ignore[arg-type]
            for system, us in (("eager", 30.0), ("ours", 10.0))
        )
    comparisons = compare(results.rows)
    assert [(c.mode, c.us("ours"), c.over_eager) for c in comparisons] == [
        ("inference", 10.0, 3.0),
        ("training", 100.0, 3.0),
    ]


def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each system has a process of its own, a row in the file, and is not measured again with --resume."""
    file = tmp_path / "r.json"
    words = ["bench", "training", "--models", "resnet50@32", "--batch", "2", "--device", "cpu", "--sample", "20ms"]
    cli = Cli(tmp_path / "home", capsys)
    answer = cli(*words, "--systems", "compile-default,cuda-graph", "--layout", "contiguous", "--json", file)
    assert answer.code == 0, answer.err
    raw = json.loads(file.read_text())
    assert [(r["system"], r["mode"], r["error"]) for r in raw["results"]] == [
        ("compile-default", "training", "needs a CUDA device"),
        ("cuda-graph", "training", "needs a CUDA device"),
    ]
    log = (tmp_path / "r.json.log").read_text()
    assert log.count("== resnet50@32 fp32 batch 2") == 2
