"""Rows read straight from a file: any rows in any order, and files that are not what they were."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.data import rows, stamps
from nimble_jobs.data.rows import FileRows
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.errors import DataError
from nimble_jobs.regular import open_regular


def stored(path: Path, x: np.ndarray, before: int) -> FileRows:
    path.write_bytes(bytes(before) + x.tobytes())
    return FileRows(stamp=Stamp.of(path), offset=before, dtype=x.dtype, total=len(x), shape=x.shape[1:])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rows_in_any_order(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs, gaps, repetitions and more rows than one call can fill give what indexing gives."""
    total = data.draw(st.integers(1, 60))
    width = data.draw(st.sampled_from([1, 3, 4096]))
    x = np.arange(total * width, dtype=np.int32).reshape(total, width)
    file = stored(tmp_path_factory.mktemp("r") / "x", x, data.draw(st.integers(0, 9)))
    indexes = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=40)), dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_VECTOR", data.draw(st.integers(1, 5)))
        patch.setattr(rows, "_GAP_BYTES", data.draw(st.sampled_from([0, 20, 1 << 14])))
        patch.setattr(rows, "_SPAN_BYTES", data.draw(st.sampled_from([1, 50, 1 << 20])))
        out = np.full((len(indexes), width), -1, dtype=np.int32)
        file.read(indexes, out)
    np.testing.assert_array_equal(out, x[indexes])


def test_reads_that_stop_half_way_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may give fewer bytes than were asked for, in the middle of a row too."""
    x = np.arange(70, dtype=np.int16).reshape(10, 7)
    file = stored(tmp_path / "x", x, 3)

    def little(descriptor: int, views: list[memoryview], at: int) -> int:
        data = os.pread(descriptor, 5, at)
        views[0][: len(data)] = data[: views[0].nbytes]
        return min(len(data), views[0].nbytes)

    monkeypatch.setattr(rows.os, "preadv", little)
    for order in ([2, 3, 4], [5, 4, 3], [9, 0, 9, 2]):
        out = np.empty((len(order), 7), dtype=np.int16)
        file.read(np.array(order), out)
        np.testing.assert_array_equal(out, x[order])


@pytest.mark.parametrize("what", ["shrink", "grow", "replace", "remove", "pipe"])
def test_a_file_that_is_another_is_an_error(what: str, tmp_path: Path) -> None:
    """It is never read as if nothing had happened, and never ends the process."""
    x = np.arange(1000, dtype=np.int64).reshape(10, 100)
    path = tmp_path / "x"
    file = stored(path, x, 0)
    expected = "x: changed while it was read"
    if what == "shrink":
        os.truncate(path, 4000)
    elif what == "grow":
        os.truncate(path, 9000)
    elif what == "replace":
        (tmp_path / "y").write_bytes(path.read_bytes())
        (tmp_path / "y").rename(path)
    else:
        path.unlink()
        expected = "x: vanished while it was read"
        if what == "pipe":
            os.mkfifo(path)
    with pytest.raises(DataError, match=expected):
        file.read(np.arange(10), np.empty_like(x))


def test_a_reading_thread_keeps_its_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that called `keep_open` opens each file once in a row, and its end closes the last one."""
    x = np.arange(20, dtype=np.int64).reshape(10, 2)
    one, other = (stored(tmp_path / name, x, 0) for name in "ab")
    opened: list[str] = []
    closed: list[int] = []
    close = os.close

    def noted(path: str | Path) -> BufferedReader:
        opened.append(Path(path).name)
        return open_regular(path)

    def closing(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(stamps, "open_regular", noted)
    monkeypatch.setattr(os, "close", closing)

    def read(file: FileRows) -> np.ndarray:
        out = np.empty((2, 2), dtype=np.int64)
        file.read(np.array([3, 4]), out)
        return out

    with ThreadPoolExecutor(1, initializer=rows.keep_open) as pool:
        for file in (one, one, one, other, other, one):
            np.testing.assert_array_equal(pool.submit(read, file).result(), x[3:5])
        assert opened == ["a", "b", "a"]
        assert len(closed) == 2
        os.truncate(tmp_path / "a", 100)
        with pytest.raises(DataError, match="a: changed while it was read"):
            pool.submit(read, one).result()
    assert len(closed) == 3


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that ends too early says the same as a look at the file's size."""
    x = np.arange(1000, dtype=np.int64).reshape(10, 100)
    file = stored(tmp_path / "x", x, 0)
    preadv = os.preadv

    def shrunk(descriptor: int, views: list[memoryview], at: int) -> int:
        os.truncate(tmp_path / "x", 4000)
        return preadv(descriptor, views, at)

    monkeypatch.setattr(rows.os, "preadv", shrunk)
    with pytest.raises(DataError, match="x: changed while it was read"):
        file.read(np.arange(10), np.empty_like(x))
