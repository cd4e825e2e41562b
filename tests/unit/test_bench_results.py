"""Files, tables and charts of results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.bench import Results, compare
from nimble_jobs.bench.plot import caption, draw
from nimble_jobs.bench.request import SYSTEMS
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
    assert set(raw) == {"environment", "results", "comparisons"}
    assert len(raw["comparisons"]) == len(compare(results().rows))
    assert {"device", "driver", "versions", "commit", "date"} <= set(raw["environment"])
    assert all(set(r) >= CONTRACT for r in raw["results"])
    assert Results.load(file) == results()
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"environment": {}, "results": [{"speed": 1}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    """The file is named."""
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"r\.json: not results that `bench --json` wrote"):
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
    assert [w for w in ("5.00ms", "640.0µs", "400.0µs", "12.50", "1.60") if w not in first] == []
    assert any(line.startswith("resnet50") and "max-autotune+graph" in line for line in lines)
    assert sum(line.startswith("geometric mean") and "12.50" in line for line in lines) == 2
    assert any(line.startswith("  tensorrt: not installed: tensorrt (resnet50 fp16 1 and 23 more)") for line in lines)
    assert ENVIRONMENT["device"] in out


@pytest.mark.parametrize("width", [80, 120])
def test_tables_show_what_was_measured(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each system, and all that is known of ours, has a column at any width; what nobody has a figure for has none."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    facts = {"streams": 8, "width": 9, "syncs_used": 77, "built_replay_us": 500.0}
    others = [row(system=s, replay_us=us) for s, us in (("onnxruntime", 1234.0), ("tensorrt", 2345.0))]
    ours = row(system="ours", with_copies_us=432.1, peak_bytes=3 << 20, prepare_s=65.0, idle_share=0.07, facts=facts)
    compiled = row(system="compile-default", peak_bytes=2 << 20)
    found = [row(), row(system="torchscript"), compiled, row(system="ours-1-stream"), ours, *others]
    bench_tables.show(Results(environment=ENVIRONMENT, rows=found), compare(found))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    cells = [cell for line in lines if line[:1] == ["resnet50"] for cell in line[1:]]
    expected = (
        "5.00ms 2.00ms 400.0µs 12.50 5.00",  # eager, compile, ours, ratios
        "2.50ms 1.23ms 2.35ms",  # TorchScript, ONNX Runtime, TensorRT
        "650.0µs 500.0µs 1.30 8 9 77",  # one stream, chosen, streams, width, syncs
        "432.1µs 3.0 MiB 1.50 7% 1m 05s",
    )
    assert [word for words in expected for word in words.split() if word not in cells] == []
    assert [cell for cell in cells if cell == "-"] == []
    headers = [word for line in lines if line[:1] == ["model"] for word in line]
    assert "graph" not in headers
    assert "TensorRT" in headers


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


def test_names_and_legend_of_a_chart_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long names of models run neither into a legend nor out of the picture, and no legend is wider than that."""
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot as plt

    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    names = ("torchvision:mobilenet_v3_large@299", "torchvision:regnet_x_800mf@224")
    found = [row(name, s, replay_us=100.0, batch=n) for n in (1, 2) for name in names for s in SYSTEMS]
    draw(compare(found), ENVIRONMENT, tmp_path / "r.png")
    monkeypatch.undo()
    (figure,) = drawn
    figure.draw_without_rendering()
    plt.close(figure)
    legends = [axis.get_legend().get_window_extent() for axis in figure.axes]
    labels = [label.get_window_extent() for axis in figure.axes for label in axis.get_xticklabels()]
    titles = [axis.title.get_window_extent() for axis in figure.axes]
    assert len(labels) == 4
    for box in (*legends, *labels):
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
    for legend in legends:
        assert not [box for box in (*labels, *titles) if box.overlaps(legend)]


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    """No speed-up without eager."""
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="nothing to draw"):
        draw(compare([row(system="ours")]), ENVIRONMENT, tmp_path / "r.png")


@pytest.mark.parametrize(
    ("option", "name", "problem"),
    [
        ("--plot", "none/x.png", "does not exist; expected one that does"),
        ("--plot", "x.pdf", "unknown suffix '.pdf'; expected .png"),
        ("--json", "none/x.json", "does not exist; expected one that does"),
        ("--log", "none/x.log", "does not exist; expected one that does"),
    ],
)
def test_files_that_cannot_be_written_are_refused_early(
    option: str, name: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing folders and other kinds of picture are bad usage before anything is measured or printed."""
    pytest.importorskip("matplotlib")
    cli, file = Cli(tmp_path / "home", capsys), tmp_path / "r.json"
    results().save(file)
    measuring = [("bench", command, "--models", "mobilenet_v2") for command in ("inference", "training")]
    for command in [*measuring, *([] if option == "--log" else [("bench", "show", file)])]:
        answer = cli(*command, option, tmp_path / name)
        assert (answer.code, answer.out, len(answer.lines)) == (2, "", 1)
        assert f"{option}: {tmp_path / name}: " in answer.err
        assert problem in answer.err


def test_a_device_that_is_not_there_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The option is named, whoever finds it out, and no file of results is left in the way of the next try."""
    cli, file = Cli(tmp_path / "home", capsys), tmp_path / "r.json"
    for device in ("cuda:99", "gpu"):
        answer = cli("bench", "inference", "--models", "mobilenet_v2", "--device", device, "--json", file, "--quiet")
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith("nimble-jobs: --device: ")
        assert device in answer.err
        assert not file.exists()


def test_without_matplotlib_the_hint_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--plot` without matplotlib fails before anything is measured, and says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = Cli(tmp_path / "home", capsys)("bench", "inference", "--plot", tmp_path / "r.png")
    assert (answer.code, answer.out) == (2, "")
    assert "nimble-jobs[plots]" in answer.err
