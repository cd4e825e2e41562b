"""The spec and the data of the text quick start fit each other, and its report finds the nearest passages."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nimble_jobs.data import open_reader
from nimble_jobs.spec import load

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("networkx", "numpy")  # a few of the quick start's, as reading all of them takes a while


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts, written to a folder of its own, twice: the second time changes nothing."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import quickstart_text_data as script

    folder = tmp_path_factory.mktemp("data")
    for _ in range(2):
        script.texts(folder, PACKAGES)
        script.model(folder)
    return folder


def test_the_spec_reads_the_texts(data: Path) -> None:
    """Passages of every package with ids of their own, then the questions; the model's folder is complete."""
    rows = pq.read_table(data / "passages.parquet").to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    assert [row["package"] for row in rows[-6:]] == ["question"] * 6
    assert {row["package"] for row in rows} == {*PACKAGES, "question"}
    spec = load(ROOT / "jobs" / "passages.yaml", check_files=False)
    moved = spec.input.model_copy(update={"source": str(data / "passages.parquet")})
    with open_reader(moved) as reader:
        assert reader.total == len(rows)
        (texts,) = reader.texts([(0, 3)])
    assert texts.values == [row["text"] for row in rows[:3]]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {p.name for p in (data / "minilm").iterdir()}


@pytest.mark.parametrize("columns", [80, 120])
def test_the_report_shows_the_nearest_passages(data: Path, tmp_path: Path, columns: int) -> None:
    """Each question with the three passages of the largest cosine, within the width of the terminal."""
    import quickstart_text_report as report

    texts = pq.read_table(data / "passages.parquet").to_pylist()
    rows = np.random.default_rng(0).normal(size=(len(texts), 8)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[-6] = rows[41]  # the first question is one of the passages
    table = pa.table({"id": [text["id"] for text in texts], "embedding": [list(map(float, row)) for row in rows]})
    pq.write_table(table.slice(0, 300), tmp_path / "part-0.parquet")
    pq.write_table(table.slice(300), tmp_path / "part-1.parquet")
    lines = report.lines(texts, report.embeddings(tmp_path), columns)
    assert max(map(len, lines)) <= columns
    assert len(lines) == 6 * (2 + 3 * 2)
    assert lines[1] == texts[-6]["text"]
    assert lines[2].split()[:2] == ["1.00", texts[41]["package"]]
    assert lines[3].strip() == texts[41]["id"][-len(lines[3].strip()) :]
