"""Ids that are made up, cannot be read, or would be equal; and files without records among others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nimble_jobs.data import csv_file, ids, open_reader
from nimble_jobs.data.ids import Ids, JoinedIds, Numbered, Renamed, check_ids
from nimble_jobs.data.stamps import Names
from nimble_jobs.data.table import ColumnIds
from nimble_jobs.errors import DataError
from nimble_jobs.seen import Counts, FileList, InputFile
from nimble_jobs.spec.model import FieldsSpec, InputSpec

Files = Mapping[str, str | bytes]
MANY = pytest.mark.parametrize("whole_bytes", [64 << 20, 0], ids=["whole", "in blocks"])


def write(folder: Path, files: Files) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def ids_of(source: Path, format_: Any, **fields: Any) -> tuple[list[str], list[str]]:
    """The ids, also of bad records, and the notes for users."""
    with open_reader(InputSpec(source=str(source), format=format_, fields=FieldsSpec(**fields))) as reader:
        taken = reader.ids(np.arange(reader.total))
        assert taken == [reader.id(i) for i in range(reader.total)]
        assert taken[::-1] == reader.ids(np.arange(reader.total)[::-1])
        return taken, reader.notes()


JSON = '{{"x": "t", "id": "{}"}}\n'


@pytest.mark.parametrize(
    ("format_", "files"),
    [
        ("csv", {"a.csv": "id,x\na,1\nb,2,3\n", "b.csv": "id,x\nrow-1-2,1\nd,2,3\n"}),
        ("text", {"a.csv": "id,x\na,1\nb,2,3\n", "b.csv": "id,x\nrow-1-2,1\nd,2,3\n"}),
        ("text", {"a.jsonl": JSON.format("a") + "odd\n", "b.jsonl": JSON.format("row-1-2") + "odd\n"}),
    ],
)
@MANY
def test_ids_that_are_made_up_are_unique(
    format_: str, files: Files, whole_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is no record is named `row-N`; a later one of this name, in another file, goes on counting."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", whole_bytes)
    found, _ = ids_of(write(tmp_path, files), format_, x="x", id="id")
    assert found == ["a", "row-1", "row-1-2", "row-1-3"]


@pytest.mark.parametrize("ids", [["row-1", "b", None], [None, "b", "row-0"]])
@MANY
def test_made_up_ids_give_way_to_real_ones(
    ids: list[str | None], whole_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the real one is."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", whole_bytes)
    ids = ["row-2" if name == "row-1" else name for name in ids]
    lines = "".join("1,2,3\n" if name is None else f"{name},1\n" for name in ids)
    found, _ = ids_of(write(tmp_path, {"a.csv": f"id,x\n{lines}"}) / "a.csv", "csv", x="x", id="id")
    assert found == [f"row-{i}-2" if name is None else name for i, name in enumerate(ids)]


def test_names_that_are_made_up_go_on_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is tried once for a name, however many files have it."""
    tried: list[int] = []

    def count(first: int) -> Iterator[int]:
        for n in range(first, 1000):
            tried.append(n)
            yield n

    monkeypatch.setattr(ids, "count", count)
    real = Ids(["row-1-3", "row-1-x", "row-2-2", "-", "row-1"])
    made_up = [Ids(["row-1", "row-2"], {0, 1}) for _ in range(40)]
    found = check_ids(JoinedIds([*made_up, real]), "here", None)
    ones = [f"row-1-{n}" for n in range(2, 43) if n != 3]
    twos = ["row-2", *(f"row-2-{n}" for n in range(3, 42))]
    assert list(found[:]) == [name for pair in zip(ones, twos, strict=True) for name in pair] + list(real[:])
    assert len(tried) == 41 + 40


KINDS = {
    "numbers": (Ids(np.arange(5)), "01234"),
    "bytes": (Ids(np.array([b"a", b"b", b"c"])), "abc"),
    "numbered": (Numbered("", 4, first=3), "3456"),
    "joined": (JoinedIds([Ids(["a", "b"]), Ids([]), Numbered("", 3), Ids(["c"])]), "ab012c"),
    "renamed": (Renamed(Ids(list("abcdef")), {1: "x", 4: "y"}), "axcdyf"),
    "a column": (ColumnIds(pa.chunked_array([["a"], ["b", "c"], ["d"]])), "abcd"),
    "paths": (Names("abcd"), "abcd"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_sliced_as_a_list_is(kind: str) -> None:
    """In every direction, and wherever a slice begins and ends."""
    ids, expected = KINDS[kind][0], list(KINDS[kind][1])
    bounds = [None, *range(-7, 8)]
    for step in (None, 1, 2, 3, -1, -2):
        for first in bounds:
            for last in bounds:
                assert ids[first:last:step] == expected[first:last:step]
    assert [ids[i] for i in range(-len(ids), len(ids))] == expected * 2
    for outside in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError):
            ids[outside]


def test_other_names_are_looked_up_by_position() -> None:
    """A batch does not look at the names outside of it."""

    class Names(dict[int, str]):
        walks = 0

        def __iter__(self) -> Iterator[int]:
            self.walks += 1
            return super().__iter__()

    names = Names({7: "g", 1: "b", 4: "e"})
    renamed = Renamed(Ids([str(i) for i in range(9)]), names)
    walks = names.walks
    whole = ["0", "b", "2", "3", "e", "5", "6", "g", "8"]
    assert [renamed[i] for i in range(-9, 9)] == whole * 2
    for first in range(10):
        for last in range(first, 10):
            assert renamed[first:last] == whole[first:last]
    assert renamed[1::3] == ["b", "e", "g"]
    assert names.walks == walks


@pytest.mark.parametrize("which", ["id", "label"])
@pytest.mark.parametrize("format_", ["csv", "text"])
@MANY
def test_csv_ids_and_labels_in_another_encoding(
    which: str, format_: str, whole_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line and the field are named."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", whole_bytes)
    path = write(tmp_path, {"a.csv": b"x,n\n1,a\n2,caf\xe9\n"}) / "a.csv"
    said = f"{path}: input.fields.{which}: 'n': the text at {path}:3 is not UTF-8; expected text in UTF-8"
    with pytest.raises(DataError, match=f"^{re.escape(said)}$"):
        ids_of(path, format_, x="x", **{which: "n"})


@pytest.mark.parametrize("which", ["id", "label"])
@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_parquet_that_breaks_its_promise_of_utf8(which: str, kind: str, tmp_path: Path) -> None:
    """Some writers store other bytes as text."""
    names = pa.array([b"a", b"caf\xe9", b"c"])
    column = names.view(pa.string()) if kind == "string" else names.cast(pa.large_binary()).view(pa.large_string())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0], "n": column}), path)
    said = f"{path}: input.fields.{which}: 'n': the text at record 1 is not UTF-8; expected text in UTF-8"
    with pytest.raises(DataError, match=f"^{re.escape(said)}$"):
        ids_of(path, "parquet", x="x", **{which: "n"})


def test_halves_of_surrogate_pairs_stay_different(tmp_path: Path) -> None:
    """No file can hold them, so they are written as JSON writes them."""
    path = write(tmp_path, {"a.jsonl": JSON.format("\\ud800") + JSON.format("\\ud801")}) / "a.jsonl"
    assert ids_of(path, "text", x="x", id="id")[0] == ["\\ud800", "\\ud801"]


def test_text_files_of_the_same_name(tmp_path: Path) -> None:
    """They are told apart by their folders, and others are named as before."""
    write(tmp_path, {"a/n.txt": "1\n2\n", "b/c/n.txt": "3\n", "d/m.txt": "4\n"})
    assert ids_of(tmp_path / "**" / "*.txt", "text", x="x")[0] == ["a/n.txt:1", "a/n.txt:2", "b/c/n.txt:1", "d/m.txt:1"]
    assert ids_of(tmp_path / "[bd]*" / "**" / "*.txt", "text", x="x")[0] == ["n.txt:1", "m.txt:1"]


@pytest.mark.parametrize("names", [("a.jsonl", "b.txt"), ("b.jsonl", "a.txt")])
def test_files_with_and_without_ids(names: tuple[str, str], tmp_path: Path) -> None:
    """Ids of some files must not be taken for those of others."""
    named, without = names
    write(tmp_path, {named: JSON.format("a"), without: "t\n"})
    said = f"{tmp_path / without}: input.fields.id: its records have none, and those of {tmp_path / named} have one"
    with pytest.raises(DataError, match=re.escape(said)):
        ids_of(tmp_path, "text", x="x", id="id")


EMPTY: list[tuple[str, str, str, str | bytes]] = [
    ("csv", "a.csv", "id,x\n", "id,x\nr,1\n"),
    ("csv", "a.csv", "", "id,x\nr,1\n"),
    ("csv", "a.csv", "id,x\n\n\n", "id,x\nr,1\n"),
    ("text", "a.csv", "id,x\n", "id,x\nr,1\n"),
    ("text", "a.csv", "", "id,x\nr,1\n"),
    ("text", "a.jsonl", "", JSON.format("r")),
]


@pytest.mark.parametrize(("format_", "name", "empty", "full"), EMPTY)
@MANY
def test_files_without_records_among_others(
    format_: str, name: str, empty: str, full: str, whole_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as no records, wherever they are, and a note says so. If no file has any, that is an error."""
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", whole_bytes)
    write(tmp_path, {name: empty, f"b{name}": full, f"c{name}": empty})
    found, notes = ids_of(tmp_path, format_, x="x", id="id")
    assert found == ["r"]
    assert notes == [f"files without records: {tmp_path / name}, {tmp_path / f'c{name}'}"]
    (tmp_path / f"b{name}").unlink()
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path / name))}: (no records|is empty); expected "):
        ids_of(tmp_path, format_, x="x", id="id")


@pytest.mark.parametrize("x", [pa.array([], pa.float64()), pa.array([], pa.null())])
def test_parquet_files_without_rows_among_others(x: pa.Array, tmp_path: Path) -> None:
    """Whatever the types of their columns are, of which writers know nothing without rows."""
    pq.write_table(pa.table({"x": x, "id": pa.array([], x.type)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1.5], "id": ["r"]}), tmp_path / "b.parquet")
    assert ids_of(tmp_path, "parquet", x="x", id="id")[0] == ["r"]
    assert ids_of(tmp_path, "parquet", x={"0": "x"}, id="id")[0] == ["r"]


def test_listed_files_without_records(tmp_path: Path) -> None:
    """New files of `input.only_new` are scored although some are empty, which are not bad."""
    write(tmp_path, {"a.csv": "id,x\n", "b.csv": "id,x\nr,1\n"})
    stats = {path.name: path.stat() for path in sorted(tmp_path.iterdir())}
    files = [
        InputFile(path=name, size=info.st_size, mtime_ns=info.st_mtime_ns, inode=info.st_ino)
        for name, info in stats.items()
    ]
    spec = InputSpec(source=str(tmp_path), format="csv", fields=FieldsSpec(x="x", id="id"))
    listed = FileList(root=str(tmp_path), listed_at=0.0, after_run=0, counts=Counts(), files=files)
    with open_reader(spec, files=listed) as reader:
        assert (reader.total, reader.id(0), reader.listed_file(0), reader.left_out) == (1, "r", "b.csv", {})
        assert reader.notes() == ["files without records: a.csv"]
