"""Records with several inputs: every format that can name them gives the same rows, bad records and errors."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn

from nimble_jobs.data import Reader, csv_cuts, csv_file, open_reader, parquet
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.errors import DataError
from nimble_jobs.models.packed import Packed
from nimble_jobs.seen import Counts, FileList, InputFile
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.transform import TransformSpec

N = 23
RANDOM = np.random.default_rng(4)
AGE = RANDOM.random(N)
COUNT = RANDOM.integers(-9, 9, N)
VECTOR = RANDOM.random((N, 3))
ARGUMENTS = {"age": "age", "meta.count": "count", "meta.vector": "v*"}
PACKED = {
    "age": "float64[] float",
    "meta.count": "int64[] integer",
    "meta.vector": "float64[3] float",
}


def npz(folder: Path, columns: dict[str, Any], *, compressed: bool = False) -> Path:
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    (np.savez_compressed if compressed else np.savez)(folder / "d.npz", **arrays)
    return folder / "d.npz"


def table(columns: dict[str, Any]) -> pa.Table:
    return pa.table({name: v if isinstance(v, pa.Array) else pa.array(v) for name, v in columns.items()})


def pq_file(folder: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(table(columns), folder / "d.parquet", row_group_size=5)
    return folder / "d.parquet"


def csv(folder: Path, columns: dict[str, Any]) -> Path:
    pa.csv.write_csv(table(columns), folder / "d.csv")
    return folder / "d.csv"


def scalars() -> dict[str, Any]:
    return {"age": AGE, "count": COUNT, **{f"v{i}": VECTOR[:, i] for i in range(3)}, "id": [f"r{i}" for i in range(N)]}


def opened(path: Path, x: Any, **fields: Any) -> Reader:
    names = {name: fields.pop(name) for name in ("id", "label") if name in fields}
    spec = InputSpec(source=str(path), format=path.suffix[1:], fields=FieldsSpec(x=x, **names), **fields)  # type: ignore[arg-type]
    return open_reader(spec)


def unpacked(reader: Reader, **options: Any) -> tuple[dict[str, np.ndarray], list[str], dict[str, str]]:
    """All good values by argument, their ids, and the reasons for bad records by id."""
    assert reader.packing is not None
    batches = list(reader.batches(batch_size=4, **options))
    rows = np.concatenate([batch.x for batch in batches])
    values = {path: found.copy() for path, found in reader.packing.unpack(rows).items()}
    bad = {record.id: record.reason for batch in batches for record in batch.bad}
    return values, [i for batch in batches for i in batch.ids], bad


@pytest.mark.parametrize("store", [pq_file, csv])
@pytest.mark.parametrize("large", [False, True])
def test_columns_of_a_table_become_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Callable[..., Path], *, large: bool
) -> None:
    """A column of numbers is one number a record, several are a vector; large files are read in blocks."""
    if large:
        monkeypatch.setattr(csv_file, "WHOLE_BYTES", 0)
        monkeypatch.setattr(csv_cuts, "CUT_BYTES", 200, raising=False)
        monkeypatch.setattr(parquet, "BLOCK_BYTES", 64)
    with opened(store(tmp_path, scalars()), ARGUMENTS, id="id") as reader:
        assert reader.packing is not None
        assert reader.packing.words == PACKED
        assert (reader.signature.shape, reader.signature.dtype) == ((reader.packing.nbytes,), "uint8")
        values, ids, bad = unpacked(reader)
        assert ids == [f"r{i}" for i in range(N)]
        assert bad == {}
        for path, wanted in {"age": AGE, "meta.count": COUNT, "meta.vector": VECTOR}.items():
            np.testing.assert_array_equal(values[path], wanted)
        shuffled = np.random.default_rng(0).permutation(N)
        np.testing.assert_array_equal(unpacked(reader, order=shuffled)[0]["age"], AGE[shuffled])


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_arrays_of_an_archive_become_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, compressed: bool, left: bool
) -> None:
    """Of any type and layout, in memory or left in the file; they cross as they are stored."""
    if left:
        monkeypatch.setattr("nimble_jobs.data.arrays.LEAVE_FROM_BYTES", 0)
    ids, mask = RANDOM.integers(0, 999, (N, 5)).astype(np.int16), RANDOM.random((N, 5)) > 0.5
    grid = np.asfortranarray(RANDOM.random((N, 2, 3)).astype(np.float16))
    columns = {"ids": ids, "mask": mask, "grid": grid, "age": AGE, "names": [f"n{i}" for i in range(N)]}
    path = npz(tmp_path, columns, compressed=compressed)
    arguments = {"input_ids": "ids", "mask": "mask", "x.0": "grid", "x.1": "age"}
    with opened(path, arguments, id="names") as reader:
        assert reader.packing is not None
        assert reader.packing.words == {
            "input_ids": "int16[5] integer",
            "mask": "bool[5] bool",
            "x.0": "float16[2, 3] float",
            "x.1": "float64[] float",
        }
        values, names, _ = unpacked(reader)
        assert names[3] == "n3"
        for argument, wanted in {"input_ids": ids, "mask": mask, "x.0": grid, "x.1": AGE}.items():
            np.testing.assert_array_equal(values[argument], wanted)


def test_the_same_column_may_be_two_arguments(tmp_path: Path) -> None:
    """Both get its values."""
    with opened(npz(tmp_path, {"age": AGE}), {"a": "age", "b": "age"}) as reader:
        values, _, _ = unpacked(reader)
        np.testing.assert_array_equal(values["a"], values["b"])


def test_batches_lie_in_the_buffers_that_they_are_given(tmp_path: Path) -> None:
    """So that they can be copied to a device from pinned memory."""
    with opened(pq_file(tmp_path, scalars()), ARGUMENTS) as reader:
        buffers = Buffers(3, 4 * reader.signature.shape[0])
        buffers.begin()
        found = []
        for batch in reader.batches(batch_size=4, buffers=buffers):
            assert batch.buffer is not None
            assert np.shares_memory(batch.x, batch.buffer.array)
            assert reader.packing is not None
            found.append(reader.packing.unpack(batch.x)["age"].copy())
            batch.release()
        np.testing.assert_array_equal(np.concatenate(found), AGE)
        buffers.end()
        buffers.close()


def encoded(side: int, colour: int) -> bytes:
    image = np.full((side, side, 3), colour, dtype=np.uint8)
    image[0, 0] = (255, 0, 0)
    file = BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def test_encoded_pictures_beside_numbers(tmp_path: Path) -> None:
    """The host decodes and resizes them; scale, mean and std are left to the device, as for a model with one input."""
    pictures = [encoded(6 + i % 2, 10 * i) for i in range(N)]
    pictures[5] = b"no picture"
    path = pq_file(tmp_path, {"picture": pa.array(pictures), "age": AGE})
    transform = TransformSpec(resize=(4, 4), mean=(0.5,), std=(0.25,))
    with opened(path, {"pixel_values": "picture", "age": "age"}, transform=transform) as reader:
        assert reader.packing is not None
        assert reader.packing.words["pixel_values"] == "uint8[4, 4, 3] float: hwc, /255, mean 0.5, std 0.25"
        values, ids, bad = unpacked(reader)
        layout = reader.packing
    assert list(bad) == ["5"]
    assert bad["5"].startswith("pixel_values: cannot be decoded")
    with opened(path, "picture", transform=transform) as alone:
        wanted = np.concatenate([batch.x for batch in alone.batches(batch_size=4)])

    class Given(nn.Module):
        def forward(self, pixel_values: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
            return pixel_values

    module = Packed(Given(), layout, torch.float32, torch.device("cpu"))
    found = module(torch.from_numpy(layout.pack(values)))
    torch.testing.assert_close(found, torch.from_numpy(wanted), atol=0, rtol=0)
    np.testing.assert_array_equal(values["age"], np.delete(AGE, 5))
    assert len(ids) == N - 1


def test_uint8_arrays_are_images_and_nothing_else_takes_the_transform(tmp_path: Path) -> None:
    """Tables of bytes in one axis, and fractions in three, reach the model as they are stored."""
    images = RANDOM.integers(0, 256, (N, 5, 6, 3)).astype(np.uint8)
    grey = images[..., 0]
    types, grid = images[:, 0, :, 0], RANDOM.random((N, 5, 6, 3)).astype(np.float32)
    path = npz(tmp_path, {"images": images, "grey": grey, "types": types, "grid": grid})
    arguments = {"a": "images", "b": "grey", "token_type_ids": "types", "grid": "grid", "x.pair_mask": "grey"}
    with opened(path, arguments, transform=TransformSpec(scale=0.5)) as reader:
        assert reader.packing is not None
        assert reader.packing.words == {
            "a": "uint8[5, 6, 3] float: hwc, *0.5",
            "b": "uint8[5, 6] float: hw, *0.5",
            "grid": "float32[5, 6, 3] float",
            "token_type_ids": "uint8[6] integer",
            "x.pair_mask": "uint8[5, 6] integer",
        }


def test_records_with_a_bad_input_are_left_out(tmp_path: Path) -> None:
    """NaN, missing numbers, and lists of another length: the reason names the argument and the column."""
    lists = [[1, 2]] * N
    lists[2] = [1]
    count: list[int | None] = [*COUNT.tolist()]
    count[4] = None
    age = AGE.copy()
    age[6] = np.nan
    path = pq_file(tmp_path, {"lists": pa.array(lists), "count": pa.array(count), "age": age})
    arguments = {"x": "lists", "meta.count": "count", "meta.age": "age"}
    with opened(path, arguments) as reader:
        values, ids, bad = unpacked(reader)
    assert bad == {
        "2": "x: column 'lists' holds 1 value on axis 0; expected shape (2,)",
        "4": "meta.count: column 'count' is empty; expected a number",
        "6": f"{path}: record 6: meta.age: 1 of 1 values are NaN or infinite; expected finite numbers",
    }
    kept = [int(i) for i in ids]
    assert kept == [i for i in range(N) if i not in (2, 4, 6)]
    np.testing.assert_array_equal(values["meta.age"], AGE[kept])
    np.testing.assert_array_equal(values["meta.count"], COUNT[kept])
    with opened(path, arguments, allow_nan=True) as reader:
        assert list(unpacked(reader)[2]) == ["2", "4"]


def test_bad_lines_of_a_csv_file_are_left_out(tmp_path: Path) -> None:
    """A line of another length, and a cell that is no number."""
    path = tmp_path / "d.csv"
    path.write_text("a,b\n1,2\n3\n5,six\n7,8\n")
    with opened(path, {"first": "a", "second": "b"}) as reader:
        values, _, bad = unpacked(reader)
    assert values["first"].tolist() == [1, 7]
    assert values["second"].tolist() == [2, 8]
    assert [reason.removeprefix(f"{path}:") for reason in bad.values()] == [
        "3: line has 1 cell; expected 2",
        "4: second: column 'b' holds 'six'; expected a number",
    ]


def test_types_that_no_device_has_are_made_ready_by_the_host(tmp_path: Path) -> None:
    """uint64, and arrays in the other byte order."""
    path = npz(tmp_path, {"a": COUNT.astype(np.uint64) % 50, "b": AGE.astype(">f4")})
    with opened(path, {"a": "a", "b": "b"}) as reader:
        assert reader.packing is not None
        assert reader.packing.words == {"a": "int64[] integer", "b": "float32[] float"}
        values, _, _ = unpacked(reader)
        np.testing.assert_array_equal(values["a"], (COUNT.astype(np.uint64) % 50).astype(np.int64))
        np.testing.assert_array_equal(values["b"], AGE.astype(np.float32))


def refusal(path: Path, x: Any, **options: Any) -> str:
    with pytest.raises(DataError) as raised:
        opened(path, x, **options)
    return str(raised.value).removeprefix(f"{path}: ")


def test_what_a_file_cannot_give(tmp_path: Path) -> None:
    """Each error names the file and the argument, and says what was expected."""
    path = npz(tmp_path, {"a": AGE, "b": AGE[:5], "text": np.array(["x"] * N), "one": np.float32(1)})
    assert refusal(path, {"x": "c"}) == "input.fields.x.x: no 'c'; expected one of: a, b, text, one"
    assert refusal(path, {"x": "a", "y.z": "b"}) == "input.fields.x: y.z has 5 records; expected 23, as x has"
    assert refusal(path, {"x": "text"}) == "input.fields.x.x: holds text; expected numbers"
    assert refusal(path, {"x": "one"}).startswith("input.fields.x.x: the array has no axes")
    assert refusal(path, {"x": "a"}, transform=TransformSpec(mean=(0.5,))) == (
        "input.transform: none of the inputs is an image; expected encoded pictures or uint8 arrays of 2 or 3 axes, "
        "or no transform"
    )
    path = pq_file(tmp_path, {"a": AGE, "text": ["x"] * N, "never": pa.array([[]] * N, type=pa.list_(pa.int32()))})
    assert refusal(path, {"x.y": "c"}) == "input.fields.x.x.y: no 'c'; expected one of: a, text, never"
    assert refusal(path, {"x": "text"}) == "input.fields.x.x: 'text': column 'text': holds string; expected numbers"
    empty = "input.fields.x.x: 'never': every record is empty; expected lists of numbers"
    assert refusal(path, {"x": "never"}) == empty


def test_files_that_differ(tmp_path: Path) -> None:
    """Files of one input must hold the same types; the error names the argument and both files."""
    (tmp_path / "d").mkdir()
    np.savez(tmp_path / "d" / "1.npz", a=AGE, b=COUNT)
    np.savez(tmp_path / "d" / "2.npz", a=AGE, b=COUNT.astype(np.int32))
    spec = InputSpec(source=str(tmp_path / "d"), format="npz", fields=FieldsSpec(x={"a": "a", "c": "b"}))
    with pytest.raises(DataError) as raised:
        open_reader(spec)
    assert str(raised.value) == (
        f"{tmp_path}/d/2.npz: records of c are int32[] integer; expected int64[] integer, as in {tmp_path}/d/1.npz"
    )
    np.savez(tmp_path / "d" / "2.npz", a=AGE + 1, b=COUNT)
    with open_reader(spec) as reader:
        values, _, _ = unpacked(reader)
    np.testing.assert_array_equal(values["a"], np.concatenate([AGE, AGE + 1]))


def test_files_that_were_listed_earlier(tmp_path: Path) -> None:
    """One that cannot be read is a bad record, beside the rows of the others."""
    for number in (1, 2):
        np.savez(tmp_path / f"{number}.npz", a=AGE + number, b=COUNT)
    files = []
    for path in sorted(tmp_path.iterdir()):
        found = path.stat()
        files.append(InputFile(path=path.name, size=found.st_size, mtime_ns=found.st_mtime_ns, inode=found.st_ino))
    (tmp_path / "1.npz").write_bytes(b"nothing")
    listed = FileList(root=str(tmp_path), listed_at=0.0, after_run=0, counts=Counts(), files=files)
    spec = InputSpec(source=str(tmp_path), format="npz", fields=FieldsSpec(x={"a": "a", "c": "b"}))
    with open_reader(spec, files=listed) as reader:
        values, ids, bad = unpacked(reader)
    assert list(bad) == ["1.npz"]
    assert ids[0] == "2.npz:0"
    np.testing.assert_array_equal(values["a"], AGE + 2)
