"""Measuring on the CPU: a tiny network through eager, TorchScript and ours; wrong outputs; one real run."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from nimble_jobs.bench import Request, in_flight, systems, timing
from nimble_jobs.bench.busy import union
from nimble_jobs.bench.cell import ROTATED, Cell
from nimble_jobs.bench.measure import measure
from nimble_jobs.bench.process import Process
from nimble_jobs.bench.request import FAMILIES, Unit
from nimble_jobs.bench.row import Row, in_words
from nimble_jobs.bench.runners import CallRunner, Runner
from nimble_jobs.bench.settings import Settings
from nimble_jobs.bench.timing import SAMPLES, copy_times, replay_times
from nimble_jobs.errors import EngineError, OutOfMemory
from tests.cli import Cli
from tests.clocks import Clock
from tests.waiting import PATIENCE_S

CPU = torch.device("cpu")
QUICK = Settings(sample_s=0.01, cold_caches=False)


class Tiny(nn.Module):
    """Two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 3, padding=1)
        self.right = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.left(x)) + self.right(x)


@pytest.fixture
def cell() -> Cell:
    """The tiny network at 8 pixels, batch 2."""
    torch.manual_seed(0)
    return Cell("torchvision:tiny@8", Tiny().eval(), "fp32", 2, CPU, None)


def rows(cell: Cell, family: str, layout: str = "contiguous", settings: Settings = QUICK) -> list[Row]:
    return list(measure(cell, unit_of(family, layout=layout), settings))


def unit_of(family: str, *, model: str = "torchvision:tiny@8", layout: str = "contiguous") -> Unit:
    return Unit(model=model, dtype="fp32", batch=2, layout=layout, family=family)


def test_no_call_of_a_measurement_wants_gradients(cell: Cell) -> None:
    """A compiler would compile the model a second time for them."""
    seen = set()

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.add(torch.is_grad_enabled())
        return x

    runner = CallRunner(call, CPU)
    cell._run(runner, cell.inputs("contiguous")[0])
    replay_times(runner, cell.inputs("contiguous"), CPU, budget_s=0.001)
    copy_times(runner, cell.inputs_on_host("contiguous"), CPU, budget_s=0.001)
    assert seen == {False}


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@pytest.mark.parametrize("family", ["eager", "torchscript"])
def test_others_are_measured(cell: Cell, family: str, layout: str) -> None:
    """Both memory formats give a time, with copies and without, and eager's outputs."""
    (found,) = rows(cell, family, layout)
    assert (found.system, found.layout, found.error) == (family, layout, None)
    assert found.replay_us is not None
    assert found.with_copies_us is not None
    assert found.replay_low_us <= found.replay_us <= found.replay_high_us
    assert found.records_per_s == pytest.approx(2e6 / found.replay_us)
    assert found.relative_norm is not None
    assert found.relative_norm < 1e-5
    assert found.peak_bytes is None  # the CPU's memory is nobody's question


def test_ours_is_measured(cell: Cell) -> None:
    """The best candidates and the chosen one have rows; the chosen one also has its graph and so many in flight."""
    found = rows(cell, "ours", "own choice", dataclasses.replace(QUICK, in_flight=(1, 2)))
    assert [(r.system, r.in_flight) for r in found] == [
        ("ours-1-stream", None),
        ("ours-streams", None),
        ("ours", None),
        ("ours", 1),
        ("ours", 2),
    ]
    assert all(r.error is None for r in found)
    chosen = found[2]
    assert chosen.facts["tasks"] >= 2
    assert chosen.facts["syncs_needed"] == chosen.facts["meg_edges"] - chosen.facts["matching"]
    assert chosen.facts["over_total_work"] is not None
    assert any(c["chosen"] for c in chosen.candidates)
    assert found[1].replay_us is None  # a CPU has one stream, and the row says why there is no more
    assert found[1].note
    assert all(r.records_per_s for r in found[3:])


def test_a_failure_in_flight_has_its_row(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where so many instances do not fit, that row says so and the others stand."""

    def full(*_: object) -> Row:
        raise OutOfMemory("no room")

    monkeypatch.setattr(in_flight, "row", full)
    found = rows(cell, "ours", "own choice", dataclasses.replace(QUICK, in_flight=(8,)))
    assert [(r.system, r.in_flight, r.error) for r in found[2:]] == [("ours", None, None), ("ours", 8, "no room")]


@pytest.mark.parametrize("family", ["cuda-graph", "compile-max-autotune", "onnxruntime", "tensorrt"])
def test_what_cannot_run_here_has_a_reason(cell: Cell, family: str) -> None:
    """No GPU, or not installed: a row with an error for each system, no figure, nothing raised."""
    found = rows(cell, family)
    assert [r.system for r in found] == list(FAMILIES[family])
    assert all(r.replay_us is None for r in found)
    assert all(r.error and ("needs a CUDA device" in r.error or "not installed" in r.error) for r in found)


def test_a_wrong_output_is_an_error_and_no_time(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that is quick and wrong gets no time."""

    def wrong(family: str, cell: Cell, layout: str) -> Iterator[tuple[str, Runner]]:
        yield family, CallRunner(lambda x: cell.module(layout)(x) * 1.5, CPU)

    monkeypatch.setattr(systems, "prepare", wrong)
    (found,) = rows(cell, "eager")
    assert found.replay_us is None
    assert found.error is not None
    assert found.error.startswith("wrong output 'output'")


def test_a_failure_leaves_what_came_before(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a family whose second system fails, the first keeps its row."""

    def half(family: str, cell: Cell, layout: str) -> Iterator[tuple[str, Runner]]:
        yield "compile-default", CallRunner(cell.module(layout), CPU)
        raise ValueError("no\nmore")

    monkeypatch.setattr(systems, "prepare", half)
    first, second = rows(cell, "compile-default")
    assert (first.system, first.error) == ("compile-default", None)
    assert (second.system, second.error) == ("compile-default+graph", "ValueError: no")


def test_errors_are_one_line() -> None:
    """Ours speak for themselves; others are named."""
    assert in_words(EngineError("not\nso")) == "not"
    assert in_words(KeyError()) == "KeyError: "


def test_inputs_take_turns(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that loads for free sees every input while it is timed."""
    monkeypatch.setattr(timing, "time", Clock())
    seen: set[int] = set()

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.add(x.data_ptr())
        return x

    times = replay_times(CallRunner(call, CPU), cell.inputs("contiguous"), CPU, budget_s=0.05)
    assert seen == {i["x"].data_ptr() for i in cell.inputs("contiguous")}
    assert len(seen) == ROTATED
    assert 0 < times.low <= times.median <= times.high
    assert SAMPLES > 4  # or quartiles would mean nothing


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(0, 2)], 2), ([(0, 2), (1, 3)], 3), ([(5, 6), (0, 4), (1, 2)], 5), ([(0, 1), (1, 2)], 2)],
)
def test_overlapping_kernels_count_once(spans: list[tuple[float, float]], length: float) -> None:
    """The length of the union, in whatever order the intervals come."""
    assert union(spans) == length


def test_the_process_ends_with_whoever_asked_it(tmp_path: Path) -> None:
    """When its input ends amid a unit, the process does not go on measuring for nobody."""
    options = dataclasses.asdict(Request(models=("torchvision:squeezenet1_1@32",), device="cpu", sample_s=600.0))
    process = Process(options, tmp_path / "log")
    process.answer(120)
    process.ask(dataclasses.asdict(unit_of("eager", model="torchvision:squeezenet1_1@32")))
    begin = time.monotonic()
    process.close(grace_s=2 * PATIENCE_S)
    assert time.monotonic() - begin < PATIENCE_S


def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU the command measures eager and ours, says what the figures are worth, and writes its file."""
    file = tmp_path / "r.json"
    words = ["bench", "inference", "--models", "torchvision:squeezenet1_1@32", "--device", "cpu", "--sample", "20ms"]
    cli = Cli(tmp_path / "home", capsys)
    answer = cli(*words, "--json", file, "--layout", "contiguous")
    assert answer.code == 0, answer.err
    assert "say nothing about the schedules" in answer.err
    raw = json.loads(file.read_text())
    assert [r["system"] for r in raw["results"]] == ["eager", "ours-1-stream", "ours-streams", "ours"]
    assert all(r["error"] is None for r in raw["results"])
    assert raw["environment"]["versions"]["torch"] == torch.__version__
    assert cli(*words, "--json", file).code == 2  # an earlier file is never lost
