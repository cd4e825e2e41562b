"""Blocks of rows: made ahead, handed out in order, and let go when nobody needs them any more."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.data import Wanted, arrays, blocks, csv_cuts, csv_file, open_reader, parquet, rows, table
from nimble_jobs.data.blocks import Block, Kept, Layout, Window, join_layouts
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import FieldsSpec, InputSpec


def layout_of(rows: list[int], chains: list[int] | None = None) -> Layout:
    numbers = np.arange(len(rows)) if chains is None else np.array(chains)
    return Layout(starts=np.cumsum([0, *rows]), chains=numbers, block_bytes=100)


def block_of(number: int, nbytes: int = 100) -> Block:
    return Block(values=np.array([number]), place=np.zeros(1, np.int64), bad={}, nbytes=nbytes)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_window_gives_every_block_and_keeps_few(data: st.DataObject) -> None:
    """Whatever the sizes of blocks and batches, each block is made once, and only those ahead and in use are held."""
    rows = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=30))
    layout, total = layout_of(rows), sum(rows)
    start = data.draw(st.integers(0, total - 1))
    size = data.draw(st.integers(1, total))
    made: list[int] = []

    def make(number: int) -> Block:
        made.append(number)
        return block_of(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "AHEAD_BYTES", 300)
        window = Window(make, layout, total, threads=2)
    under_way: list[tuple[int, int]] = []

    def finish() -> None:
        first = under_way.pop(0)
        for number in range(layout.of_row(first[0]), layout.of_row(first[1] - 1) + 1):
            assert window(number).values.tolist() == [number]
        window.done(*first)

    for a in range(start, total, size):
        b = min(a + size, total)
        window.want(a, b)
        under_way.append((a, b))
        wanted = layout.of_row(b - 1) - layout.of_row(under_way[0][0]) + 1
        assert window.held <= wanted + 3
        if len(under_way) == 2:
            finish()
    while under_way:
        finish()
    window.close()
    assert window.held == 0
    assert sorted(made) == sorted(set(made))
    assert set(made) == set(range(layout.of_row(start), len(rows)))


def test_blocks_of_a_chain_are_made_one_after_the_other() -> None:
    """What is read from top to bottom is never asked for a later block first, however many threads there are."""
    order: list[int] = []
    slow = threading.Event()

    def make(number: int) -> Block:
        if number == 0:
            slow.wait(0.05)
        order.append(number)
        return block_of(number)

    window = Window(make, layout_of([1] * 6, [0] * 6), 6, threads=4)
    window.want(0, 1)
    window.want(1, 6)
    assert window(5).values.tolist() == [5]
    window.close()
    assert order == list(range(6))


def test_threads_are_few_where_making_a_block_takes_much() -> None:
    """What all threads take while they decode is bounded, too."""
    lock, at_once, most = threading.Lock(), 0, 0

    def make(number: int) -> Block:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        threading.Event().wait(0.01)
        with lock:
            at_once -= 1
        return block_of(number)

    for making, wanted in ((blocks.MAKING_BYTES, 1), (blocks.MAKING_BYTES // 2, 2)):
        most = 0
        layout = dataclasses.replace(layout_of([1] * 8), making_bytes=making)
        window = Window(make, layout, 8, threads=4)
        window.want(0, 8)
        window(7)
        window.close()
        assert most <= wanted


def test_lists_in_a_column_with_a_dot_in_its_name_count_too(tmp_path: Path) -> None:
    """What a block takes is known for every name that a column may have."""
    x = pa.array([[1, 2, 3]] * 10, pa.list_(pa.int16()))
    pq.write_table(pa.table({"a.b": x, "c": x}), tmp_path / "d.parquet")
    metadata = pq.read_metadata(tmp_path / "d.parquet")
    assert [parquet._decoded_bytes(metadata.row_group(0), {name: 2})[0] for name in ("a.b", "c")] == [60, 60]


def test_what_making_a_block_raised_is_raised_where_it_is_asked_for() -> None:
    """A file that changed is an error for whoever needs its rows, and the blocks behind it are not waited for."""

    def make(number: int) -> Block:
        if number == 1:
            raise DataError("x: changed while it was read")
        return block_of(number)

    window = Window(make, layout_of([1, 1, 1], [0, 0, 0]), 3, threads=2)
    window.want(0, 3)
    assert window(0).values.tolist() == [0]
    with pytest.raises(DataError, match="changed"):
        window(1)
    assert window(2).values.tolist() == [2]
    window.close()


def test_kept_blocks_stay_within_their_bytes() -> None:
    """The block that was not used for longest goes first; one stays, however large it is."""
    made: list[int] = []

    def make(number: int) -> Block:
        made.append(number)
        return block_of(number, nbytes=1000 if number == 9 else 100)

    kept = Kept(make, lambda: 250)
    for number in (0, 1, 0, 2, 0, 1, 9, 9, 0):
        assert kept(number).values.tolist() == [number]
    assert made == [0, 1, 2, 1, 9, 0]


def test_layouts_of_several_files_follow_each_other() -> None:
    """Rows and blocks go on counting; chains of one file are not those of another."""
    joined = join_layouts([layout_of([2, 3], [0, 0]), layout_of([4]), layout_of([1, 1], [0, 1])])
    assert joined.starts.tolist() == [0, 2, 5, 9, 10, 11]
    assert joined.chains.tolist() == [0, 0, 1, 2, 3]
    assert [joined.of_row(row) for row in (0, 1, 2, 8, 9, 10)] == [0, 0, 1, 2, 3, 4]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_row_groups_of_any_size_give_the_same_records(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tiny row groups are read together and large ones in pieces; start, order and batch size change nothing."""
    folder = tmp_path_factory.mktemp("p")
    kind = data.draw(st.sampled_from([pa.list_(pa.int32()), pa.list_(pa.int32(), 3)]))
    held: list[list[int] | None] = []
    for name in range(data.draw(st.integers(1, 2))):
        count = data.draw(st.integers(1, 40))
        holes = data.draw(st.sets(st.integers(1, 40), max_size=3))  # never the first, which shows the shape
        part = [None if i in holes else [len(held) + i, i, -i] for i in range(count)]
        table = pa.table({"x": pa.array(part, kind)})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=data.draw(st.integers(1, 50)))
        held += part
    n = len(held)
    order = data.draw(st.none() | st.permutations(range(n)))
    start, size = data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, n + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "BLOCK_BYTES", data.draw(st.sampled_from([1, 40, 200, 1 << 20])))
        patch.setattr(blocks, "AHEAD_BYTES", data.draw(st.sampled_from([1, 1 << 20])))
        with (
            open_reader(InputSpec(source=str(folder), format="parquet")) as reader,
            Buffers(2, size * 24) as buffers,
        ):
            rows, bad = [], []
            batches = reader.batches(
                start, batch_size=size, order=None if order is None else np.array(order), buffers=buffers
            )
            for batch in batches:
                rows += batch.x.tolist()
                bad += [b.index for b in batch.bad]
                assert batch.buffer is not None
                batch.buffer.release()
    seen = list(range(n) if order is None else order)[start:]
    assert rows == [held[i] for i in seen if held[i] is not None]
    assert bad == [i for i in seen if held[i] is None]


@pytest.mark.parametrize("kind", ["parquet", "one group", "csv", "npy"])
def test_a_reader_keeps_few_blocks_alive(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the input is, the blocks that exist at once are those ahead and those of the batches under way."""
    for module, name in ((parquet, "BLOCK_BYTES"), (csv_file, "WHOLE_BYTES"), (arrays, "LEAVE_FROM_BYTES")):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(csv_cuts, "CUT_BYTES", 64)
    monkeypatch.setattr(rows, "FORTRAN_BYTES", 64)
    monkeypatch.setattr(blocks, "AHEAD_BYTES", 1)
    alive, most, made = set[int](), 0, 0
    lock = threading.Lock()

    def counted(make: Any) -> Any:
        def block(source: Any, number: int) -> Block:
            nonlocal most, made
            found: Block = make(source, number)
            with lock:
                mine = made = made + 1
                alive.add(mine)
                most = max(most, len(alive))
            weakref.finalize(found, alive.discard, mine)
            return found

        return block

    for source in (table.TableSource, arrays.ArraySource):
        monkeypatch.setattr(source, "block", counted(source.block))
    x = np.arange(8000.0).reshape(1000, 8)
    if kind == "npy":
        np.save(tmp_path / "d.npy", np.asfortranarray(x))
    elif kind == "csv":
        (tmp_path / "d.csv").write_text("x\n" + "".join(f"{i}\n" for i in range(5000)))
    else:
        column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 8)
        pq.write_table(pa.table({"x": column}), tmp_path / "d.parquet", row_group_size=1000 if kind[0] == "o" else 5)
    (path,) = tmp_path.iterdir()
    with open_reader(InputSpec(source=str(path), format=path.suffix[1:])) as reader:  # type: ignore[arg-type]
        assert sum(len(b) for b in reader.batches(batch_size=4)) == reader.total
        assert reader.signature.dtype
    assert made >= 190
    assert most <= 40  # ten batches under way, of a few blocks each


def test_tensors_keep_their_shape(tmp_path: Path) -> None:
    """Columns of the tensor type hold records of its shape, and its permutation is applied."""
    x = np.arange(5 * 2 * 3 * 4, dtype=np.uint8).reshape(5, 2, 3, 4)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 24)
    for permutation, wanted in ((None, x), ([1, 2, 0], x.transpose(0, 2, 3, 1))):
        kind = pa.fixed_shape_tensor(pa.uint8(), (2, 3, 4), permutation=permutation)
        column = pa.ExtensionArray.from_storage(kind, flat)
        pq.write_table(pa.table({"x": column}), tmp_path / "d.parquet", row_group_size=2)
        with open_reader(InputSpec(source=str(tmp_path / "d.parquet"), format="parquet")) as reader:
            assert reader.preprocess is not None
            assert reader.preprocess.shape == wanted.shape[1:]
            (batch,) = reader.batches(batch_size=5, wanted=Wanted(stored=True))
            np.testing.assert_array_equal(batch.x, wanted)


def test_pictures_may_lie_in_structures(tmp_path: Path) -> None:
    """A column of {bytes, path} holds encoded images; one without bytes is a bad record."""
    from io import BytesIO

    from PIL import Image

    sink = BytesIO()
    Image.new("RGB", (4, 3), (255, 0, 0)).save(sink, "PNG")
    held = [{"bytes": sink.getvalue(), "path": "a"}, None, {"bytes": None, "path": "b"}]
    column = pa.array([*held, held[0]], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    pq.write_table(pa.table({"x": column, "n": ["p", "q", "r", "s"]}), tmp_path / "d.parquet", row_group_size=3)
    spec = InputSpec(source=str(tmp_path / "d.parquet"), format="parquet", fields=FieldsSpec(x="x", id="n"))
    with open_reader(spec) as reader:
        (batch,) = reader.batches(batch_size=8)
    assert batch.ids == ["p", "s"]
    assert batch.x.shape == (2, 3, 3, 4)
    assert [(b.id, b.reason) for b in batch.bad] == [
        (i, "column 'x' is empty; expected an encoded image") for i in ("q", "r")
    ]


@pytest.mark.parametrize("what", ["shrink", "remove"])
def test_a_table_that_goes_while_it_is_read_is_an_error(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is cut or removed between two blocks does not end the process."""
    monkeypatch.setattr(parquet, "BLOCK_BYTES", 1)
    monkeypatch.setattr(blocks, "AHEAD_BYTES", 1)
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"x": np.arange(3000.0)}), path, row_group_size=1000)
    with open_reader(InputSpec(source=str(path), format="parquet")) as reader:
        batches = reader.batches(batch_size=1)
        next(batches)
        if what == "shrink":
            path.write_bytes(path.read_bytes()[:100])
        else:
            path.unlink()
        with pytest.raises(DataError, match=r"d\.parquet: (changed|vanished) while it was read"):
            list(batches)
