"""Large CSV files are read in blocks: records, bad records and errors are those of a file that is read whole."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.data import csv_blocks, csv_cuts, csv_file, open_reader
from nimble_jobs.data.csv_cuts import check_closed, cuts, lines_in, record_ends
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import FieldsSpec, InputSpec

CELLS = [
    *("1", "2", "-3", "007", " 7 ", "0", "9007199254740993", "99999999999999999999"),
    *("1.5", "1e3", "2.0", "-0.0", "inf", "nan", "1_0"),
    *("", "  ", "NA", "null", "oops", 'a "b', "true", "false", "2020-01-02", "12:30:00", "2020-01-02 03:04:05"),
    *("\x00", "x\ny", "x,\r\ny", '"', "\udce9"),
]
numbers = st.sampled_from(CELLS[:8])
fractions = st.sampled_from(CELLS[:15])
anything = st.sampled_from(CELLS)


@st.composite
def tables(draw: st.DrawFn) -> str:
    """A CSV file with the columns id, a, b: mostly sound."""
    kinds = [draw(st.sampled_from([numbers, fractions, anything])) for _ in range(2)]
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    sink = io.StringIO()
    # The writer leaves a line feed without quotes if lines end in something else, which would split the record.
    quoting = csv.QUOTE_ALL if end == "\r" else draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    writer = csv.writer(sink, lineterminator=end, quoting=quoting)
    writer.writerow(["id", "a", "b"])
    for i in range(draw(st.integers(1, 25))):
        what = draw(st.integers(0, 40))
        if what == 0:
            sink.write(end)
        elif what == 1:
            sink.write(f"{i},1{end}")
        elif what == 2:
            sink.write(f'{i},5" pipe,2{end}')
        else:
            kind = kinds if what > 5 else [anything, anything]
            writer.writerow([f"n{i}", draw(kind[0]), draw(kind[1])])
    text = sink.getvalue()
    return text[: -len(end)] if draw(st.booleans()) else text


def outcome(path: Path) -> Any:
    """All that a reader says about a file, or its error."""
    spec = InputSpec(source=str(path), format="csv", fields=FieldsSpec(x="a,b", id="id"))
    try:
        with open_reader(spec) as reader:
            batches = list(reader.batches(batch_size=4))
            again = reader.take(np.arange(reader.total)[::-1])
            rows = np.concatenate([b.x for b in batches])
            np.testing.assert_array_equal(again.x[::-1], rows)
            found = [(b.index, b.id, b.reason) for batch in batches for b in batch.bad]
            return rows.dtype, rows.tolist(), [i for b in batches for i in b.ids], found, reader.fingerprint
    except DataError as e:
        return str(e)


@settings(max_examples=40, deadline=None)
@given(text=tables(), size=st.integers(1, 60))
def test_blocks_give_what_the_whole_gives(text: str, size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever the cells hold and wherever the blocks end: the same numbers, types, ids, lines, reasons and errors."""
    path = tmp_path_factory.mktemp("c") / "d.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    whole = outcome(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_file, "WHOLE_BYTES", 0)
        patch.setattr(csv_cuts, "CUT_BYTES", size)
        assert outcome(path) == whole


@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet='a",\n\r', max_size=40), size=st.integers(1, 20))
def test_cuts_are_between_records(text: str, size: int) -> None:
    """The records on both sides of a cut, read alone, are those of the whole, and their lines are counted on."""
    text += '"' if is_open(text) else ""
    data = f"h\n{text}".encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_cuts, "CUT_BYTES", size)
        found = list(cuts(io.BytesIO(data), "d"))
    assert b"".join(block for _, block in found) == data[2:]
    at, line = 2, 2
    for cut, block in found:
        assert (cut.offset, cut.nbytes, cut.line) == (at, len(block), line)
        at, line = at + len(block), line + lines_in(block)
    rows = [row for _, block in found for row in csv.reader(io.StringIO(block.decode(), newline="")) if row]
    assert rows == [row for row in csv.reader(io.StringIO(text, newline="")) if row]


def is_open(text: str) -> bool:
    """Whether a quote begins a cell that does not end."""
    try:
        check_closed(text.encode(), "d")
    except DataError:
        return True
    return False


@settings(max_examples=80, deadline=None)
@given(text=tables(), mark=st.booleans(), whole=st.booleans())
def test_records_are_those_of_the_csv_module(
    text: str, mark: bool, whole: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ids, and the lines of bad records, of a file with or without a byte order mark, read whole or in blocks."""
    path = tmp_path_factory.mktemp("c") / "d.csv"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + text.encode(errors="surrogateescape"))
    expected = list(csv.reader(io.StringIO(text.replace("\udce9", "?"), newline="")))[1:]
    names = [row[0] if len(row) == 3 else f"row-{i}" for i, row in enumerate(row for row in expected if row)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_file, "WHOLE_BYTES", (64 << 20) * whole)
        patch.setattr(csv_cuts, "CUT_BYTES", 20)
        spec = InputSpec(source=str(path), format="csv", fields=FieldsSpec(x="a", id="id"), allow_nan=True)
        try:
            with open_reader(spec) as reader:
                found = [reader.id(i) for i in range(reader.total)]
                batch = reader.take(np.arange(reader.total))
        except DataError:  # a column of text
            return
    assert found == names
    odd = {i for i, row in enumerate(row for row in expected if row) if len(row) != 3}
    assert odd <= {bad.index for bad in batch.bad}


def test_record_ends_need_no_loop_for_sound_files() -> None:
    """Quotes that all open, close or are doubled, and those that stand in a plain cell, are told apart."""
    assert record_ends(b'a,"b\nc"\n"d""\n",e\n').tolist() == [8, 17]
    assert record_ends(b'a,5" pipe\nb,6\n').tolist() == [10, 14]
    assert record_ends(b'"open\nstill\n').tolist() == []
    assert record_ends(b"a\rb\r").tolist() == [2]


def test_a_quote_that_nobody_closes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names its line instead of filling the memory with the rest of the file."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", 0)
    monkeypatch.setattr(csv_cuts, "CUT_BYTES", 64)
    monkeypatch.setattr(csv_cuts, "RECORD_BYTES", 100)
    path = tmp_path / "d.csv"
    path.write_text("id,a,b\n1,2,3\n" + '2,"3,4\n' + "5,6,7\n" * 100)
    assert outcome(path) == f"{path}:3: a record is longer than 0 MiB; expected a closing quote"


@pytest.mark.parametrize("whole", [0, 64 << 20])
def test_a_quote_that_is_open_at_the_end_is_an_error(
    whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records behind it would be part of its cell, and silently lost."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", whole)
    path = tmp_path / "d.csv"
    path.write_text('\ufeffid,a,b\n"n\n1",2,3\n2,"3,4\n5,6,7\n', encoding="utf-8")
    message = f"{path}:4: a cell begins with a quote that is never closed; expected a closing quote"
    assert outcome(path) == message


@pytest.mark.parametrize("whole", [0, 64 << 20])
def test_cells_that_are_not_utf8_are_bad_records(whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a column of numbers; in a column that nobody asked for they do not matter, not even near the header."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", whole)
    path = tmp_path / "d.csv"
    path.write_bytes("id,a,b,é\nn0,1,2,x\n".encode() + "n1,3,4,é\nn2,é,5,y\nn3,6,7,z\n".encode("latin-1"))
    dtype, rows, ids, bad, _ = outcome(path)
    assert (dtype, rows, ids) == (np.int64, [[1, 2], [3, 4], [6, 7]], ["n0", "n1", "n3"])
    assert bad == [(2, "n2", f"{path}:4: column 'a' holds '\ufffd'; expected a number")]


def test_a_record_may_be_longer_than_what_arrow_reads_at_a_time(tmp_path: Path) -> None:
    """One line of an image as text takes more than a megabyte."""
    path = tmp_path / "d.csv"
    path.write_text("id,a,b,text\n" + f"n0,1,2,{'x' * 3_000_000}\n" + "n1,3,4,y\n")
    assert outcome(path)[1:3] == ([[1, 2], [3, 4]], ["n0", "n1"])


def test_a_header_in_the_middle_costs_one_more_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were put together keep their headers. The columns, all of text then, are looked at together."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", 0)
    monkeypatch.setattr(csv_cuts, "CUT_BYTES", 1000)
    names = [f"p{i}" for i in range(50)]
    lines = [",".join(["3"] * 50)] * 40
    path = tmp_path / "d.csv"
    path.write_text("\n".join([",".join(names), *lines, ",".join(names), *lines, ""]))
    parse, passes = csv_blocks.parse, []

    def counted(*given: Any) -> Any:
        passes.append(given)
        return parse(*given)

    monkeypatch.setattr(csv_blocks, "parse", counted)
    with open_reader(InputSpec(source=str(path), format="csv", fields=FieldsSpec(x="p*"))) as reader:
        assert reader._source.layout is not None
        assert len(passes) == 2 * reader._source.layout.count
        batch = reader.take(np.arange(reader.total))
    assert [bad.index for bad in batch.bad] == [40]
    assert batch.x.shape == (80, 50)


def test_underscores_make_no_numbers(tmp_path: Path) -> None:
    """Python would read 2023_01 as 202301."""
    path = tmp_path / "d.csv"
    path.write_text("id,a,b\nn0,1,2\nn1,2023_01,3\n")
    assert outcome(path)[1:3] == ([[1, 2]], ["n0"])


@pytest.mark.parametrize("what", ["shrink", "remove"])
def test_a_large_file_that_goes_while_it_is_read_is_an_error(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that come later are not those of the file that was opened."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", 0)
    monkeypatch.setattr(csv_cuts, "CUT_BYTES", 64)
    path = tmp_path / "d.csv"
    path.write_text("x\n" + "".join(f"{i}\n" for i in range(10_000)))
    with open_reader(InputSpec(source=str(path), format="csv")) as reader:
        batches = reader.batches(batch_size=8)
        next(batches)
        if what == "shrink":
            path.write_text("x\n1\n")
        else:
            path.unlink()
        with pytest.raises(DataError, match=r"d\.csv: (changed|vanished) while it was read"):
            list(batches)
