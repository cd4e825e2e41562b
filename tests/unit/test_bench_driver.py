"""The driver of the benchmark: one process a model, rows kept as they come, failures that stay where they happen."""

from __future__ import annotations

from pathlib import Path

import pytest

from nimble_jobs.bench import Request, Results, run
from nimble_jobs.bench.process import Process, ProcessDied
from nimble_jobs.errors import UsageError
from tests.bench_samples import ENVIRONMENT, row
from tests.waiting import PATIENCE_S

FAKE = "tests.bench_fake"


def request(*names: str, **values: object) -> Request:
    given = {"dtypes": ("fp32",), "families": ("eager", "ours"), "layouts": ("contiguous",), **values}
    return Request(models=tuple(f"torchvision:{name}" for name in names), **given)  # type: ignore[arg-type]


def measured(wanted: Request, folder: Path, results: Results | None = None) -> Results:
    found = results or Results()
    assert run(wanted, found, log=folder / "log", module=FAKE)
    return found


def test_every_system_gets_a_row(tmp_path: Path) -> None:
    """Each system of each unit has one row, and the results are handed over after every unit."""
    seen: list[int] = []
    results = Results()
    run(request("a", "b"), results, log=tmp_path / "log", kept=lambda r: seen.append(len(r.rows)), module=FAKE)
    assert [(r.model, r.system) for r in results.rows] == [
        (f"torchvision:{m}", s) for m in "ab" for s in ("eager", "ours-1-stream", "ours-streams", "ours")
    ]
    assert seen == [1, 4, 5, 8]


def test_a_model_has_a_process_of_its_own(tmp_path: Path) -> None:
    """The units of one model share a process, two models do not."""
    results = measured(request("a", "b"), tmp_path)
    processes = {m: {r.replay_us for r in results.rows if r.model == f"torchvision:{m}"} for m in "ab"}
    assert len(processes["a"]) == len(processes["b"]) == 1
    assert processes["a"] != processes["b"]


def test_talk_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What the process prints lands in the log file and nowhere else."""
    measured(request("a"), tmp_path)
    assert "measuring torchvision:a" in (tmp_path / "log").read_text()
    assert capfd.readouterr() == ("", "")


def test_a_dead_process_costs_its_unit_only(tmp_path: Path) -> None:
    """Rows that came before stay, those missing say how the process ended, and the next unit gets a new process."""
    results = measured(request("dies", "a", families=("ours", "compile-default")), tmp_path)
    errors = {(r.model, r.system): r.error for r in results.rows}
    died = "the process ended with exit code 3: cannot go on"
    assert errors["torchvision:dies", "ours-1-stream"] is None
    assert errors["torchvision:dies", "ours"] == died
    assert errors["torchvision:dies", "compile-default"] is None
    assert errors["torchvision:dies", "compile-default+graph"] == died
    assert errors["torchvision:a", "ours"] is None


def test_a_system_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """After the limit the process is killed; the row says so, and the rest goes on."""
    results = measured(request("hangs", "a", families=("eager",), limit_s=5.0), tmp_path)
    assert [r.error for r in results.rows] == ["over the time limit of 5 s", None]


def test_after_a_fault_comes_a_new_process(tmp_path: Path) -> None:
    """A process whose device has faulted measures nothing more."""
    results = measured(request("faults", families=("eager", "compile-default")), tmp_path)
    assert len({r.replay_us for r in results.rows}) == 2


def test_the_time_for_all_ends_the_run(tmp_path: Path) -> None:
    """`stop_after_s` ends the run; a unit that was cut off gets no error row, so that it is measured later."""
    results = Results()
    wanted = request("hangs", "a", families=("compile-default",), stop_after_s=12.0)
    assert not run(wanted, results, log=tmp_path / "log", module=FAKE)
    assert [(r.model, r.system) for r in results.rows] == [("torchvision:hangs", "compile-default")]


def test_no_time_at_all(tmp_path: Path) -> None:
    """A run that ends before its first process answers has no rows, and is not finished."""
    results = Results()
    assert not run(request("a", stop_after_s=0.001), results, log=tmp_path / "log", module=FAKE)
    assert results.rows == []


def test_resuming_measures_what_is_missing_or_failed(tmp_path: Path) -> None:
    """Good rows stay as they are; failed ones are replaced in place, missing ones are added."""
    before = row("torchvision:a", "eager", dtype="fp32", replay_us=0.5)
    failed = row("torchvision:b", "eager", dtype="fp32", replay_us=None, error="out of memory")
    earlier = Results(environment=ENVIRONMENT, rows=[before, failed])
    results = measured(request("a", "b", "c", families=("eager",)), tmp_path, earlier)
    assert results.rows[0] == before
    assert [r.model for r in results.rows] == ["torchvision:a", "torchvision:b", "torchvision:c"]
    assert all(r.error is None for r in results.rows)


def test_results_of_another_device_are_not_mixed(tmp_path: Path) -> None:
    """Going on with a file of another device is refused, and the process is not left behind."""
    results = measured(request("a", families=("eager",)), tmp_path)
    with pytest.raises(UsageError, match="another file"):
        run(request("a", device="cpu"), results, log=tmp_path / "log", module=FAKE)


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The last line that it printed is in the error."""
    process = Process({}, tmp_path / "log", module="tests.no_such_module")
    with pytest.raises(ProcessDied, match="no_such_module"):
        process.answer(PATIENCE_S)
    process.close()
