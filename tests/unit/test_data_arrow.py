"""Arrow's arrays of columns."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nimble_jobs.data import arrow
from nimble_jobs.data.writers import encode

_WRITE_ALL_KINDS = """
import sys
import numpy as np
from nimble_jobs.data.ragged import Ragged
from nimble_jobs.data.writers import encode

columns = {
    "id": ["a", "b\\u00e9"],
    "top1": np.arange(2),
    "top5": np.zeros((2, 5), np.int64),
    "logits": np.zeros((2, 3), np.float16),
    "flag": np.array([True, False]),
    "token_labels": Ragged(np.array(["x", "y", "z"]), np.array([1, 2])),
}
encode("parquet", columns)
print([name for name in ("pandas", "numpy.ma") if name in sys.modules])
"""

_READ_TEXTS = """
import sys
from nimble_jobs.data import open_reader
from nimble_jobs.spec.model import FieldsSpec, InputSpec

reader = open_reader(InputSpec(source=sys.argv[1], format="text", fields=FieldsSpec(x="body", id="id")))
(texts,) = reader.texts([(0, 2)])
assert (list(texts.values), reader.id(1)) == (["one", "two"], "b"), texts
print("pandas" in sys.modules)
"""


def test_reading_texts_from_parquet_imports_no_pandas(tmp_path: Path) -> None:
    """Neither texts nor ids need pandas, which takes almost a second of a short job."""
    pq.write_table(pa.table({"id": ["a", "b"], "body": ["one", "two"]}), tmp_path / "texts.parquet")
    assert said_with_pandas(tmp_path, _READ_TEXTS, str(tmp_path / "texts.parquet")) == "False"


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_the_first_empty_text_is_found(kind: pa.DataType) -> None:
    """A null counts as empty."""
    for values, expected in (([], None), (["a", "b"], None), (["a", ""], 1), (["a", None, ""], 1), ([None], 0)):
        assert next(iter(arrow.empties(pa.array(values, type=kind))), None) == expected


def test_writing_parquet_imports_no_pandas(tmp_path: Path) -> None:
    """A shard is written without pandas, even if it is installed: its import would hold up a running job."""
    assert said_with_pandas(tmp_path, _WRITE_ALL_KINDS) == "[]"


def said_with_pandas(tmp_path: Path, code: str, *args: str) -> str:
    """What a process prints that could import pandas."""
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").write_text("__version__ = '3.0.0'\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "int32", "int64", "float32", "float64", ">i4"])
@pytest.mark.parametrize("shape", [(0,), (1,), (13,), (13, 3), (13, 2, 5)])
def test_numbers_are_those_of_pyarrow(dtype: str, shape: tuple[int, ...]) -> None:
    """Numbers of every type and shape equal what `pyarrow.array` makes of their lists."""
    values = (np.random.default_rng(0).random(shape) * 100 - 30).astype(dtype)
    if dtype == "bool":
        values = np.random.default_rng(0).random(shape) < 0.5
    made = arrow.numbers(values)
    made.validate(full=True)
    assert made.to_pylist() == values.tolist()
    if values.ndim == 1:
        assert made.type == pa.from_numpy_dtype(values.dtype.newbyteorder("="))


def test_views_and_halves_are_written_as_they_read() -> None:
    """A column may be a view with any strides; float16 becomes float32."""
    values = np.arange(24, dtype=np.float64).reshape(4, 6)[::-1, ::2]
    assert arrow.numbers(values).to_pylist() == values.tolist()
    halves = arrow.numbers(np.array([0.5, 2.0], dtype=np.float16))
    assert halves.type == pa.float32()
    assert halves.to_pylist() == [0.5, 2.0]


@pytest.mark.parametrize("values", [[], [""], ["a", "", "bc"], ["é", "", "日本", "a"], ["\x00", "a\nb"]])
def test_texts_are_those_of_pyarrow(values: list[str]) -> None:
    """Text of any length and alphabet comes back, also empty text and no text at all."""
    made = arrow.texts(values)
    made.validate(full=True)
    assert made.equals(pa.array(values, type=pa.string()))


def test_texts_beyond_the_reach_of_offsets_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that takes more bytes than the offsets of one array reach is still written."""
    monkeypatch.setattr(arrow, "_MOST_BYTES", 3)
    [data] = encode("parquet", {"id": ["ab", "cd"]}).values()
    assert pq.read_table(io.BytesIO(data)).column("id").to_pylist() == ["ab", "cd"]
