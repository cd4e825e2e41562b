"""npy and npz: what is mapped, what is refused, and labels."""

from __future__ import annotations

import os
import re
import zipfile
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nimble_jobs.data import Wanted, arrays, labels, memory, open_reader, rows, stamps
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.data.rows import FileRows, FortranRows
from nimble_jobs.errors import DataError
from nimble_jobs.pipeline import usable_cores
from nimble_jobs.regular import open_regular
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.transform import TransformSpec


def spec_of(path: Path, **fields: Any) -> InputSpec:
    kind: Any = path.suffix[1:]
    return InputSpec(source=str(path), format=kind, fields=FieldsSpec(**fields))


def test_a_plainly_stored_member_stays_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays are read from their offset in the archive, both orders, and never whole."""
    monkeypatch.setattr(arrays, "LEAVE_FROM_BYTES", 1)
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    np.savez(tmp_path / "d.npz", first=np.arange(3), x=x, f=np.asfortranarray(x))
    np.savez_compressed(tmp_path / "c.npz", x=x)
    np.save(tmp_path / "d.npy", x)
    for name, field, left in (
        ("d.npz", "x", True),
        ("d.npz", "f", True),
        ("d.npy", "x", True),
        ("c.npz", "x", False),
    ):
        path = tmp_path / name
        source = arrays.open_arrays(spec_of(path, x=field), path)
        assert isinstance(source._x, FileRows | FortranRows) is left
        np.testing.assert_array_equal(source.load(np.array([6, 2])).x, x[[6, 2]])


def test_batches_are_read_from_files_that_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading thread opens the file once, not for each batch; a file that is replaced is noticed all the same."""
    monkeypatch.setattr(arrays, "LEAVE_FROM_BYTES", 1)
    x = np.arange(400, dtype=np.float32).reshape(200, 2)
    np.save(tmp_path / "d.npy", x)
    opened: list[Path] = []

    def noted(path: str | Path) -> BufferedReader:
        opened.append(Path(path))
        return open_regular(path)

    with open_reader(spec_of(tmp_path / "d.npy")) as reader:
        monkeypatch.setattr(stamps, "open_regular", noted)
        batches = list(reader.batches(batch_size=2))
        np.testing.assert_array_equal(np.concatenate([batch.x for batch in batches]), x)
        assert 1 <= len(opened) <= usable_cores()
        reading = reader.batches(batch_size=2)
        next(reading)
        np.save(tmp_path / "other.npy", x)
        (tmp_path / "other.npy").replace(tmp_path / "d.npy")
        with pytest.raises(DataError, match="changed while it was read"):
            next(reading)


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("shape", [(11, 4), (11, 2, 3), (11, 2, 3, 2)])
def test_fortran_order_is_read_in_blocks(
    shape: tuple[int, ...], step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records whose values lie apart come out whole, in order, shuffled, and into buffers."""
    x = np.asfortranarray(np.random.default_rng(0).integers(0, 99, shape, dtype=np.int32))
    monkeypatch.setattr(arrays, "LEAVE_FROM_BYTES", 1)
    monkeypatch.setattr(rows, "FORTRAN_BYTES", step * x[0].nbytes)
    np.save(tmp_path / "d.npy", x)
    order = np.array([10, 0, 3, 3, 4])
    with open_reader(spec_of(tmp_path / "d.npy")) as reader, Buffers(2, x.nbytes) as buffers:
        for how in ({}, {"wanted": Wanted(stored=True)}, {"wanted": Wanted(stored=True), "buffers": buffers}):
            found = []
            for batch in reader.batches(batch_size=4, **how):  # type: ignore[arg-type]
                found.append(batch.x.copy())
                if batch.buffer is not None:
                    batch.buffer.release()
            np.testing.assert_array_equal(np.concatenate(found), x)
        np.testing.assert_array_equal(reader.take(order).x, x[order])
        (tmp_path / "d.npy").write_bytes(b"")
        with pytest.raises(DataError, match=r"d\.npy: changed while it was read"):
            list(reader.batches(batch_size=4))


@pytest.mark.parametrize("fortran", [False, True])
def test_a_write_during_the_read_is_noticed(fortran: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may hold old and new bytes then: it is not handed out, and its buffer is free again."""
    monkeypatch.setattr(arrays, "LEAVE_FROM_BYTES", 1)
    x = np.ones((9, 4), np.float32)
    np.save(tmp_path / "d.npy", np.asfortranarray(x) if fortran else x)
    preadv = os.preadv

    def written(descriptor: int, views: list[memoryview], at: int) -> int:
        count = preadv(descriptor, views, at)
        os.utime(tmp_path / "d.npy", ns=(1, 1))
        return count

    monkeypatch.setattr(rows.os, "preadv", written)
    with open_reader(spec_of(tmp_path / "d.npy")) as reader, Buffers(1, 1 << 10) as buffers:
        with pytest.raises(DataError, match=r"d\.npy: changed while it was read"):
            next(reader.batches(batch_size=9, buffers=buffers))
        assert buffers.free == 1


def test_what_cannot_fit_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed array is read whole: the error says how much that is; otherwise a note does."""
    monkeypatch.setattr(arrays, "LEAVE_FROM_BYTES", 1)
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=np.zeros((1000, 500), np.float32))
    with open_reader(spec_of(path, x="x")) as reader:
        assert reader.notes() == [f"{path}: input.fields.x: 'x' is compressed, so it is held in memory: 2MB"]
        assert reader.take(np.arange(1000)).x.shape == (1000, 500)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_500_000)
    with pytest.raises(DataError) as e:
        open_reader(spec_of(path, x="x"))
    assert str(e.value) == (
        f"{path}: input.fields.x: 'x': is compressed and needs 2MB of memory, but only 1.5MB is free; "
        "expected less, or an uncompressed array (numpy.savez or numpy.save)"
    )


def test_available_memory_is_what_the_control_group_leaves(tmp_path: Path) -> None:
    """The tightest limit on the way up counts; file pages are free; no limit is none."""
    assert 0 < memory.available_bytes() < 1 << 62
    own = tmp_path / "a" / "b"
    own.mkdir(parents=True)
    for folder, limit in ((own, "max"), (tmp_path / "a", "1000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\nfile 200\n")
    assert memory._group(tmp_path, "/a/b") == 500
    assert memory._group(tmp_path, "/none") == 1 << 62


@pytest.mark.parametrize("name", ["d.npy", "d.npz"])
def test_a_small_file_that_changes_while_it_is_read_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fingerprint would be of other values."""
    path, read = tmp_path / name, arrays._in_memory
    np.save(path, np.arange(3)) if name == "d.npy" else np.savez(path, x=np.arange(3))

    def changing(*given: Any) -> Any:
        path.touch()
        return read(*given)

    monkeypatch.setattr(arrays, "_in_memory", changing)
    with pytest.raises(DataError, match=rf"{name}: changed while it was read"):
        open_reader(spec_of(path))


@pytest.mark.parametrize("threshold", [0, 1 << 20])
def test_pickled_objects_are_never_loaded(threshold: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Object arrays are refused by their header; nothing is unpickled."""
    monkeypatch.setattr(arrays, "LEAVE_FROM_BYTES", threshold)
    objects = np.array([{"a": 1}, None], dtype=object)
    np.save(tmp_path / "d.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "d.npz", x=objects, allow_pickle=True)
    for name in ("d.npy", "d.npz"):
        with pytest.raises(DataError, match=f"{name}.*holds Python objects; expected numbers or text"):
            open_reader(spec_of(tmp_path / name))


def test_damage_in_a_small_archive_is_noticed(tmp_path: Path) -> None:
    """A flipped bit in an array that is read whole fails its checksum."""
    path = tmp_path / "d.npz"
    x = np.arange(1000, dtype=np.float32)
    np.savez(path, x=x)
    data = bytearray(path.read_bytes())
    data[data.index(x.tobytes()) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"d\.npz: cannot be read \(Bad CRC-32"):
        open_reader(spec_of(path))


def test_a_header_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    """The bytes that follow must be exactly those that the header speaks of, before anything is allocated."""
    sink = BytesIO()
    np.lib.format.write_array_header_1_0(sink, {"shape": (1 << 40, 4), "fortran_order": False, "descr": "<f4"})
    (tmp_path / "d.npy").write_bytes(sink.getvalue() + bytes(16))
    with zipfile.ZipFile(tmp_path / "d.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", sink.getvalue() + bytes(16))
    for name in ("d.npy", "d.npz"):
        with pytest.raises(DataError, match=f"{name}.*holds 16 bytes of data; expected 17592186044416"):
            open_reader(spec_of(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (3,", "cannot be read (its header is damaged)"),
        ("-" * 9000 + "1", "cannot be read (its header is damaged)"),
        ("(" * 9000, "cannot be read (its header is damaged)"),
        ("\0\0", "cannot be read (its header is damaged)"),
        ("'", "cannot be read (its header is damaged)"),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (-2, -4)}", "its header gives the shape (-2, -4)"),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (True, 8)}", "its header gives the shape (True, 8)"),
        ("{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (1,)}", "holds values of type ('<f4', (2,))"),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 0)}", "holds 8 bytes of data; expected 0"),
    ],
)
@pytest.mark.parametrize("threshold", [0, 1 << 20])
def test_a_header_that_makes_no_sense_is_refused(
    text: str, message: str, threshold: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever numpy's parser makes of it, also for arrays that stay in their file."""
    monkeypatch.setattr(arrays, "LEAVE_FROM_BYTES", threshold)
    header = text.encode()
    path = tmp_path / "d.npy"
    path.write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(8))
    with pytest.raises(DataError, match=rf"d\.npy: {re.escape(message)}"):
        open_reader(spec_of(path))


def test_damage_in_any_compression_is_noticed(tmp_path: Path) -> None:
    """Each decompressor raises something of its own."""
    sink = BytesIO()
    np.save(sink, np.random.default_rng(0).normal(size=500))
    for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = tmp_path / "d.npz"
        with zipfile.ZipFile(path, "w", kind) as archive:
            archive.writestr("x.npy", sink.getvalue())
        data = bytearray(path.read_bytes())
        data[1000:1010] = bytes(10)
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"d\.npz: cannot be read"):
            open_reader(spec_of(path))


def test_records_without_a_value_are_refused(tmp_path: Path) -> None:
    """There may be any number of them in an empty file."""
    np.save(tmp_path / "d.npy", np.empty((10**9, 0), dtype=np.uint8))
    with pytest.raises(DataError, match=r"records have shape \(0,\); expected at least one value"):
        open_reader(spec_of(tmp_path / "d.npy"))


@pytest.mark.parametrize(
    ("held", "fields", "message"),
    [
        ({"x": np.float32(1)}, {}, r"input\.fields\.x: the array has no axes"),
        ({"x": np.array(["a"])}, {}, r"input\.fields\.x: holds text; expected numbers"),
        (
            {"x": np.ones(3), "i": np.arange(2)},
            {"id": "i"},
            r"input\.fields\.id: 'i': has shape \(2,\); expected \(3,\)",
        ),
        (
            {"x": np.ones(3), "i": np.ones(3)},
            {"id": "i"},
            r"input\.fields\.id: 'i': holds float64; expected whole numbers",
        ),
        ({"x": np.ones(3), "l": np.ones((3, 2))}, {"label": "l"}, r"input\.fields\.label: has shape \(3, 2\)"),
        ({"x": np.ones(2), "i": np.array(["", "a"])}, {"id": "i"}, r"input\.fields\.id: 'i': no id at record 0"),
        ({"x": np.ones(2), "i": np.array([b"a", b""])}, {"id": "i"}, r"input\.fields\.id: 'i': no id at record 1"),
    ],
)
def test_arrays_that_do_not_fit_are_named(
    held: dict[str, Any], fields: dict[str, str], message: str, tmp_path: Path
) -> None:
    """Each refusal says file, field, what is there and what was expected."""
    np.savez(tmp_path / "d.npz", **held)
    with pytest.raises(DataError, match=rf"d\.npz: {message}"):
        open_reader(spec_of(tmp_path / "d.npz", **fields))


def test_an_npy_file_has_no_ids_or_labels(tmp_path: Path) -> None:
    """Fields of an .npy file are refused rather than ignored."""
    np.save(tmp_path / "d.npy", np.ones((2, 2)))
    with pytest.raises(DataError, match=r"input\.fields\.label: an \.npy file holds one array; expected format npz"):
        open_reader(spec_of(tmp_path / "d.npy", label="y"))


def test_files_of_one_folder_must_agree(tmp_path: Path) -> None:
    """Files read as one input need records of one shape."""
    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    np.save(tmp_path / "b.npy", np.ones((2, 4)))
    spec = InputSpec(source=str(tmp_path), format="npy")
    with pytest.raises(DataError, match=r"b\.npy: records are float32 \(4,\); expected float32 \(3,\), as in .*a\.npy"):
        open_reader(spec)
    with pytest.raises(DataError, match=r"nothing to read; expected files that end in \.npz"):
        open_reader(InputSpec(source=str(tmp_path), format="npz"))


def normal(raw: Any, names: Any = None) -> labels.Labels:
    array = np.array(raw, dtype=object) if any(isinstance(r, (str, type(None))) for r in raw) else np.array(raw)
    return labels.normalise(array, len(raw), names=names, where="d: input.fields.label")


@pytest.mark.parametrize("first", [np.array([2, 0]), np.array([2.0, np.nan]), np.array([True, False])])
def test_labels_of_several_files_may_lack_some(first: np.ndarray, tmp_path: Path) -> None:
    """Whole numbers are stored as fractions where one of them is missing: they stay the same labels."""
    np.savez(tmp_path / "a.npz", x=np.ones(2), l=first)
    np.savez(tmp_path / "b.npz", x=np.ones(2), l=np.array([np.nan, 3.0]))
    spec = InputSpec(source=str(tmp_path), format="npz", fields=FieldsSpec(x="x", label="l"))
    with open_reader(spec) as reader:
        batch = reader.take(np.arange(4))
    assert batch.labels is not None
    assert batch.labels.tolist() == [*first[np.isfinite(first)].tolist(), 3]
    assert {bad.reason for bad in batch.bad} == {"label is missing"}


def test_files_of_whole_numbers_and_of_fractions_can_be_joined(tmp_path: Path) -> None:
    """A part of a table may hold whole numbers by chance. The error says what mends it, and that does."""
    np.save(tmp_path / "a.npy", np.array([[1.5], [2.0]]))
    np.save(tmp_path / "b.npy", np.array([[1], [2]]))
    spec = InputSpec(source=str(tmp_path), format="npy")
    with pytest.raises(DataError, match=r"b\.npy: records are int64 .*, or transform\.scale: 1 for float32"):
        open_reader(spec)
    with open_reader(spec.model_copy(update={"transform": TransformSpec(scale=1.0)})) as reader:
        assert reader.take(np.arange(4)).x.tolist() == [[1.5], [2.0], [1.0], [2.0]]


def test_labels_are_class_numbers() -> None:
    """Whole numbers count as they are, also written as floats or text; names are numbered in sorted order."""
    assert normal([2, 0, 1]).values.tolist() == [2, 0, 1]
    assert normal([2.0, 0.0]).values.tolist() == [2, 0]
    assert normal(["10", "2"]).values.tolist() == [10, 2]
    named = normal(["dog", "cat", "dog"])
    assert (named.values.tolist(), named.names) == ([1, 0, 1], ("cat", "dog"))


def test_numbers_in_text_are_no_names() -> None:
    """As names, 10.0 would come before 2.0."""
    found = normal(["0.0", "2.0", "10.0", "", "1e1", "11.0"])
    assert (found.values.tolist(), found.bad, found.names) == ([0, 2, 10, 0, 10, 11], {3: "label is missing"}, None)
    assert set(normal(["1.5", "-1", "2.0", "1e400"]).bad) == {0, 1, 3}
    assert set(normal(["1", "2.0", "x"]).bad) == {1, 2}  # one is a whole number, so all must be
    named = normal(["1.5", "x", "nan"])
    assert (named.bad, named.names) == ({}, ("1.5", "nan", "x"))


def test_names_keep_the_numbers_of_the_training() -> None:
    """With the names of a training, held-out labels mean the same classes, and unknown ones are bad."""
    held_out = normal(["eel", "dog", "fox"], names=("cat", "dog", "eel"))
    assert held_out.values[:2].tolist() == [2, 1]
    assert held_out.bad == {2: "label is 'fox'; expected one of the 3 known names"}


def test_bad_labels_have_a_reason() -> None:
    """Missing, negative and fractional labels make their record bad."""
    assert normal([1.0, np.nan, 2.5, -1.0]).bad == {
        1: "label is missing",
        2: "label is 2.5; expected a whole number",
        3: "label is -1; expected 0 or more",
    }
    assert set(normal(["1", "x", None, "", "-1"]).bad) == {1, 2, 3, 4}


def test_a_bad_label_leaves_its_record_out(tmp_path: Path) -> None:
    """A record with a bad label is a bad record; one that is bad anyway keeps its first reason."""
    x = np.ones((4, 2), np.float32)
    x[1] = np.nan
    np.savez(tmp_path / "d.npz", x=x, y=np.array([0, 1, -1, 2]))
    with open_reader(spec_of(tmp_path / "d.npz", label="y")) as reader:
        batch = reader.take(np.arange(4))
    assert batch.indexes.tolist() == [0, 3]
    assert batch.labels is not None
    assert batch.labels.tolist() == [0, 2]
    assert [(b.index, b.reason[:10]) for b in batch.bad] == [(1, "2 of 2 val"), (2, "label is -")]
