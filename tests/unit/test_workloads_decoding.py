"""The stage that decodes on the device, with decoders of the CPU in their place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nimble_jobs.data import Batch
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.engine.arrivals import Arrivals
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.pictures import Pictures
from nimble_jobs.pipeline import Meter
from nimble_jobs.workloads.decoding import DeviceDecoding, Redo
from tests.photographs import batch, by_pillow, jpeg, photographs

CPU = torch.device("cpu")
SIZE = (24, 32)
RECIPE = Recipe(channels=3, size=SIZE, resize=SIZE)


def stage(redo: Redo, rows: int = 4) -> DeviceDecoding:
    arrivals = Arrivals((rows, *SIZE, 3), torch.uint8, CPU, in_flight=1)
    return DeviceDecoding(redo, arrivals, Meter("decode"), lambda: PictureDecoder(CPU, RECIPE))


def batch_of(pictures: Pictures, names: Sequence[str]) -> Batch:
    buffer = Buffers(1, 8).take()
    return Batch(
        start=0,
        stop=len(names),
        indexes=np.arange(len(names)),
        ids=list(names),
        x=np.empty((0, *SIZE, 3), dtype=np.uint8),
        labels=np.arange(len(names)) * 10,
        bad=(),
        buffer=buffer,
        pictures=pictures,
    )


def test_pictures_become_rows_of_pixels() -> None:
    """Each near what Pillow makes of it; the last is repeated in a short batch, and the buffer is free again."""
    names = ["china", "coffee", "chelsea"]
    encoded = [jpeg(photographs()[name]) for name in names]
    decoding = stage(lambda index: f"record {index} was redone")
    whole = batch_of(batch(encoded), names)
    found = decoding(whole)
    assert found is not None
    arrived, left = found
    assert arrived is not None
    assert left.ids == names
    for row, data in enumerate(encoded):
        expected = by_pillow(data, 3, SIZE).astype(int)
        assert np.abs(arrived.x[row].numpy().astype(int) - expected).max() <= 4
    assert torch.equal(arrived.x[3], arrived.x[2])
    decoding.close()


def test_what_fails_is_redone_alone_and_what_is_bad_leaves_its_batch() -> None:
    """The others keep their order, labels and pixels."""
    names = ["china", "broken", "coffee", "redone"]
    good = [jpeg(photographs()[name]) for name in ("china", "coffee")]
    broken = good[0][:200]
    pictures = batch([good[0], broken, good[1], broken], [(427, 640), (427, 640), (400, 600), (427, 640)])
    pixels = np.full((*SIZE, 3), 77, dtype=np.uint8)
    decoding = stage(lambda index: {1: "cannot be decoded: truncated", 3: pixels}[index])
    found = decoding(batch_of(pictures, names))
    assert found is not None
    arrived, left = found
    assert arrived is not None
    assert left.ids == ["china", "coffee", "redone"]
    assert left.indexes.tolist() == [0, 2, 3]
    assert left.labels is not None
    assert left.labels.tolist() == [0, 20, 30]
    assert [(bad.index, bad.id, bad.reason) for bad in left.bad] == [(1, "broken", "cannot be decoded: truncated")]
    assert arrived.x[2].unique().tolist() == [77]
    assert torch.equal(arrived.x[3], arrived.x[2])
    expected = by_pillow(good[1], 3, SIZE).astype(int)
    assert np.abs(arrived.x[1].numpy().astype(int) - expected).max() <= 4
    decoding.close()


def test_a_batch_without_a_good_picture_takes_no_slot() -> None:
    """It goes on as bad records alone."""
    decoding = stage(lambda _: "broken")
    found = decoding(batch_of(batch([b"no picture"], [(10, 10)]), ["a"]))
    assert found is not None
    arrived, left = found
    assert arrived is None
    assert (left.ids, [bad.id for bad in left.bad]) == ([], ["a"])
    decoding.close()
