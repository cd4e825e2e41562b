"""Columns of lists of different lengths, in memory and in every format."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from nimble_jobs.data.ragged import Ragged
from nimble_jobs.data.writers import encode, records
from nimble_jobs.errors import DataError


def ragged(lists: list[Any], shape: tuple[int, ...] = (), dtype: Any = np.float32) -> Ragged:
    flat = np.array([item for one in lists for item in one], dtype=dtype).reshape(-1, *shape)
    return Ragged(flat, np.array([len(one) for one in lists], dtype=np.int32))


LISTS = st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6)


@given(LISTS, st.data())
def test_records_are_taken_in_any_order(lists: list[list[int]], data: st.DataObject) -> None:
    """Also none, also empty ones, also twice."""
    column = ragged(lists, dtype=np.int64)
    assert [one.tolist() for one in column] == lists
    assert [column[i].tolist() for i in range(len(lists))] == lists
    order = data.draw(st.lists(st.integers(0, len(lists) - 1)))
    assert [one.tolist() for one in column.take(np.array(order, dtype=np.int64))] == [lists[i] for i in order]
    a, b = sorted((data.draw(st.integers(0, len(lists))), data.draw(st.integers(0, len(lists)))))
    assert [one.tolist() for one in column[a:b]] == lists[a:b]
    assert [one.tolist() for one in Ragged.joined([column[:a], column[a:]])] == lists


@given(
    stn.arrays(np.float32, (3, 4, 2), elements=st.floats(-9, 9, width=32)),
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_padding_is_cut_off(padded: np.ndarray, lengths: list[int]) -> None:
    """The first positions of each record, as a copy."""
    column = Ragged.trimmed(padded, np.array(lengths))
    before = [padded[i, :n].copy() for i, n in enumerate(lengths)]
    padded[:] = 77
    assert all(np.array_equal(a, b) for a, b in zip(column, before, strict=True))


@given(LISTS)
def test_parquet_and_jsonl_hold_lists(lists: list[list[int]]) -> None:
    """Numbers, pairs of numbers, and text."""
    columns = {
        "n": ragged(lists),
        "pair": ragged([[(i, -i) for i in one] for one in lists], (2,), np.int32),
        "word": ragged([[f"w{i}é" for i in one] for one in lists], dtype=np.str_),
        "id": [str(i) for i in range(len(lists))],
    }
    assert records(columns) == len(lists)
    expected = [
        {"n": one, "pair": [[i, -i] for i in one], "word": [f"w{i}é" for i in one], "id": str(row)}
        for row, one in enumerate(lists)
    ]
    assert pq.read_table(BytesIO(encode("parquet", columns)[".parquet"])).to_pylist() == expected
    lines = bytes(encode("jsonl", columns)[".jsonl"]).decode().splitlines()
    assert [json.loads(line) for line in lines] == expected


def test_what_formats_cannot_hold() -> None:
    """npy has no lists of different lengths; jsonl has no NaN; halves of characters become text."""
    with pytest.raises(DataError, match=r"output\.fields: n has as many values as a text has tokens, which npy cannot"):
        encode("npy", {"n": ragged([[1.0], []])})
    line = bytes(encode("jsonl", {"n": ragged([[1.0, np.nan], [np.inf]])})[".jsonl"])
    assert line == b'{"n":[1.0,null]}\n{"n":[null]}\n'
    column = Ragged(np.array(["a\udcff"], dtype=np.str_), np.array([1]))
    assert json.loads(bytes(encode("jsonl", {"w": column})[".jsonl"])) == {"w": ["a\\udcff"]}
