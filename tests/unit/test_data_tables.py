"""Parquet and CSV: which columns make a record, and rows that are no records."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from nimble_jobs.data import Batch, blocks, columns, csv_cells, csv_cuts, csv_file, memory, open_reader
from nimble_jobs.data import parquet as parquet_files
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.transform import TransformSpec

UUIDS = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16), bytes(range(16))], pa.binary(16)))


def read(path: Path, x: str = "x", *, id: str | None = None, label: str | None = None, **more: Any) -> Batch:  # noqa: A002
    kind: Any = path.suffix[1:] or "csv"
    with open_reader(InputSpec(source=str(path), format=kind, fields=FieldsSpec(x=x, id=id, label=label), **more)) as r:
        return r.take(np.arange(r.total))


def csv(folder: Path, text: str) -> Path:
    path = folder / "d.csv"
    path.write_text(text, encoding="utf-8")
    return path


def parquet(folder: Path, rows: int = 2, **held: Any) -> Path:
    pq.write_table(pa.table(held), folder / "d.parquet", row_group_size=rows)
    return folder / "d.parquet"


def test_columns_are_chosen_by_name_list_and_wildcard() -> None:
    """An exact name wins; lists keep their order; wildcards follow the file's; nothing is taken twice."""
    known = ["b", "p_2", "p_10", "a", "x,y"]
    assert columns.choose(Path("f"), "x,y", known) == ["x,y"]
    assert columns.choose(Path("f"), "a, p_*, p_2", known) == ["a", "p_2", "p_10"]
    with pytest.raises(DataError, match=r"f: input\.fields\.x: no 'q\*'; expected one of: b, p_2, p_10"):
        columns.choose(Path("f"), "a,q*", known)


def test_lists_of_another_shape_are_bad_records(tmp_path: Path) -> None:
    """Short, long, missing and incomplete lists are bad with a reason, at any depth, and the rest keep their places."""
    good = [[1.0, 2.0], [3.0, 4.0]]
    rows = [
        None,
        good,
        [[1.0, 2.0]],
        good,
        [[1.0], [2.0, 3.0]],
        [None, [1.0, 2.0]],
        [],
        good,
        [[1.0, None], [1.0, 1.0]],
    ]
    batch = read(parquet(tmp_path, x=pa.array(rows)))
    assert batch.indexes.tolist() == [1, 3, 7]
    np.testing.assert_array_equal(batch.x, np.array([good] * 3, np.float32))
    reasons = {b.index: b.reason for b in batch.bad}
    assert sorted(reasons) == [0, 2, 4, 5, 6, 8]
    assert reasons[0] == "column 'x' is null; expected shape (2, 2)"
    assert reasons[2] == "column 'x' holds 1 value on axis 0; expected shape (2, 2)"
    assert reasons[4] == "column 'x' holds 1 value on axis 1; expected shape (2, 2)"
    assert "NaN or infinite" in reasons[8]


def test_empty_places_among_whole_numbers_are_bad_records(tmp_path: Path) -> None:
    """Whole numbers cannot be missing: neither in a column nor in a list."""
    batch = read(parquet(tmp_path, x=pa.array([[1, 2], [3, None], [5, 6], None])))
    assert batch.x.dtype == np.int64
    assert batch.x.tolist() == [[1, 2], [5, 6]]
    assert [b.reason[:27] for b in batch.bad] == ["column 'x' has nulls; expec", "column 'x' is null; expecte"]
    batch = read(parquet(tmp_path, a=pa.array([1, None, 3]), b=[True, False, True]), "a,b")
    assert batch.x.tolist() == [[1, 1], [3, 1]]
    assert batch.bad[0].reason == "column 'a' is empty; expected a number"


def test_one_plain_column_is_a_vector_of_one(tmp_path: Path) -> None:
    """A column of numbers makes records of shape (1,)."""
    assert read(parquet(tmp_path, x=[1.5, 2.5])).x.tolist() == [[1.5], [2.5]]


def test_a_column_of_text_is_no_record(tmp_path: Path) -> None:
    """Text where numbers are expected is an error that names the column."""
    with pytest.raises(
        DataError, match=r"d\.parquet: input\.fields\.x: 'a,b': column 'b': holds string; expected numbers"
    ):
        read(parquet(tmp_path, a=[1.0], b=["x"]), "a,b")
    with pytest.raises(DataError, match="every record is empty"):
        read(parquet(tmp_path, x=pa.array([None, None], pa.list_(pa.float32()))))


@pytest.mark.parametrize("block_bytes", [8, blocks.BLOCK_BYTES])
@pytest.mark.parametrize(
    "kind",
    [
        pa.list_view(pa.list_view(pa.int16())),
        pa.large_list_view(pa.list_(pa.int16())),
        pa.list_(pa.list_view(pa.int16())),
        pa.large_list(pa.large_list_view(pa.int16())),
    ],
)
def test_views_of_lists_are_lists(
    kind: pa.DataType, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any depth, read whole and in pieces, with the same bad records."""
    monkeypatch.setattr(parquet_files, "BLOCK_BYTES", block_bytes)
    rows = [[[i, i + 1], [i + 2, i + 3]] for i in range(40)]
    held = [*rows[:2], None, *rows[2:20], [[1, 2]], *rows[20:]]
    batch = read(parquet(tmp_path, rows=30, x=pa.array(held, kind)))
    assert batch.x.tolist() == rows
    assert [(bad.index, bad.reason) for bad in batch.bad] == [
        (2, "column 'x' is null; expected shape (2, 2)"),
        (21, "column 'x' holds 1 value on axis 0; expected shape (2, 2)"),
    ]


def test_views_of_lists_may_begin_anywhere() -> None:
    """In order or not, cut, and empty: the lists are valid for Arrow."""
    values = pa.array(range(6), pa.int16())
    view = pa.ListViewArray.from_arrays(pa.array([4, 0, 2], pa.int32()), pa.array([2, 2, 0], pa.int32()), values)
    for column, rows in (
        (pa.chunked_array([view]), [[4, 5], [0, 1], []]),
        (pa.chunked_array([view[1:], view[:1]]), [[0, 1], [], [4, 5]]),
        (pa.chunked_array([pa.array([[1], None, [2, 3]], pa.list_view(pa.int16()))[1:]]), [None, [2, 3]]),
        (pa.chunked_array([], pa.list_view(pa.int16())), []),
    ):
        found = columns.joined(column)
        found.validate(full=True)
        assert found.to_pylist() == rows
        assert pa.types.is_large_list(found.type)


def test_encoded_images_that_are_broken_or_missing_are_bad(tmp_path: Path) -> None:
    """Binary columns are decoded as images; what is none is a bad record."""
    sink = BytesIO()
    Image.new("RGB", (4, 3), (255, 0, 0)).save(sink, "PNG")
    batch = read(parquet(tmp_path, x=pa.array([b"junk", sink.getvalue(), None, sink.getvalue()[:40]], pa.binary())))
    assert batch.x.shape == (1, 3, 3, 4)
    assert batch.indexes.tolist() == [1]
    assert [b.index for b in batch.bad] == [0, 2, 3]
    with pytest.raises(DataError, match="no record can be decoded"):
        read(parquet(tmp_path, x=pa.array([b"junk"], pa.binary())))


def picture(colour: int) -> bytes:
    sink = BytesIO()
    Image.new("RGB", (40, 30), (colour, 0, 0)).save(sink, "PNG")
    return sink.getvalue()


@pytest.mark.parametrize("block_bytes", [2000, blocks.BLOCK_BYTES])
@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.struct([("bytes", pa.binary_view()), ("path", pa.string())]),
        pa.dictionary(pa.int32(), pa.binary()),
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    ],
)
def test_equal_pictures_are_in_memory_once(
    kind: pa.DataType, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file may name a picture in a million rows. They are read as any others, whatever column holds them."""
    monkeypatch.setattr(parquet_files, "BLOCK_BYTES", block_bytes)
    different = [picture(50 * i) for i in range(5)]
    rows: list[bytes | None] = [different[i % 5] for i in range(4000)]
    rows[3], rows[8] = None, b""
    held: list[Any] = [{"bytes": row, "path": "p"} for row in rows] if pa.types.is_struct(kind) else rows
    path = tmp_path / "d.parquet"
    with pq.ParquetWriter(path, pa.schema([("x", kind)])) as file:  # Arrow writes no slices of views
        for first in range(0, 4000, 1000):
            file.write_table(pa.table({"x": pa.array(held[first : first + 1000], kind)}))
    with open_reader(InputSpec(source=str(path), format="parquet")) as reader:
        source = reader._source
        assert source.layout is not None
        sizes = [source.block(number).nbytes for number in range(source.layout.count)]
        batches = list(reader.batches(batch_size=64))
    assert sum(sizes) < 4000 * len(different[0]) / 4
    assert [bad.index for batch in batches for bad in batch.bad] == [3, 8]
    red = np.concatenate([batch.x[:, 0, 0, 0] for batch in batches])
    expected = [50 * (i % 5) / 255 for i in range(4000) if i not in (3, 8)]
    np.testing.assert_allclose(red, expected, rtol=1e-6)


def test_row_groups_are_let_go_beyond_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random order gives the right rows also when only one row group may stay in memory."""
    monkeypatch.setattr(blocks, "KEEP_BYTES", 1)
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    path = parquet(tmp_path, rows=3, x=pa.array(np.arange(20, dtype=np.float32)))
    order = np.random.default_rng(0).permutation(20)
    with open_reader(InputSpec(source=str(path), format="parquet")) as reader:
        got = np.concatenate([b.x for b in reader.batches(batch_size=4, order=order)])
    assert got[:, 0].tolist() == order.tolist()


def test_cells_that_are_no_numbers_are_bad_records(tmp_path: Path) -> None:
    """A word, an empty cell or a NaN makes its own record bad; the numbers around it are read as numbers."""
    batch = read(csv(tmp_path, "id,a,b\nu,1.5,2\nv,oops,3\nw,,4\nx,nan,5\ny,6.5,7\n"), "a,b", id="id")
    assert batch.ids == ["u", "y"]
    assert batch.x.tolist() == [[1.5, 2.0], [6.5, 7.0]]
    assert [(b.id, b.reason.removeprefix(str(tmp_path))) for b in batch.bad] == [
        ("v", "/d.csv:3: column 'a' holds 'oops'; expected a number"),
        ("w", "/d.csv:4: column 'a' is empty; expected a number"),
        ("x", "/d.csv:5: 1 of 2 values are NaN or infinite; expected finite numbers"),
    ]


def test_a_word_far_below_the_first_block_is_one_bad_record(tmp_path: Path) -> None:
    """What a column holds is not guessed from its beginning alone."""
    lines = [f"{i},{i}" for i in range(200_000)]
    lines[150_000] = "150000,oops"
    batch = read(csv(tmp_path, "id,x\n" + "\n".join(lines) + "\n"), id="id")
    assert len(batch) == 199_999
    assert batch.x.dtype == np.int64
    assert [(b.index, b.id) for b in batch.bad] == [(150_000, "150000")]


def test_lines_of_another_length_are_bad_and_shift_nothing(tmp_path: Path) -> None:
    """A line with too few or too many cells keeps its place in the count; blank lines are no records."""
    text = "id,x,label\na,1,0\nb\n\nc,3,1,9\n\nd,4,2\n"
    batch = read(csv(tmp_path, text), id="id", label="label")
    assert batch.indexes.tolist() == [0, 3]
    assert batch.ids == ["a", "d"]
    assert batch.x.tolist() == [[1], [4]]
    assert batch.labels is not None
    assert batch.labels.tolist() == [0, 2]
    assert [(b.index, b.reason) for b in batch.bad] == [
        (1, f"{tmp_path / 'd.csv'}:3: line has 1 cell; expected 3"),
        (2, f"{tmp_path / 'd.csv'}:5: line has 4 cells; expected 3"),
    ]


def test_csv_errors_name_the_line_of_the_file(tmp_path: Path) -> None:
    """Cells that hold line breaks, blank lines and files before this one shift no line number."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.csv").write_text("id,x\na,1\n")
    (tmp_path / "parts" / "b.csv").write_text('id,x\n"b\nb",2\n\nc,oops\n')
    batch = read(tmp_path / "parts", id="id")
    assert [b.reason for b in batch.bad] == [f"{tmp_path}/parts/b.csv:5: column 'x' holds 'oops'; expected a number"]
    twice = csv(tmp_path, "id,x\na,1\n\na,2\n")
    with pytest.raises(DataError, match=r"id 'a' at records 0 and 1 \(.*d\.csv:2 and .*d\.csv:4\)"):
        read(twice, id="id")
    with pytest.raises(DataError, match=r"no id at .*d\.csv:3"):
        read(csv(tmp_path, "id,x\na,1\n,2\n"), id="id")


def test_whole_numbers_stay_whole_unless_scaled(tmp_path: Path) -> None:
    """Token ids stay int64; `scale: 1` asks for float32; ids keep their leading zeros."""
    path = csv(tmp_path, 'id,t0,t1\n007,1,2\n"a,\nb",3,4\n')
    batch = read(path, "t*", id="id")
    assert batch.x.dtype == np.int64
    assert batch.ids == ["007", "a,\nb"]
    assert read(path, "t*", transform=TransformSpec(scale=1.0)).x.dtype == np.float32


@pytest.mark.parametrize("text", ["", "\xff\xfe\n", "a,a\n1,2\n"])
def test_a_csv_without_a_usable_header_is_refused(text: str, tmp_path: Path) -> None:
    """Empty files, other encodings and doubled column names are errors that name the file."""
    path = tmp_path / "d.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"d\.csv"):
        read(path, "a")


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    """Cut, foreign and damaged files are errors that name the file."""
    path = parquet(tmp_path, x=np.arange(1000.0))
    data = path.read_bytes()
    for broken in (b"", data[:100], data[:-1], b"PAR1" + bytes(100) + b"PAR1"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"d\.parquet: cannot be read"):
            read(path)


@pytest.mark.parametrize("block_bytes", [100, blocks.BLOCK_BYTES])
def test_a_row_group_that_ends_early_is_an_error(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the footer promises more rows than there are."""
    monkeypatch.setattr(parquet_files, "BLOCK_BYTES", block_bytes)
    path = parquet(tmp_path, rows=1000, x=np.arange(1000.0))
    made = parquet_files._Blocks.__init__

    def lying(self: Any, stamp: Any, metadata: Any, names: Any, pieces: Any, **more: Any) -> None:
        made(self, stamp, metadata, names, [*pieces[:-1], replace(pieces[-1], rows=pieces[-1].rows + 1)], **more)

    monkeypatch.setattr(parquet_files._Blocks, "__init__", lying)
    with pytest.raises(DataError, match=r"d\.parquet: row group 0 cannot be read \(it (holds 1000 rows|ends before)"):
        read(path)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"x": ["a", "b"]}, "input.fields.x: 'x': column 'x': holds string; expected numbers"),
        ({"x": [["a"], ["b"]]}, "input.fields.x: 'x': holds string; expected numbers"),
        ({"x": [1, 2], "y": [[1], [2]]}, "input.fields.label: 'y': holds list<element: int64>; expected whole numbers"),
        ({"x": [1, 2], "i": [{"a": 1}, {"a": 2}]}, "input.fields.id: 'i': holds struct<a: int64>; expected whole"),
        ({"x": [1, 2], "i": [b"a", b"b"]}, "input.fields.id: 'i': holds binary; expected whole numbers or text"),
        ({"x": [1, 2], "i": [1, None]}, "input.fields.id: 'i': no id at record 1; expected one for each record"),
        ({"x": [1, 2], "i": UUIDS}, "input.fields.id: 'i': holds extension<arrow.uuid>; expected whole numbers or"),
    ],
)
def test_columns_of_another_type_are_refused_when_opened(tmp_path: Path, held: dict[str, Any], message: str) -> None:
    """The file, the field, what was found and what was expected; before anything is built."""
    path = parquet(tmp_path, **held)
    fields = FieldsSpec(x="x", id="i" if "i" in held else None, label="y" if "y" in held else None)
    with pytest.raises(DataError) as e:
        open_reader(InputSpec(source=str(path), format="parquet", fields=fields))
    assert str(e.value).startswith(f"{path}: {message}")


def test_a_csv_column_of_text_is_refused_when_opened(tmp_path: Path) -> None:
    """Not one bad record after the other: the column was the wrong one."""
    path = csv(tmp_path, "x,name\n1,Ada\n2,Grace\n")
    with pytest.raises(DataError) as e:
        open_reader(InputSpec(source=str(path), format="csv", fields=FieldsSpec(x="*")))
    assert str(e.value) == f"{path}: input.fields.x: column 'name': holds text such as 'Ada'; expected numbers"


def test_numbers_beyond_int64_are_refused(tmp_path: Path) -> None:
    """They would come out negative."""
    np.save(tmp_path / "x.npy", np.array([[1], [2**63 + 5]], dtype=np.uint64))
    with (
        open_reader(InputSpec(source=str(tmp_path / "x.npy"), format="npy")) as reader,
        pytest.raises(DataError, match=r"x\.npy: input\.fields\.x: holds 9223372036854775813; expected whole"),
    ):
        reader.take(np.arange(2))


@pytest.mark.parametrize("whole_bytes", [64 << 20, 0], ids=["whole", "in blocks"])
def test_an_empty_cell_is_not_taken_for_nan(whole_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasons tell them apart, behind the argument if there are several; `allow_nan` takes both for NaN."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", whole_bytes)
    path = csv(tmp_path, "a,b,c\n1.5,2,1\n,3,1\n-NaN,4,1\n2.5,,1\nnull,6,1\n3,x,1\n")
    empty = ["3: column 'a' is empty; expected a number", "6: column 'a' is empty; expected a number"]
    nan = "4: 1 of 2 values are NaN or infinite; expected finite numbers"
    bad = [one.reason.removeprefix(f"{path}:") for one in read(path, "a,c").bad]
    assert bad == [empty[0], nan, empty[1]]
    assert np.isnan(read(path, "a,c", allow_nan=True).x[:, 0]).tolist() == [False, True, True, False, True, False]
    spec = InputSpec(source=str(path), format="csv", fields=FieldsSpec(x={"age": "a", "meta.size": "b"}))
    with open_reader(spec) as reader:
        reasons = [one.reason.removeprefix(f"{path}:") for one in reader.take(np.arange(reader.total)).bad]
    assert reasons == [
        "3: age: column 'a' is empty; expected a number",
        "4: age: 1 of 1 values are NaN or infinite; expected finite numbers",
        "5: meta.size: column 'b' is empty; expected a number",
        "6: age: column 'a' is empty; expected a number",
        "7: meta.size: column 'b' holds 'x'; expected a number",
    ]


@pytest.mark.parametrize("whole_bytes", [64 << 20, 0], ids=["whole", "in blocks"])
@pytest.mark.parametrize("nan", ["NaN", "nan", "-nan"])
def test_nan_among_whole_numbers(nan: str, whole_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes the column one of fractions. Words for a missing value still count as empty cells."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", whole_bytes)
    monkeypatch.setattr(csv_cuts, "CUT_BYTES", 1)  # a block of its own for each record
    path = csv(tmp_path, f"a,b\n1,2\n{nan},4\n5,6\n,7\nNULL,8\n")
    empty = "column 'a' is empty; expected a number"
    finite = "1 of 2 values are NaN or infinite; expected finite numbers"
    batch = read(path, "a,b")
    assert (batch.x.dtype, batch.x.tolist()) == (np.float32, [[1, 2], [5, 6]])
    assert [one.reason for one in batch.bad] == [f"{path}:3: {finite}", f"{path}:5: {empty}", f"{path}:6: {empty}"]
    batch = read(path, "a,b", allow_nan=True)
    np.testing.assert_array_equal(batch.x, [[1, 2], [np.nan, 4], [5, 6], [np.nan, 7], [np.nan, 8]])
    assert not batch.bad
    path = csv(tmp_path, "a,b\n1,2\nN/A,4\nnull,6\n")
    batch = read(path, "a,b", allow_nan=True)
    assert (batch.x.dtype, batch.x.tolist()) == (np.int64, [[1, 2]])
    assert [one.reason for one in batch.bad] == [f"{path}:3: {empty}", f"{path}:4: {empty}"]


@pytest.mark.parametrize("whole_bytes", [64 << 20, 0], ids=["whole", "in blocks"])
@pytest.mark.parametrize("allow_nan", [False, True])
def test_nan_among_truth_values(
    allow_nan: bool, whole_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a bad record, and the others stay true or false, unless some cell is neither, or most are 0 or 1."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", whole_bytes)
    monkeypatch.setattr(csv_cuts, "CUT_BYTES", 1)  # a block of its own for each record
    cells = ["true", "False", "NaN", "", "1", "-nan", "0", " TRUE"]
    path = csv(tmp_path, "\n".join(["a,b", *(f"{cell},{i}" for i, cell in enumerate(cells))]))
    spec = InputSpec(source=str(path), format="csv", fields=FieldsSpec(x={"mask": "a", "n": "b"}), allow_nan=allow_nan)
    with open_reader(spec) as reader:
        assert reader.packing is not None
        assert [part.gives for part in reader.packing.parts] == ["bool", "integer"]
    batch = read(path, "a", allow_nan=allow_nan)
    assert (batch.ids, batch.x.ravel().tolist()) == (["0", "1", "4", "6", "7"], [True, False, True, False, True])
    assert [one.reason.removeprefix(f"{path}:") for one in batch.bad] == [
        "4: column 'a' holds 'NaN'; expected true or false",
        "5: column 'a' is empty; expected a number",
        "7: column 'a' holds '-nan'; expected true or false",
    ]
    path = csv(tmp_path, "\n".join(["a{b},{", "true,x", "NaN,x", "false,x"]))
    assert [one.reason for one in read(path, "a{b}").bad] == [
        f"{path}:3: column 'a{{b}}' holds 'NaN'; expected true or false"
    ]
    path = csv(tmp_path, "\n".join(["a", "0", "1", "NaN", "true"]))
    batch = read(path, "a", allow_nan=True)
    np.testing.assert_array_equal(batch.x, [[0], [1], [np.nan]])
    assert [one.reason for one in batch.bad] == [f"{path}:5: column 'a' holds 'true'; expected a number"]
    path = csv(tmp_path, "\n".join(["a", "true", "NaN", "0.5", "1"]))
    batch = read(path, "a", allow_nan=True)
    np.testing.assert_array_equal(batch.x, [[np.nan], [0.5], [1]])
    assert [one.reason for one in batch.bad] == [f"{path}:2: column 'a' holds 'true'; expected a number"]


def test_a_table_with_empty_cells_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it holds NaN."""
    reads = Mock(wraps=pacsv.read_csv)
    monkeypatch.setattr(pacsv, "read_csv", reads)
    table, _ = csv_cells.parse(b"1.5,2\n,3\nNaN,4\n", ["a", "b"], ["a", "b"], {})
    assert str(table["a"].to_pylist()) == "[1.5, None, nan]"
    assert reads.call_count == 1
