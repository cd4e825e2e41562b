"""Files, tables and charts of results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nimble_jobs.bench import Results, compare
from nimble_jobs.bench.plot import caption, draw
from nimble_jobs.cli import bench_tables, output
from nimble_jobs.errors import UsageError
from tests.bench_samples import ENVIRONMENT, results, row
from tests.cli import Cli

CONTRACT = {
    "model", "system", "batch", "dtype", "mode", "replay_us", "with_copies_us", "prepare_s", "peak_bytes", "error",
}  # fmt: skip


def test_the_file_has_the_promised_shape(tmp_path: Path) -> None:
    """One object with environment and results; each row has at least the promised keys; reading gives it back."""
    file = tmp_path / "r.json"
    results().save(file)
    raw = json.loads(file.read_text())
    assert set(raw) == {"environment", "results"}
    assert {"device", "driver", "versions", "commit", "date"} <= set(raw["environment"])
    assert all(set(r) >= CONTRACT for r in raw["results"])
    assert Results.load(file) == results()
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"environment": {}, "results": [{"speed": 1}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    """The file is named."""
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"r\.json: not results of this benchmark"):
        Results.load(file)


def test_a_file_that_cannot_be_written_leaves_the_older_one(tmp_path: Path) -> None:
    """A row that JSON cannot hold fails, and the file and its folder are as before."""
    file = tmp_path / "r.json"
    results().save(file)
    before = file.read_bytes()
    with pytest.raises(TypeError):
        Results(rows=[row(facts={"x": object()})]).save(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_every_run_is_noted() -> None:
    """Results that were gathered in several runs name the commit and date of each."""
    found = results()
    found.adopt({**ENVIRONMENT, "commit": "later", "date": "2026-02-03"})
    assert [run["commit"] for run in found.environment["runs"]] == ["0123456789ab", "later"]


@pytest.mark.parametrize("change", [{"device": "another"}, {"versions": {"torch": "9"}}])
def test_runs_of_another_device_or_torch_do_not_mix(change: dict[str, object]) -> None:
    """Only rows of one device and one torch may stand beside each other."""
    with pytest.raises(UsageError, match="the earlier results are from"):
        results().adopt({**ENVIRONMENT, **change})


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, times and ratios are whole on 80 and on 120 columns; errors and the device are told below."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    bench_tables.show(results(), compare(results().rows))
    out = capsys.readouterr().out
    lines = [line.rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= width
    assert "…" not in out
    first = next(line.split() for line in lines if line.startswith("resnet50"))
    assert [w for w in ("5.00ms", "640.0µs", "400.0µs", "12.50", "1.60", "1.62") if w not in first] == []
    assert ("max-autotune+graph" in first) == (width == 120)
    assert sum(line.startswith("geometric mean") for line in lines) == 2
    assert any(line.startswith("  tensorrt: not installed: tensorrt (resnet50 fp16 1 and 23 more)") for line in lines)
    assert ENVIRONMENT["device"] in out


def test_a_pipe_gets_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench show` in a pipe prints a header and each row, errors included."""
    file = tmp_path / "r.json"
    results().save(file)
    answer = Cli(tmp_path / "home", capsys)("bench", "show", file)
    lines = answer.out.splitlines()
    assert answer.code == 0
    assert len(lines) == 1 + len(results().rows)
    assert lines[0].split("\t")[:3] == ["model", "system", "dtype"]
    assert any(line.endswith("not installed: tensorrt") for line in lines)


def test_files_are_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Later files replace rows of earlier ones; the result is a file like them."""
    cli = Cli(tmp_path / "home", capsys)
    results().save(tmp_path / "a.json")
    newer = row(replay_us=1.0)
    Results(environment=ENVIRONMENT, rows=[newer]).save(tmp_path / "b.json")
    Results().save(tmp_path / "empty.json")  # of a run that was stopped at once
    files = [tmp_path / name for name in ("a.json", "empty.json", "b.json")]
    arguments = ["bench", "show", *files, "--json", tmp_path / "c.json"]
    assert cli(*arguments).code == 0
    together = Results.load(tmp_path / "c.json")
    assert len(together.rows) == len(results().rows)
    assert newer in together.rows
    assert cli(*arguments).code == 2  # c.json is there now


def test_a_chart_is_drawn(tmp_path: Path) -> None:
    """A PNG, whose caption names device, driver, torch, dtypes and batches."""
    pytest.importorskip("matplotlib")
    file = tmp_path / "r.png"
    draw(compare(results().rows), ENVIRONMENT, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    said = caption(ENVIRONMENT, ["fp16", "fp32"], [1])
    for word in ("NVIDIA Sample 9000", "driver 580.1", "torch 2.11.0", "fp16, fp32", "batch 1", "TF32"):
        assert word in said


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    """No speed-up without eager."""
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="nothing to draw"):
        draw(compare([row(system="ours")]), ENVIRONMENT, tmp_path / "r.png")


def test_without_matplotlib_the_hint_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--plot` without matplotlib fails before anything is measured, and says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = Cli(tmp_path / "home", capsys)("bench", "inference", "--plot", tmp_path / "r.png")
    assert (answer.code, answer.out) == (2, "")
    assert "nimble-jobs[plots]" in answer.err
