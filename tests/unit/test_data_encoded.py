"""Pictures that are left to a device: what it gets, and what is decoded here instead."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from nimble_jobs.data import Batch, Reader, Wanted, encoded, open_reader, reader
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.decoding.picture import pixels
from nimble_jobs.decoding.pool import Decoders
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.transform import TransformSpec

RNG = np.random.default_rng(0)
RECIPE = Recipe(channels=3, resize=(16, 12), center_crop=None, size=(16, 12))
TRANSFORM = TransformSpec(resize=(16, 12))  # type: ignore[arg-type]


def made(kind: str, mode: str = "RGB", **options: object) -> bytes:
    shape = (int(RNG.integers(20, 60)), int(RNG.integers(20, 60)), 3)
    sink = BytesIO()
    image = Image.fromarray(RNG.integers(0, 256, size=shape, dtype=np.uint8)).convert(mode)
    image.save(sink, kind, **options)
    return sink.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return made("JPEG", exif=exif)


def all_kinds() -> dict[str, tuple[bytes, bool | None]]:
    """Files, and whether a device gets them; None: bad records."""
    plain = made("JPEG")
    return {
        "00.jpg": (plain, True),
        "01.jpg": (made("JPEG", progressive=True), False),
        "02.jpg": (made("JPEG", "L"), True),
        "03.jpg": (made("JPEG", subsampling=0, quality=95), True),
        "04.png": (made("PNG"), False),
        "05.jpg": (made("JPEG", "CMYK"), False),
        "06.jpg": (turned(), False),
        "07.jpg": (plain[: len(plain) // 2], None),
        "08.jpg": (b"", None),
        "09.jpg": (made("PNG"), False),
        "10.jpg": (plain + b"\0" * 7, False),
        "11.jpg": (plain, True),
    }


@pytest.fixture(params=["threads", "processes"])
def decoders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoders | None]:
    monkeypatch.setattr(reader, "FEW", 1)
    found = Decoders(2) if request.param == "processes" else None
    yield found
    if found is not None:
        found.close()


def check(batches: list[Batch], source: Reader, kinds: dict[str, tuple[bytes, bool | None]], tied: bool) -> None:
    """Every good record is there, encoded or decoded as it should be, with its header's size."""
    expected = list(source.batches(batch_size=5, wanted=Wanted(stored=True)))
    for batch, plain in zip(batches, expected, strict=True):
        assert (batch.ids, [b.id for b in batch.bad]) == (plain.ids, [b.id for b in plain.bad])
        assert batch.bad == plain.bad
        assert batch.x.shape[0] == 0
        found = batch.pictures
        assert found is not None
        assert len(found) == len(plain.ids)
        for row, name in enumerate(batch.ids):
            data, left = list(kinds.values())[int(batch.indexes[row])]
            assert found.decoded[row] == (not left), name
            if found.decoded[row]:
                np.testing.assert_array_equal(found.bytes_of(row), plain.x[row].reshape(-1))
            else:
                assert found.bytes_of(row).tobytes() == data
                with Image.open(BytesIO(data)) as image:
                    assert tuple(found.sizes[row]) == (image.height, image.width)
                np.testing.assert_array_equal(pixels(BytesIO(data), RECIPE), plain.x[row])
            np.testing.assert_array_equal(source.redo(int(batch.indexes[row])), plain.x[row])
        for bad in batch.bad:
            assert source.redo(bad.index) == bad.reason
        if tied:
            assert batch.buffer is not None
            assert found.data.ctypes.data == batch.buffer.array.ctypes.data


@pytest.mark.parametrize("tied", [False, True])
def test_files_are_left_encoded_where_all_decoders_agree(tmp_path: Path, decoders: Decoders | None, tied: bool) -> None:
    """Anything else is decoded here, alone; what cannot be is a bad record, as without a device."""
    kinds = all_kinds()
    for name, (data, _) in kinds.items():
        (tmp_path / name).write_bytes(data)
    spec = InputSpec(source=str(tmp_path), format="images", transform=TRANSFORM)
    with open_reader(spec) as source:
        assert source.decodes
        if decoders is not None:
            source.hire(decoders)
        with Buffers(4, 5 * source.encoded_bytes) as buffers:
            found = list(source.batches(batch_size=5, wanted=Wanted(encoded=True), buffers=buffers if tied else None))
            check(found, source, kinds, tied)
            del found


def test_pictures_in_a_table_go_the_same_way(tmp_path: Path, decoders: Decoders | None) -> None:
    """Empty cells are bad records; row groups end anywhere in a batch."""
    kinds = {name: kind for name, kind in all_kinds().items() if kind[0]}
    kinds = dict(sorted({**kinds, "99": (b"", None)}.items()))
    table = pa.table({"name": list(kinds), "image": [data or None for data, _ in kinds.values()]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    spec = InputSpec(
        source=str(tmp_path / "a.parquet"),
        format="parquet",
        fields=FieldsSpec(x="image", id="name"),
        transform=TRANSFORM,
    )
    with open_reader(spec) as source:
        if decoders is not None:
            source.hire(decoders)
        found = list(source.batches(batch_size=5, wanted=Wanted(encoded=True)))
        check(found, source, kinds, False)


def test_a_large_file_is_decoded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes of a picture depends on nothing but itself."""
    monkeypatch.setattr(encoded, "_LARGEST", 1)
    for name, side in (("a.jpg", 200), ("b.jpg", 8)):
        pixels_of = RNG.integers(0, 256, size=(side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels_of).save(tmp_path / name, quality=95)
    spec = InputSpec(source=str(tmp_path), format="images", transform=TRANSFORM)
    with open_reader(spec) as source:
        assert source.encoded_bytes < (tmp_path / "a.jpg").stat().st_size
        (batch,) = source.batches(batch_size=2, wanted=Wanted(encoded=True))
    assert batch.pictures is not None
    assert batch.pictures.decoded.tolist() == [True, False]
