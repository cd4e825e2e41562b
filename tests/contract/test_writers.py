"""Every output format keeps the same promises: what was written is read back, equal columns give equal bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.data import BadRecord, open_reader
from nimble_jobs.data.hidden import discard_staging
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import FieldsSpec, InputSpec, OutputSpec
from tests.ledger import staged

FORMATS = ["parquet", "jsonl", "npy"]
formats = pytest.mark.parametrize("format_", FORMATS)


def output(path: Path, format_: str, **more: Any) -> OutputSpec:
    kind: Any = format_
    return OutputSpec(path=path, format=kind, **more)


def read_back(folder: Path) -> dict[str, list[Any]]:
    """All records of a published folder by field, floats as stored."""
    manifest = json.loads((folder / "manifest.json").read_text())
    columns: dict[str, list[Any]] = {}
    for entry in manifest["files"]:
        path = folder / entry["name"]
        data = path.read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            held = table.to_pydict()
            assert table.num_rows == entry["records"]
        elif path.name.startswith("part-") and path.suffix == ".jsonl":
            rows = [json.loads(line) for line in data.decode().splitlines()]
            assert len(rows) == entry["records"]
            held = {k: [r[k] for r in rows] for k in rows[0]}
        elif path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            assert len(array) == entry["records"]
            held = {path.name.split(".", 1)[1].removesuffix(".npy"): array.tolist()}
        else:
            continue
        for name, values in held.items():
            columns.setdefault(name, []).extend(values)
    return columns


def shard(start: int, n: int) -> dict[str, np.ndarray | list[str]]:
    rng = np.random.default_rng(start)
    return {
        "id": [f"é/{start + i}\n" for i in range(n)],
        "label": np.arange(start, start + n),
        "probability": rng.random(n).astype(np.float32),
        "top5": rng.integers(0, 9, size=(n, 5)),
        "features.0": rng.normal(size=(n, 2, 3)).astype(np.float32),
        "half": rng.normal(size=n).astype(np.float16),
        "flag": rng.random(n) > 0.5,
    }


@formats
@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_what_was_written_is_read_back(
    format_: str, sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the sizes of the shards, empty ones included, the published records are those written, in order."""
    folder = tmp_path_factory.mktemp("d")
    staging = staged(output(folder / "out", format_), "job", 1)
    expected: dict[str, list[Any]] = {}
    start = 0
    for index, n in enumerate(sizes):
        columns = shard(start, n)
        staging.write_shard(index, columns)
        if n:
            for name, values in columns.items():
                expected.setdefault(name, []).extend(values if isinstance(values, list) else values.tolist())
        start += n
    outputs = staging.publish({"by": "test"}, shards=len(sizes))
    assert read_back(folder / "out") == expected
    assert (outputs["records"], outputs["bad"], outputs["path"]) == (start, 0, str(folder / "out"))
    assert sorted(outputs["files"]) == sorted(p.name for p in (folder / "out").iterdir())
    assert [p.name for p in folder.iterdir()] == ["out"]


@formats
def test_equal_columns_give_equal_bytes(format_: str, tmp_path: Path) -> None:
    """Two runs of the same job leave the same files, except for the manifest."""
    contents = []
    for i in range(2):
        staging = staged(output(tmp_path / str(i), format_), f"job{i}", 1 + i)
        staging.write_shard(0, shard(0, 7), [BadRecord(index=3, id="x", reason="y")])
        staging.publish({})
        contents.append({p.name: p.read_bytes() for p in (tmp_path / str(i)).iterdir() if p.name != "manifest.json"})
    assert contents[0] == contents[1]


@formats
def test_bad_records_are_published_in_input_order(format_: str, tmp_path: Path) -> None:
    """errors.jsonl holds index, id and reason of each; a shard of bad records only has no part file."""
    staging = staged(output(tmp_path / "out", format_), "job", 1)
    staging.write_shard(
        1, {}, [BadRecord(index=3, id="d", reason="broken\nhere"), BadRecord(index=2, id="ç", reason="r")]
    )
    staging.write_shard(0, shard(0, 1), [BadRecord(index=1, id="b", reason="r")])
    assert (len(staging.done[1].bad), staging.records) == (2, 1)
    outputs = staging.publish({})
    lines = (tmp_path / "out" / "errors.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"index": 1, "id": "b", "reason": "r"},
        {"index": 2, "id": "ç", "reason": "r"},
        {"index": 3, "id": "d", "reason": "broken\nhere"},
    ]
    assert (outputs["records"], outputs["bad"]) == (1, 3)
    assert not list((tmp_path / "out").glob("part-00001*"))


@formats
def test_columns_of_different_lengths_are_refused(format_: str, tmp_path: Path) -> None:
    """A column that lost a record cannot be published."""
    staging = staged(output(tmp_path / "out", format_), "job", 1)
    with pytest.raises(DataError, match=r"differ in length: \{'id': 2, 'x': 3\}"):
        staging.write_shard(0, {"id": ["a", "b"], "x": np.ones(3)})
    staging.discard()


def test_numbers_that_json_has_no_word_for_are_null(tmp_path: Path) -> None:
    """NaN and infinities become null in jsonl, so that every JSON reader takes the file."""
    staging = staged(output(tmp_path / "out", "jsonl"), "job", 1)
    staging.write_shard(0, {"x": np.array([[1.5, np.nan], [np.inf, 2.0]], np.float32)})
    staging.publish({})
    assert (tmp_path / "out" / "part-00000.jsonl").read_text() == '{"x":[1.5,null]}\n{"x":[null,2.0]}\n'


def test_a_field_that_is_no_file_name_is_refused_for_npy(tmp_path: Path) -> None:
    """A model's output name cannot write outside the output folder."""
    staging = staged(output(tmp_path / "out", "npy"), "job", 1)
    for name in ("../x", "a/b", "", ".x"):
        with pytest.raises(DataError, match="cannot be in a file name"):
            staging.write_shard(0, {name: np.ones(2)})
    staging.discard()
    assert not list(tmp_path.iterdir())


def test_published_output_is_an_input_for_the_next_job(tmp_path: Path) -> None:
    """A folder of Parquet shards can be read as it is, the ids included."""
    staging = staged(output(tmp_path / "out", "parquet"), "job", 1)
    x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    for i, part in enumerate((slice(0, 4), slice(4, 7))):
        staging.write_shard(i, {"id": [f"r{j}" for j in range(7)[part]], "embedding": x[part]})
    staging.publish({})
    spec = InputSpec(source=str(tmp_path / "out"), format="parquet", fields=FieldsSpec(x="embedding", id="id"))
    with open_reader(spec) as reader:
        batch = reader.take(np.arange(7))
    np.testing.assert_array_equal(batch.x, x)
    assert batch.ids == [f"r{j}" for j in range(7)]


def test_a_job_that_ended_badly_leaves_nothing_beside_its_output(tmp_path: Path) -> None:
    """Discarding removes what every attempt staged, and nothing else; doing it again does no harm."""
    wanted = output(tmp_path / "out", "jsonl")
    other = staged(wanted, "other", 1)
    for attempt in (1, 2):
        staged(wanted, "job", attempt).write_shard(attempt, shard(0, 3))
    for _ in range(2):
        discard_staging(wanted.path, "job")
    assert [p.name for p in tmp_path.iterdir()] == [".out.other"]
    other.write_shard(0, shard(0, 3))
    other.publish({})
    discard_staging(wanted.path, "other")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
