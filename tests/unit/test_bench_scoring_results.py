"""Results of `bench scoring`: agreement, ratios, charts, tables; and what the command refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from nimble_jobs.bench.scoring import System, Trial, predictions
from nimble_jobs.bench.scoring.plot import draw
from nimble_jobs.bench.scoring.results import ScoringResults, ScoringRow
from nimble_jobs.errors import DataError, UsageError
from tests.cli import Cli


def row(system: str, run_s: tuple[float, ...] = (1.0,), **values: object) -> ScoringRow:
    """100 records in each of the times given."""
    trials = tuple(Trial(run_s=s, wall_s=s + 5, files="cached") for s in run_s)
    given = {"model": "resnet50", "dtype": "fp16", "batch": 64, "records": 100, "trials": trials, **values}
    return ScoringRow(system=system, **given)  # type: ignore[arg-type]


def test_agreement_counts_missing_files_as_different(tmp_path: Path) -> None:
    """Two of four files agree, one differs, one is missing; paths count below the folder of the pictures."""

    def write(path: Path, **top1: int) -> None:
        path.parent.mkdir(exist_ok=True)
        probability = [0.5 + 0.01 * value for value in top1.values()]
        names = [name.replace("_", "/").replace("P/", f"{tmp_path}/") for name in top1]
        pq.write_table(pa.table({"id": names, "top1": list(top1.values()), "probability": probability}), path)

    write(tmp_path / "shards" / "0.parquet", a=1, b=2)
    write(tmp_path / "shards" / "1.parquet", x_c=3, d=4)
    write(tmp_path / "one.parquet", P_a=1, P_b=2, P_x_c=9)
    ours, loop = (predictions.read(tmp_path / name, tmp_path) for name in ("shards", "one.parquet"))
    loop["b"] = dataclasses.replace(loop["b"], probability=0.75)
    found = predictions.matrix({"ours": ours, "loop": loop})
    assert found["ours"]["loop"] == found["loop"]["ours"]
    assert found["ours"]["loop"].share == 0.5
    assert found["ours"]["loop"].probability == pytest.approx(0.23)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no results"):
        predictions.read(tmp_path / "empty", tmp_path)


def test_ratios_are_to_the_best_hand_written_loop(tmp_path: Path) -> None:
    """Not to Ray Data, and not to one that failed; medians over trials; all of it in the JSON."""
    found = ScoringResults(
        rows=[
            row(System.OURS_GPU, (0.1, 0.2, 0.1)),
            row(System.EAGER, (1.0,)),
            row(System.GPU_DECODE, (0.5,)),
            row(System.RAY, (0.2,)),
            row(System.COMPILED, (), error="over the time limit of 1 s"),
        ]
    )
    path = tmp_path / "results.json"
    found.save(path)
    rows = {r["system"]: r for r in json.loads(path.read_text())["results"]}
    assert rows["ours-gpu-decode"]["over_best_loop"] == pytest.approx(5)
    assert rows["ours-gpu-decode"]["records_per_s_low"] == pytest.approx(500)
    assert rows["ray-data"]["over_best_loop"] == pytest.approx(2.5)
    assert rows["dataloader-compiled"]["records_per_s"] is None
    assert json.loads(json.dumps(ScoringResults.load(path).to_json())) == json.loads(path.read_text())
    assert {
        "model",
        "system",
        "batch",
        "dtype",
        "mode",
        "replay_us",
        "with_copies_us",
        "prepare_s",
        "peak_bytes",
        "error",
    } <= set(rows["ray-data"])


def test_the_file_has_the_promised_keys() -> None:
    """Each row has the keys that rows of all benchmarks have."""
    (found,) = ScoringResults(rows=[row(System.OURS_GPU)]).to_json()["results"]
    promised = "model system batch dtype mode replay_us with_copies_us prepare_s peak_bytes error"
    assert set(promised.split()) <= set(found)


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    """Of pictures, and of arrays; nothing to draw is refused."""
    environment = {"device": "NVIDIA Sample 9000", "driver": "580.1", "cpus": 16, "versions": {"torch": "2.11.0"}}
    both = [row(System.OURS_GPU), row(System.EAGER, (2.0,)), row(System.RAY, (), error="not installed")]
    draw(ScoringResults(environment=environment, rows=both), tmp_path / "a.png")
    arrays = [row("ours-npy", bare_records_per_s=110.0)]
    draw(ScoringResults(environment=environment, rows=arrays), tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        with Image.open(tmp_path / name) as image:
            assert image.width > 500
    with pytest.raises(UsageError, match="nothing to draw"):
        draw(ScoringResults(rows=[row(System.EAGER, (), error="failed")]), tmp_path / "c.png")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--setting", "gpu-decode=x"], "--setting: 'gpu-decode=x'; expected SYSTEM=BATCH"),
        (["--format", "csv"], "--format: 'csv' is unknown; expected images, npy"),
        (["--size", "500"], "--size: '500'; expected WIDTHxHEIGHT"),
        (["--png", "x.jpg"], "--png: x.jpg: unknown suffix '.jpg'; expected .png"),
        (["--systems", "spark"], "--systems: unknown system 'spark'"),
        (["--model", "zoo:darts"], "--model: zoo:darts; expected one model of torchvision"),
        (["--photos", "nowhere"], "--photos: nowhere holds no .png or .jpg"),
        (["--batch-sizes", "0"], "--batch-sizes: '0' is not a whole number from 1"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 and one line, before anything is made."""
    monkeypatch.chdir(tmp_path)
    cli = Cli(tmp_path / "home", capsys)
    answer = cli("bench", "scoring", "--quiet", *words)
    assert (answer.code, answer.out) == (2, "")
    assert why in answer.err
    assert not list((tmp_path / "home").glob("bench/jpeg*"))


def test_results_are_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench show` prints a row a system, and draws; several files at once are refused."""
    path = tmp_path / "results.json"
    ScoringResults(environment={"cpus": 16}, rows=[row(System.OURS_GPU), row(System.EAGER, (2.0,))]).save(path)
    cli = Cli(tmp_path / "home", capsys)
    answer = cli("bench", "show", path, "--plot", tmp_path / "a.png")
    lines = [line.split("\t") for line in answer.out.splitlines()]
    assert answer.code == 0
    assert [line[1] for line in lines] == ["system", "ours-gpu-decode", "dataloader-eager"]
    assert dict(zip(*lines[:2], strict=True))["over_best_loop"] == "2"
    assert (tmp_path / "a.png").exists()
    assert cli("bench", "show", path, path).code == 2
