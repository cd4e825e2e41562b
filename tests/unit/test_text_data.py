"""Texts in all kinds of files: what is a record, what is bad, and what its message says."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.data import open_reader
from nimble_jobs.data.text import lines
from nimble_jobs.data.text.reading import spread
from nimble_jobs.errors import DataError
from nimble_jobs.seen import FileList, InputFile
from nimble_jobs.spec.model import FieldsSpec, InputSpec

ODD = ["plain", "", "  ", "a\0b", "😀👩‍👩‍👧", "שלום عالم", "line\u2028separator", "tab\tand\rCR", "﻿mark inside"]


def read(path: Path, x: Any = "body", **fields: Any) -> tuple[list[Any], dict[int, str], list[str]]:
    """The texts, the reasons for bad records with their places, and the ids."""
    spec = InputSpec(source=str(path), format="text", fields=FieldsSpec(x=x, **fields))
    with open_reader(spec) as reader:
        texts: list[Any] = []
        bad: dict[int, str] = {}
        half = reader.total // 2
        for some in reader.texts([r for r in ((0, half), (half, reader.total)) if r[1] > r[0]]):
            texts += [None if some.start + i in some.bad else text for i, text in enumerate(some.values)]
            bad |= {i: reader.bad_record(i, why).reason.replace(str(path), "FILE") for i, why in some.bad.items()}
        return texts, bad, reader.ids(np.arange(reader.total))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_columns_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    """All three ways to store text; null is a bad record, empty text is not."""
    values = [*ODD, None]
    table = pa.table({"body": pa.array(values).cast(pa.string()), "id": range(len(values))})
    table = table.set_column(
        0, "body", table["body"].dictionary_encode() if pa.types.is_dictionary(kind) else table["body"].cast(kind)
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=4)
    texts, bad, ids = read(tmp_path / "t.parquet", id="id")
    assert texts == values
    assert bad == {len(ODD): f"FILE: record {len(ODD)}: column 'body' is null; expected text"}
    assert ids == [str(i) for i in range(len(values))]


def test_parquet_that_breaks_its_promise_of_utf8(tmp_path: Path) -> None:
    """Some writers store other bytes in a column of text: only that record is bad."""
    column = pa.array([b"good", b"caf\xe9", b"fine"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"body": column}), tmp_path / "t.parquet")
    texts, bad, _ = read(tmp_path / "t.parquet")
    assert texts == ["good", None, "fine"]
    assert bad == {1: "FILE: record 1: column 'body' is not UTF-8: byte 3 is 0xe9; expected text in UTF-8"}


def test_reasons_name_the_file_of_several_and_the_row_in_it(tmp_path: Path) -> None:
    """Parquet files by rows from 0, as ids without a column are; the record's place in the whole input says neither."""
    for name, texts in (("a", ["x", None]), ("b", ["y", "z", None])):
        pq.write_table(pa.table({"body": pa.array(texts, pa.string())}), tmp_path / f"{name}.parquet")
    texts, bad, _ = read(tmp_path)
    assert texts == ["x", None, "y", "z", None]
    assert bad == {
        1: "FILE/a.parquet: record 1: column 'body' is null; expected text",
        4: "FILE/b.parquet: record 2: column 'body' is null; expected text",
    }


def test_a_file_without_any_text_has_bad_records_only(tmp_path: Path) -> None:
    """Writers give such a column the type null. Other files of the input are read."""
    for name, texts in (("a", ["x"]), ("b", [None, None])):
        pq.write_table(pa.table({"body": texts, "more": texts}), tmp_path / f"{name}.parquet")
    texts, bad, _ = read(tmp_path)
    assert texts == ["x", None, None]
    why = "column 'body' is null; expected text"
    assert bad == {1: f"FILE/b.parquet: record 0: {why}", 2: f"FILE/b.parquet: record 1: {why}"}
    assert read(tmp_path, x=("body", "more"))[0] == [("x", "x"), None, None]


def test_a_column_of_numbers_is_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": [1, 2]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: input\.fields\.x: column 'body' holds int64; expected text$"):
        read(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: input\.fields\.x: no 'text'; expected one of: body$"):
        read(tmp_path / "t.parquet", x="text")


def test_pairs_of_columns(tmp_path: Path) -> None:
    """A record is bad if either of its texts is."""
    pq.write_table(pa.table({"q": ["a", None, "c"], "p": ["1", "2", None]}), tmp_path / "t.parquet")
    texts, bad, _ = read(tmp_path / "t.parquet", x=("q", "p"))
    assert texts == [("a", "1"), None, None]
    assert bad == {
        1: "FILE: record 1: column 'q' is null; expected text",
        2: "FILE: record 2: column 'p' is null; expected text",
    }


def test_csv_cells_of_text(tmp_path: Path) -> None:
    """Quoted line breaks stay; numbers, NA and empty cells are text; a line of wrong length is a bad record."""
    path = tmp_path / "t.csv"
    path.write_bytes(
        b'\xef\xbb\xbfid,body\r\na,"two\nlines, quoted ""x"""\r\nb,\r\nc,NA\r\nd,12\r\ne,1,2\r\nf,caf\xe9\r\ng,last'
    )
    texts, bad, ids = read(path, id="id")
    assert texts == ['two\nlines, quoted "x"', "", "NA", "12", None, None, "last"]
    assert bad == {
        4: "FILE:7: line has 3 cells; expected 2",
        5: "FILE:8: column 'body' is not UTF-8: byte 3 is 0xe9; expected text in UTF-8",
    }
    assert ids == ["a", "b", "c", "d", "row-4", "f", "g"]


def test_json_lines(tmp_path: Path) -> None:
    """Every kind of line that is no object with a text has its own message, and the others are read."""
    rows = [
        b'{"body": "plain", "meta": {"id": 1}}',
        b'{"body": "\\ud83d\\ude00 \\u05e9", "meta": {"id": "b"}}',
        b'{"body": null, "meta": {"id": 3}}',
        b'{"body": 12, "meta": {"id": 4}}',
        b'{"body": ["a"], "meta": {"id": 5}}',
        b'{"text": "x", "meta": {"id": 6}}',
        b"[1, 2]",
        b'{"body": "open',
        b"",
        b'{"body": "\\ud800", "meta": {"id": 10}}',
        b'{"body": "caf\xe9", "meta": {"id": 11}}',
        b'{"body": "first", "body": "last", "meta": {"id": 12}}',
        b'{"body": "", "meta": {"id": 13}}',
        b"[" * 100_000,
    ]
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(rows))
    texts, bad, ids = read(path, id="meta.id")
    assert texts == ["plain", "😀 ש", *[None] * 9, "last", "", None]
    nested = bad.pop(13)
    assert nested.startswith("FILE:14: the line is not JSON (")
    assert bad == {
        2: "FILE:3: field 'body' is null; expected text",
        3: "FILE:4: field 'body' holds the number 12; expected text",
        4: "FILE:5: field 'body' holds a list; expected text",
        5: "FILE:6: field 'body' is missing; expected text",
        6: "FILE:7: the line holds a list; expected a JSON object",
        7: "FILE:8: the line is not JSON (Unterminated string starting at: line 1 column 10 (char 9)); "
        "expected a JSON object",
        8: "FILE:9: the line is empty; expected a JSON object",
        9: "FILE:10: field 'body' holds half of a surrogate pair, which is no character; expected text",
        10: "FILE:11: is not UTF-8: byte 13 is 0xe9; expected text in UTF-8",
    }
    assert ids == ["1", "b", "3", "4", "5", "6", "row-6", "row-7", "row-8", "10", "row-10", "12", "13", "row-13"]


def test_json_lines_without_an_id(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"body": "a", "id": 1}\n{"body": "b"}\n')
    with pytest.raises(
        DataError, match=r"input\.fields\.id: 'id': no id at .*t\.jsonl:2; expected one for each record"
    ):
        read(tmp_path / "t.jsonl", id="id")
    (tmp_path / "t.jsonl").write_text('{"body": "a", "id": 1}\n{"body": "b", "id": "1"}\n')
    with pytest.raises(DataError, match=r"id '1' at records 0 and 1 \(.*t\.jsonl:1 and .*t\.jsonl:2\)"):
        read(tmp_path / "t.jsonl", id="id")


@pytest.mark.parametrize(
    ("values", "labels", "names", "bad"),
    [
        ([1.0, 0, "2", 2.0], [1, 0, 2, 2], None, {}),
        ([True, False, True], [1, 0, 1], ("false", "true"), {}),
        ([1, 1.5, 0], [1, 0, 0], None, {1: "label is '1.5'; expected a whole number, 0 or more"}),
        ([1, True], [1, 0], None, {1: "label is 'true'; expected a whole number, 0 or more"}),
        ([1, float("nan"), None], [1, 0, 0], None, dict.fromkeys((1, 2), "label is missing")),
        (
            ["a", ["b"], {"c": 1}],
            [0, 0, 0],
            ("a",),
            {
                1: "field 'l' holds a list; expected a name or a whole number",
                2: "field 'l' holds an object; expected a name or a whole number",
            },
        ),
    ],
)
def test_labels_of_json_lines_that_are_no_text(
    values: list[Any], labels: list[int], names: tuple[str, ...] | None, bad: dict[int, str], tmp_path: Path
) -> None:
    """Truth values are names, whole numbers may have a point, and of others it is said what they are."""
    rows = [json.dumps({"body": "t", "l": value}) for value in values]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    spec = InputSpec(source=str(tmp_path / "t.jsonl"), format="text", fields=FieldsSpec(x="body", label="l"))
    with open_reader(spec) as reader:
        found = reader.labels(np.arange(reader.total))
        assert found is not None
        assert (found.tolist(), reader.label_names) == (labels, names)
        (texts,) = reader.texts([(0, reader.total)])
        assert texts.bad == bad


def test_labels_of_json_lines(tmp_path: Path) -> None:
    """Names become classes; a record without one is bad."""
    (tmp_path / "t.jsonl").write_text('{"body": "a", "l": "b"}\n{"body": "b"}\n{"body": "c", "l": "a"}\n')
    spec = InputSpec(source=str(tmp_path / "t.jsonl"), format="text", fields=FieldsSpec(x="body", label="l"))
    with open_reader(spec) as reader:
        (texts,) = reader.texts([(0, 3)])
        found = reader.labels(np.array([0, 2]))
        assert found is not None
        assert (found.tolist(), reader.label_names) == ([1, 0], ("a", "b"))
        assert texts.bad == {1: "label is missing"}


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_plain_lines(tmp_path: Path, newline: str, end: str) -> None:
    """Only LF ends a line, a CR before it is dropped, and the last line needs no end. Ids are line numbers."""
    kept = [text for text in ODD if "\r" not in text]
    (tmp_path / "t.txt").write_bytes(("\ufeff" + newline.join(kept) + end).encode())
    texts, bad, ids = read(tmp_path / "t.txt", x="x")
    assert (texts, bad) == (kept, {})
    assert ids == [str(i + 1) for i in range(len(kept))]


def test_plain_lines_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"good\n\xff\xfe\nfine\n")
    texts, bad, _ = read(tmp_path / "t.txt", x="x")
    assert texts == ["good", None, "fine"]
    assert bad == {1: "FILE:2: is not UTF-8: byte 0 is 0xff; expected text in UTF-8"}


def test_several_files_of_lines(tmp_path: Path) -> None:
    """Records are named by file and line, since numbers alone would be given twice."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x\ny\n")
    _, _, ids = read(tmp_path / "*.txt", x="x")
    assert ids == ["a.txt:1", "a.txt:2", "b.txt:1", "b.txt:2"]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".txt.gz", ".jsonl.gz"])
def test_blocks_of_lines_are_cut_between_lines(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small blocks are, also if a line is longer than one."""
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 64)
    given = [f"record {i} " + "x" * (i * 7 % 200) for i in range(100)]
    rows = "".join((json.dumps({"body": t}) if "jsonl" in suffix else t) + "\n" for t in given).encode()
    path = tmp_path / f"t{suffix}"
    path.write_bytes(gzip.compress(rows) if suffix.endswith("gz") else rows)
    assert read(path, x="body" if "jsonl" in suffix else "x")[0] == given


def test_a_damaged_gz_file(tmp_path: Path) -> None:
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(b"a\nb\n" * 1000)[:-20])
    with pytest.raises(DataError, match=r"t\.txt\.gz: cannot be decompressed \(.*\); expected a whole gzip file"):
        read(tmp_path / "t.txt.gz", x="x")


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.csv"])
def test_files_without_records(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("body\n" if name == "t.csv" else "")
    with pytest.raises(DataError, match="no records; expected at least one"):
        read(tmp_path / name)


def test_files_of_an_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "t.md").write_text("a\n")
    expected = r"t\.md: unknown kind of text; expected \.parquet, .*, \.txt, or \.jsonl\.gz, \.txt\.gz$"
    with pytest.raises(DataError, match=expected):
        read(tmp_path / "t.md")


def test_listed_files(tmp_path: Path) -> None:
    """With only_new: records are named by file and position, and an unreadable file is one bad record."""
    for name, data in (("a.txt", b"x\ny\n"), ("b.txt.gz", b"no gzip"), ("c.txt", b"z")):
        (tmp_path / name).write_bytes(data)
    found = [input_file(tmp_path, name) for name in ("a.txt", "b.txt.gz", "c.txt")]
    counts: Any = None
    listing = FileList(root=str(tmp_path), listed_at=0.0, after_run=0, counts=counts, files=found)
    spec = InputSpec(source=str(tmp_path / "*"), format="text", fields=FieldsSpec())
    with open_reader(spec, files=listing) as reader:
        (texts,) = reader.texts([(0, 4)])
        assert texts.values == ["x", "y", None, "z"]
        assert list(texts.bad) == [2]
        assert "cannot be decompressed" in texts.bad[2]
        assert reader.ids(np.arange(4)) == ["a.txt:0", "a.txt:1", "b.txt.gz", "c.txt:0"]


def input_file(folder: Path, name: str) -> InputFile:
    info = (folder / name).stat()
    return InputFile(path=name, size=info.st_size, mtime_ns=info.st_mtime_ns, inode=info.st_ino)


def test_a_line_of_many_megabytes(tmp_path: Path) -> None:
    """It is a block of its own."""
    long = "word " * 2_000_000
    (tmp_path / "t.txt").write_text(f"a\n{long}\nb\n")
    assert read(tmp_path / "t.txt", x="x")[0] == ["a", long, "b"]


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a\n" * 100)
    spec = InputSpec(source=str(path), format="text", fields=FieldsSpec())
    with open_reader(spec) as reader:
        path.write_text("b\n" * 100)
        with pytest.raises(DataError, match="changed while it was read"):
            list(reader.texts([(0, 100)]))


@given(st.integers(1, 10_000), st.integers(1, 500), st.integers(1, 20))
def test_a_sample_is_spread_over_the_input(total: int, count: int, pieces: int) -> None:
    """Ascending ranges that do not overlap, within the input, and not many more than asked for."""
    found = spread(total, count, pieces)
    assert all(a < b for a, b in found)
    assert all(first[1] <= second[0] for first, second in pairwise(found))
    assert found[0][0] == 0
    assert found[-1][1] == total or (pieces == 1 and found[-1][1] <= total)
    assert sum(b - a for a, b in found) <= max(count, pieces)
