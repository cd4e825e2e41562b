"""Every reader keeps the same promises: same records, same ids, order, resumption, bad records, errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nimble_jobs.data import Batch, Reader, Wanted, arrays, csv_cuts, csv_file, open_reader, parquet
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.data.transform import on_host
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.transform import TransformSpec

N = 13
IDS = [f"{'ab'[i % 2]}/{i:03}.png" for i in range(N)]  # what an image folder calls them
SORTED = np.argsort(IDS, kind="stable")
LABELS = np.arange(N) % 3


@dataclass(frozen=True)
class Case:
    """How one format stores records, given as an array [N, ...] in the order of IDS."""

    format: str
    store: Callable[[Path, np.ndarray], Path]
    x: str = "x"
    id: str | None = "id"
    label: str | None = "label"


def _npy(folder: Path, x: np.ndarray) -> Path:
    np.save(folder / "d.npy", x)
    return folder / "d.npy"


def _npz(folder: Path, x: np.ndarray) -> Path:
    np.savez(folder / "d.npz", x=x, id=np.array(IDS), label=LABELS)
    return folder / "d.npz"


def _npz_compressed(folder: Path, x: np.ndarray) -> Path:
    np.savez_compressed(folder / "d.npz", x=np.asfortranarray(x), id=np.array(IDS), label=LABELS.astype(np.uint8))
    return folder / "d.npz"


def _parquet(folder: Path, x: Any) -> Path:
    table = pa.table({"label": LABELS, "id": IDS, "x": x})
    pq.write_table(table, folder / "d.parquet", row_group_size=5)
    return folder / "d.parquet"


def _parquet_lists(folder: Path, x: np.ndarray) -> Path:
    return _parquet(folder, pa.array([r.tolist() for r in x], type=_list_type(x)))


def _list_type(x: np.ndarray) -> pa.DataType:
    kind = pa.from_numpy_dtype(x.dtype)
    for _ in x.shape[1:]:
        kind = pa.list_(kind)
    return kind


def _parquet_fixed(folder: Path, x: np.ndarray) -> Path:
    flat = pa.array(x.reshape(-1))
    for length in reversed(x.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, length)
    return _parquet(folder, flat)


def _parquet_columns(folder: Path, x: np.ndarray) -> Path:
    table = pa.table({"label": LABELS, "id": IDS, **{f"f{j}": x[:, j] for j in range(x.shape[1])}})
    pq.write_table(table, folder / "d.parquet", row_group_size=4)
    return folder / "d.parquet"


def _csv(folder: Path, x: np.ndarray) -> Path:
    table = pa.table({"id": IDS, **{f"f{j}": x[:, j] for j in range(x.shape[1])}, "label": LABELS})
    pyarrow.csv.write_csv(table, folder / "d.csv")
    return folder / "d.csv"


def _two_files(folder: Path, x: np.ndarray) -> Path:
    (folder / "many").mkdir()
    for i, part in enumerate((slice(0, 6), slice(6, N))):
        np.savez(folder / "many" / f"{i}.npz", x=x[part], id=np.array(IDS[part]), label=LABELS[part])
    return folder / "many"


def _png(x: np.ndarray) -> bytes:
    from io import BytesIO

    sink = BytesIO()
    Image.fromarray(x).save(sink, "PNG")
    return sink.getvalue()


def _images(folder: Path, x: np.ndarray) -> Path:
    for name, pixels in zip(IDS, x, strict=True):
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_png(pixels))
    (folder / "images" / "README.txt").write_text("not an image")
    return folder / "images"


def _image_glob(folder: Path, x: np.ndarray) -> Path:
    return _images(folder, x) / "*" / "*.png"


def _parquet_png(folder: Path, x: np.ndarray) -> Path:
    return _parquet(folder, [_png(p) for p in x])


VECTORS = {
    "npy": Case("npy", _npy, id=None, label=None),
    "npz": Case("npz", _npz),
    "npz-compressed": Case("npz", _npz_compressed),
    "npz-folder": Case("npz", _two_files),
    "parquet-lists": Case("parquet", _parquet_lists),
    "parquet-fixed": Case("parquet", _parquet_fixed),
    "parquet-columns": Case("parquet", _parquet_columns, x="f*"),
    "csv": Case("csv", _csv, x="f0,f1, f2,f3"),
}
IMAGES = {
    "npy": Case("npy", _npy, id=None, label=None),
    "npz": Case("npz", _npz),
    "npz-compressed": Case("npz", _npz_compressed),
    "parquet-lists": Case("parquet", _parquet_lists),
    "parquet-fixed": Case("parquet", _parquet_fixed),
    "parquet-png": Case("parquet", _parquet_png),
    "images": Case("images", _images, id=None, label="parent"),
    "images-glob": Case("images", _image_glob, id=None, label=None),
}
vectors = pytest.mark.parametrize("case", VECTORS.values(), ids=VECTORS)
pictures = pytest.mark.parametrize("case", IMAGES.values(), ids=IMAGES)


@pytest.fixture(params=[False, True], ids=["small", "large"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with inputs read whole, and with arrays left in their file and tables read record by record."""
    if request.param:
        monkeypatch.setattr(arrays, "LEAVE_FROM_BYTES", 0)
        for module in (parquet, csv_file):
            monkeypatch.setattr(module, "BLOCK_BYTES", 1)
        monkeypatch.setattr(csv_file, "WHOLE_BYTES", 0)
        monkeypatch.setattr(csv_cuts, "CUT_BYTES", 16)


def spec_of(case: Case, source: Path, **more: Any) -> InputSpec:
    fields = FieldsSpec(x=case.x, id=case.id, label=case.label)
    return InputSpec(source=str(source), format=case.format, fields=fields, **more)  # type: ignore[arg-type]


def numbers() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)


def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, size=(N, 6, 5), dtype=np.uint8)


def whole(reader: Reader, **how: Any) -> Batch:
    return reader.take(np.arange(reader.total))


def in_order(case: Case) -> np.ndarray:
    return SORTED if case.format == "images" else np.arange(N)


@pytest.mark.usefixtures("_sizes")
@vectors
def test_vectors_are_the_same_from_every_format(case: Case, tmp_path: Path) -> None:
    """Float records come out as stored, with their ids and labels, whatever the format."""
    x = numbers()
    with open_reader(spec_of(case, case.store(tmp_path, x))) as reader:
        assert (reader.total, reader.signature.shape, reader.signature.dtype) == (N, (4,), "float32")
        batch = whole(reader)
    np.testing.assert_array_equal(batch.x, x)
    assert batch.x.flags.c_contiguous
    assert batch.ids == (IDS if case.id else [str(i) for i in range(N)])
    if case.label:
        assert batch.labels is not None
        np.testing.assert_array_equal(batch.labels, LABELS)
        assert batch.labels.dtype == np.int64
    assert batch.bad == ()


@pytest.mark.usefixtures("_sizes")
@pictures
def test_images_are_the_same_from_every_format(case: Case, tmp_path: Path) -> None:
    """Grey 8-bit images come out as the same three float channels, scaled and normalised, whatever the format."""
    x = pixels()
    transform = TransformSpec(channels=3, mean=(0.5,), std=(0.25, 0.5, 0.125))
    with open_reader(spec_of(case, case.store(tmp_path, x), transform=transform)) as reader:
        assert reader.signature.shape == (3, 6, 5)
        batch = whole(reader)
    expected = np.repeat(x[in_order(case), None].astype(np.float32) / 255, 3, axis=1)
    expected = (expected - 0.5) / np.array([0.25, 0.5, 0.125], dtype=np.float32)[:, None, None]
    np.testing.assert_allclose(batch.x, expected, atol=1e-6)
    if case.format == "images":
        assert batch.ids == sorted(IDS)
    if case.label == "parent":
        assert reader.label_names == ("a", "b")
        assert batch.labels is not None
        assert batch.labels.tolist() == [0 if i.startswith("a") else 1 for i in sorted(IDS)]


@pictures
def test_resized_images_agree_within_rounding(case: Case, tmp_path: Path) -> None:
    """Files are resized in 8 bits and arrays in floats: the same up to the rounding of a pixel."""
    x = pixels()
    transform = TransformSpec(resize=(12, 9), center_crop=(10, 9), channels=1)
    with open_reader(spec_of(case, case.store(tmp_path, x), transform=transform)) as reader:
        batch = whole(reader)
    wanted = np.stack([np.asarray(Image.fromarray(p).resize((9, 12), Image.Resampling.BILINEAR)) for p in x])
    wanted = wanted[in_order(case), None, 1:11].astype(np.float32) / 255
    assert batch.x.shape == wanted.shape
    assert np.abs(batch.x - wanted).max() <= 1.01 / 255


@vectors
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_batches_cover_any_range_once_and_in_order(
    case: Case, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any start, stop and batch size give the same records as slicing, so a job can go on at any shard."""
    folder = tmp_path_factory.mktemp("d")
    x = numbers()
    start = data.draw(st.integers(0, N))
    stop = data.draw(st.integers(start, N))
    size = data.draw(st.integers(1, N + 2))
    with open_reader(spec_of(case, case.store(folder, x))) as reader:
        batches = list(reader.batches(start, stop, batch_size=size))
    assert [(b.start, b.stop) for b in batches] == [(a, min(a + size, stop)) for a in range(start, stop, size)]
    if batches:
        np.testing.assert_array_equal(np.concatenate([b.x for b in batches]), x[start:stop])
        assert np.concatenate([b.indexes for b in batches]).tolist() == list(range(start, stop))


@vectors
def test_records_can_be_taken_in_any_order(case: Case, tmp_path: Path) -> None:
    """`take` and a shuffled order give the rows asked for, repeated ones included."""
    x = numbers()
    order = np.array([12, 0, 5, 5, 3])
    with open_reader(spec_of(case, case.store(tmp_path, x))) as reader:
        batch = reader.take(order)
        shuffled = list(reader.batches(batch_size=2, order=order))
        assert len(reader.take(np.array([], dtype=np.int64))) == 0
        with pytest.raises(IndexError, match=r"\[0, 13\)"):
            reader.take(np.array([N]))
    np.testing.assert_array_equal(batch.x, x[order])
    assert batch.indexes.tolist() == order.tolist()
    np.testing.assert_array_equal(np.concatenate([b.x for b in shuffled]), x[order])


@pytest.mark.parametrize(
    ("case", "image"),
    [*((case, False) for case in VECTORS.values()), *((case, True) for case in IMAGES.values())],
    ids=[*VECTORS, *(f"{name}-of-images" for name in IMAGES)],
)
def test_stored_records_become_the_hosts(case: Case, image: bool, tmp_path: Path) -> None:
    """What every format hands out for the device turns into what it makes itself, with the same bad records."""
    x: np.ndarray = pixels() if image else numbers()
    transform = TransformSpec(channels=3, mean=(0.5,), std=(0.25, 0.5, 0.125)) if image else TransformSpec(scale=2.0)
    if not image:
        x[3, 1], x[7, 0] = np.nan, -np.inf
    with open_reader(spec_of(case, case.store(tmp_path, x), transform=transform)) as reader:
        assert reader.preprocess is not None
        assert reader.preprocess.result == reader.signature.shape
        (own,), (stored,) = reader.batches(batch_size=N), reader.batches(batch_size=N, wanted=Wanted(stored=True))
        assert stored.x.dtype == reader.preprocess.dtype
        assert stored.x.shape[1:] == reader.preprocess.shape
        np.testing.assert_array_equal(on_host(reader.preprocess, stored.x), own.x)
        assert (stored.ids, stored.bad) == (own.ids, own.bad)
        assert len(own.bad) == (0 if image else 2)
    if image:
        assert reader.preprocess.dtype == "uint8"


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("case", {**VECTORS, "images": IMAGES["images"]}.values(), ids=[*VECTORS, "images"])
@pytest.mark.parametrize("count", [1, 3])
def test_buffers_hold_the_same_records(case: Case, count: int, tmp_path: Path) -> None:
    """With buffers, batches hold the same bytes, from the beginning of a buffer on, and no more buffers are needed."""
    x: np.ndarray = pixels() if case.format == "images" else numbers()
    if case.format != "images":
        x[4, 1] = np.nan
    with open_reader(spec_of(case, case.store(tmp_path, x))) as reader:
        kinds = [{}, *([{"wanted": Wanted(stored=True)}] if reader.preprocess else [])]
        for kind in kinds:
            own = list(reader.batches(batch_size=4, **kind))
            with Buffers(count, max(b.x.nbytes for b in own)) as buffers:
                seen = 0
                for mine, theirs in zip(reader.batches(batch_size=4, buffers=buffers, **kind), own, strict=True):
                    assert mine.buffer is not None
                    assert theirs.buffer is None
                    assert mine.x.ctypes.data == mine.buffer.array.ctypes.data
                    np.testing.assert_array_equal(mine.x, theirs.x)
                    assert (mine.ids, mine.bad) == (theirs.ids, theirs.bad)
                    mine.buffer.release()
                    seen += len(mine) + len(mine.bad)
                assert (seen, buffers.free) == (N, count)


@pytest.mark.parametrize("case", {**VECTORS, "images": IMAGES["images"]}.values(), ids=[*VECTORS, "images"])
def test_a_reader_that_stops_early_gives_its_buffers_back(case: Case, tmp_path: Path) -> None:
    """Whoever closes the iterator keeps the buffers of the batches that it got, and no others are missing."""
    with (
        open_reader(spec_of(case, case.store(tmp_path, pixels() if case.format == "images" else numbers()))) as reader,
        Buffers(3, 1 << 16) as buffers,
    ):
        batches = reader.batches(batch_size=2, buffers=buffers)
        first = next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert buffers.free == 2
        assert first.buffer is not None
        first.buffer.release()
        again = reader.batches(batch_size=2, buffers=buffers)
        next(again)
        buffers.end()
        assert len(list(again)) < N // 2  # what was under way


@vectors
def test_numbers_that_are_not_finite_make_a_record_bad(case: Case, tmp_path: Path) -> None:
    """NaN and infinities are named by index and id and leave the rest untouched; `allow_nan` lets them through."""
    x = numbers()
    x[3, 1], x[7, 0], x[7, 2] = np.nan, np.inf, -np.inf
    source = case.store(tmp_path, x)
    with open_reader(spec_of(case, source)) as reader:
        batches = list(reader.batches(batch_size=4))
        bad = [b for batch in batches for b in batch.bad]
    assert [(b.index, b.id) for b in bad] == [(3, reader_id(case, 3)), (7, reader_id(case, 7))]
    assert "1 of 4 values are NaN or infinite" in bad[0].reason
    assert "2 of 4" in bad[1].reason
    np.testing.assert_array_equal(np.concatenate([b.x for b in batches]), np.delete(x, [3, 7], axis=0))
    assert [len(b.ids) for b in batches] == [3, 3, 4, 1]
    with open_reader(spec_of(case, source, allow_nan=True)) as reader:
        np.testing.assert_array_equal(whole(reader).x, x)


def reader_id(case: Case, index: int) -> str:
    return IDS[index] if case.id else str(index)


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("case", {**VECTORS, "images": IMAGES["images"]}.values(), ids=[*VECTORS, "images"])
def test_a_source_that_changes_is_an_error(case: Case, tmp_path: Path) -> None:
    """After the file was replaced or removed, readers that still need it say so instead of mixing two inputs."""
    image = case.format == "images"
    source = case.store(tmp_path, pixels() if image else numbers())
    reader = open_reader(spec_of(case, source))
    before = reader.fingerprint
    file = source / IDS[0] if image else next(source.glob("*.npz")) if source.is_dir() else source
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    if case.store is _npz_compressed or (arrays.LEAVE_FROM_BYTES > 0 and case.format in ("npy", "npz")):  # in memory
        assert whole(reader).bad == ()
    else:
        with pytest.raises(DataError, match=f"{file.name}: changed while it was read"):
            whole(reader)
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))
    with open_reader(spec_of(case, source)) as again:
        assert again.fingerprint != before


@pytest.mark.parametrize("case", {**VECTORS, "images": IMAGES["images"]}.values(), ids=[*VECTORS, "images"])
def test_closing_the_iterator_ends_its_threads(case: Case, tmp_path: Path) -> None:
    """A job that stops between two batches leaves no reading thread behind."""
    source = case.store(tmp_path, pixels() if case.format == "images" else numbers())
    with open_reader(spec_of(case, source)) as reader:
        batches = reader.batches(batch_size=2)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("nimble-read")]


@pytest.mark.parametrize("case", {**VECTORS, "images": IMAGES["images"]}.values(), ids=[*VECTORS, "images"])
@pytest.mark.parametrize("what", ["cut", "removed", "replaced"])
def test_no_buffer_is_lost_when_a_file_goes_while_it_is_read(
    case: Case, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that were handed out were read from the file that was opened; the error keeps no buffer."""
    image = case.format == "images"
    monkeypatch.setattr(arrays, "LEAVE_FROM_BYTES", 0)
    monkeypatch.setattr(csv_file, "WHOLE_BYTES", 0)
    x: np.ndarray = pixels() if image else numbers()
    source = case.store(tmp_path, x)
    with open_reader(spec_of(case, source)) as reader, Buffers(2, 1 << 12) as buffers:
        expected = whole(reader).x
        batches = reader.batches(batch_size=2, buffers=buffers)
        seen = [next(batches)]
        file = source / IDS[-1] if image else sorted(source.glob("*.npz"))[-1] if source.is_dir() else source
        if what == "cut":
            os.truncate(file, file.stat().st_size // 2)
        elif what == "removed":
            file.unlink()
        else:
            (tmp_path / "other").write_bytes(file.read_bytes())
            (tmp_path / "other").replace(file)
        in_memory = case.store in (_npz_compressed, _parquet_columns, _parquet_lists, _parquet_fixed, _csv)
        with nullcontext() if in_memory else pytest.raises(DataError, match=file.name):
            for batch in batches:
                seen.append(batch)
                assert seen[-2].buffer is not None
                seen[-2].buffer.release()
                np.testing.assert_array_equal(batch.x, expected[batch.start : batch.stop])
        assert seen[-1].buffer is not None
        seen[-1].buffer.release()
        assert buffers.free == 2


@vectors
def test_a_missing_file_is_named(case: Case, tmp_path: Path) -> None:
    """A source that is not there is an error with its path."""
    source = tmp_path / f"absent.{case.format}"
    with pytest.raises(DataError, match=f"absent.{case.format}: No such file"):
        open_reader(spec_of(case, source))


@pytest.mark.parametrize("name", ["npz", "parquet-lists", "csv"])
@pytest.mark.parametrize("which", ["x", "id", "label"])
def test_an_unknown_field_lists_what_is_there(name: str, which: str, tmp_path: Path) -> None:
    """A misspelt field is answered with the names that exist."""
    source = VECTORS[name].store(tmp_path, numbers())
    known = {"x": "f0" if name == "csv" else "x", "id": "id", "label": "label"}
    spec = InputSpec(source=str(source), format=VECTORS[name].format, fields=FieldsSpec(**{**known, which: "nope"}))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"input\.fields\.{which}: no 'nope'; expected one of: .*label"):
        open_reader(spec)


@vectors
def test_no_records_is_an_error(case: Case, tmp_path: Path) -> None:
    """An input without records is refused, not scored into nothing."""
    source = tmp_path / f"d.{case.format}"
    if case.format == "npy":
        np.save(source, np.empty((0, 4), np.float32))
    elif case.format == "npz":
        np.savez(source, x=np.empty((0, 4), np.float32), id=np.array([], np.str_), label=np.array([], np.int64))
    elif case.format == "csv":
        source.write_text("id,f0,f1,f2,f3,label\n")
    else:
        pq.write_table(
            pa.table(
                {
                    "id": pa.array([], pa.string()),
                    "label": pa.array([], pa.int64()),
                    "x": pa.array([], pa.list_(pa.float32())),
                    "f0": pa.array([], pa.float32()),
                }
            ),
            source,
        )
    with pytest.raises(DataError, match=r"d\.\w+: no records; expected at least one"):
        open_reader(spec_of(case, source))


@pytest.mark.parametrize("name", [n for n, c in VECTORS.items() if c.id])
def test_equal_ids_are_an_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two records under one id could not be told apart in the output."""
    monkeypatch.setitem(globals(), "IDS", [*IDS[:-1], IDS[2]])
    source = VECTORS[name].store(tmp_path, numbers())
    with pytest.raises(DataError, match=r"id 'a/002.png' at records 2 and 12"):
        open_reader(spec_of(VECTORS[name], source))


@pytest.mark.parametrize("name", ["npy", "npz", "npz-compressed", "parquet-lists"])
def test_a_truncated_file_is_an_error(name: str, tmp_path: Path) -> None:
    """A file that was cut off anywhere is refused by name."""
    source = VECTORS[name].store(tmp_path, numbers())
    data = source.read_bytes()
    for keep in (0, 1, 9, 70, len(data) // 2, len(data) - 1):
        source.write_bytes(data[:keep])
        with pytest.raises(DataError, match=source.name):
            open_reader(spec_of(VECTORS[name], source))
