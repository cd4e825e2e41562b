"""Order, augmentation and prefetching of training data: seeded, whole, and independent of who reads when."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nimble_jobs.chance import below, draws
from nimble_jobs.data import Reader, Signature, Wanted, open_reader
from nimble_jobs.errors import DataError
from nimble_jobs.spec import AugmentSpec, FieldsSpec, InputSpec, TransformSpec
from nimble_jobs.workloads.training.batches.augment import Augment, Pixels
from nimble_jobs.workloads.training.batches.epochs import Sampler, Segment, in_turn
from nimble_jobs.workloads.training.batches.feed import Feed, _part, lot_size
from nimble_jobs.workloads.training.batches.intake import Intake
from nimble_jobs.workloads.training.batches.lots import Checks, Draws, HostBatch, Lot, read
from tests.augmented import changed
from tests.waiting import PATIENCE_S

HOST = Intake(torch.device("cpu"))


@given(
    total=st.integers(1, 200),
    size=st.integers(1, 40),
    seed=st.integers(0, 2**70),
    epoch=st.integers(1, 1000),
    keep=st.booleans(),
)
def test_an_epoch_holds_each_record_once(total: int, size: int, seed: int, epoch: int, keep: bool) -> None:
    """An epoch holds whole batches with `drop`, and with `keep` all records, but for one that no step can train on
    alone. They are always in the same order.
    """
    sampler = Sampler(total, size, seed=seed, last_batch="keep" if keep else "drop")
    order = sampler.order(epoch)
    alone = total > size and total % size == 1
    assert sampler.left_out == (keep and alone)
    assert len(set(order.tolist())) == len(order) == (total - alone if keep else total // size * size)
    assert sampler.batches == -(-len(order) // size)
    assert (order == Sampler(total, size, seed=seed, last_batch="keep" if keep else "drop").order(epoch)).all()


def images(count: int, *, channels: int = 1, size: int = 5) -> np.ndarray:
    return np.random.default_rng(1).uniform(1, 2, (count, channels, size, size)).astype(np.float32)


def augment(spec: AugmentSpec, x: np.ndarray, indexes: np.ndarray, epoch: int, *, seed: int = 0) -> np.ndarray:
    """The images `x`, changed on the host."""
    found = Augment(spec, Signature(shape=x.shape[1:], dtype="float32"), seed=seed)
    return Pixels(TransformSpec(), padding=spec.crop_padding)(x, found.places(indexes, epoch))


@given(st.permutations(range(12)), st.integers(1, 12), st.integers(0, 2**65))
def test_changes_depend_on_the_record_alone(order: list[int], cut: int, seed: int) -> None:
    """How a record is changed does not depend on the batch or on the other records that are read with it."""
    x = images(12)
    spec = AugmentSpec(crop_padding=2, flip="both")
    whole = augment(spec, x, np.arange(12), 3, seed=seed)
    indexes = np.array(order[:cut])
    assert (augment(spec, x[indexes], indexes, 3, seed=seed) == whole[indexes]).all()
    assert (augment(spec, x, np.arange(12), 4, seed=seed) != whole).any()


def test_every_crop_and_flip_comes() -> None:
    """All shifts are equally likely; so are the two flips, which are independent."""
    words = draws(7, 1, np.arange(100_000), 3)
    for column in range(2):
        counts = np.bincount(below(words[:, column], 5), minlength=5)
        assert (abs(counts - 20_000) < 600).all()
    assert abs(np.corrcoef(below(words[:, 0], 5), below(words[:, 1], 5))[0, 1]) < 0.02
    x = np.tile(np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5), (2000, 1, 1, 1))
    flipped = augment(AugmentSpec(flip="both"), x, np.arange(2000), 1)
    corners, counts = np.unique(flipped[:, 0, 0, 0], return_counts=True)
    assert corners.tolist() == [0, 4, 20, 24]
    assert (abs(counts - 500) < 100).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_way_gives_the_same_bits(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bytes or numbers, changed on the host or by a device's kernels, give the values that the reader's transform and
    the crops and flips of single images give; what comes in at the side is what a black pixel is after the transform.
    """
    n, channels = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3]))
    size = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    shape = (*size, channels) if data.draw(st.booleans()) else (channels, *size)
    ends = st.floats(-2, 2, width=32)
    mean = data.draw(st.none() | st.tuples(*[ends] * channels))
    std = data.draw(st.none() | st.tuples(*[st.floats(0.0625, 2, width=32)] * channels))
    layout: Any = "hwc" if shape[-1] == channels and shape[0] != channels else None
    transform = TransformSpec(mean=mean, std=std, scale=data.draw(st.none() | st.just(0.3)), layout=layout)
    augment = AugmentSpec(
        crop_padding=data.draw(st.integers(0, 4)),
        flip=data.draw(st.sampled_from([None, "horizontal", "vertical", "both"])),
    )
    stored = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 256, (n, *shape))
    stored = stored.astype(np.uint8 if data.draw(st.booleans()) else np.float32)
    spec = write(tmp_path_factory.mktemp("bits") / "d.npz", stored, np.zeros(n, dtype=np.int64), transform)
    indexes, epoch = np.arange(n), data.draw(st.integers(1, 5))
    with open_reader(spec) as reader:
        values = reader.take(indexes).x
        pixels = Pixels(transform, padding=augment.crop_padding)
        black = np.zeros((1, 1, 1), dtype=np.float32)
        for given_, apply in ((mean, np.subtract), (std, np.divide)):
            if given_ is not None:
                black = apply(black, np.array(given_, dtype=np.float32)[:, None, None])
        expected, places = values, None
        if augment.crop_padding or augment.flip:
            expected = changed(values, indexes, epoch, augment, seed=5, black=black)
            places = Augment(augment, reader.signature, seed=5).places(indexes, epoch)
        assert pixels(values, places).tobytes() == expected.tobytes()
        there = None if places is None else torch.from_numpy(places)
        on_device = pixels.on(torch.device("cpu"))
        assert on_device(torch.from_numpy(values), there).numpy().tobytes() == expected.tobytes()
        if reader.preprocess is None:  # numbers that might become infinite are made on the host
            return
        (batch,) = reader.batches(batch_size=n, wanted=Wanted(stored=True))
        assert batch.x.dtype == stored.dtype
        made = on_device(torch.from_numpy(batch.x), there, reader.preprocess)
        assert made.numpy().tobytes() == expected.tobytes()


def test_only_images_are_cropped() -> None:
    """Records that are not images are refused, with their shape."""
    with pytest.raises(DataError, match=r"train\.augment: records are float32 \[7\]; expected images, \[C, H, W\]"):
        Augment(AugmentSpec(flip="horizontal"), Signature(shape=(7,), dtype="float32"), seed=0)


def write(path: Path, x: np.ndarray, y: np.ndarray, transform: TransformSpec = TransformSpec()) -> InputSpec:  # noqa: B008
    np.savez(path, x=x, y=y)
    return InputSpec(source=str(path), format="npz", fields=FieldsSpec(label="y"), batch_size=4, transform=transform)


def segment(reader: Reader, **given_: Any) -> Segment:
    """All of a reader's records."""
    return Segment(lots=read(reader, HOST, **given_), batches=-(-reader.total // given_["batch_size"]))


def plain() -> Pixels:
    """Leaves values as they are."""
    return Pixels(TransformSpec())


@settings(max_examples=30, deadline=None)
@given(
    total=st.integers(1, 30),
    size=st.integers(1, 8),
    bad=st.sets(st.integers(0, 29)),
    at_least=st.integers(1, 2),
    skip=st.integers(0, 8),
    together=st.integers(1, 4),
)
def test_reading_on_is_reading(
    tmp_path_factory: pytest.TempPathFactory,
    total: int,
    size: int,
    bad: set[int],
    at_least: int,
    skip: int,
    together: int,
) -> None:
    """Going on after any batch gives what reading through would have given, in lots of any size; bad records are told
    once; one is last.
    """
    x = np.arange(total, dtype=np.float32).reshape(-1, 1) + 0.5
    x[[b for b in bad if b < total]] = np.nan
    spec = write(tmp_path_factory.mktemp("read") / "d.npz", x, np.arange(total))
    order = np.random.default_rng(0).permutation(total)

    def batches(skip: int, together: int = 1) -> list[tuple[HostBatch, list[float], list[int]]]:
        with open_reader(spec) as reader:
            lots = list(
                read(
                    reader,
                    HOST,
                    batch_size=size,
                    draws=Draws(order=order),
                    skip=skip,
                    at_least=at_least,
                    together=together,
                )
            )
        assert all(len(lot.batches) <= together for lot in lots)
        return [(b, lot.x[b.rows, 0].tolist(), lot.y[b.rows].tolist()) for lot in lots for b in lot.batches]

    def told(found: list[tuple[HostBatch, list[float], list[int]]]) -> list[tuple[Any, ...]]:
        return [(b.taken, b.records, b.bad, b.last, x, y) for b, x, y in found]

    whole = batches(0)
    assert [b.last for b, _, _ in whole] == [False] * (len(whole) - 1) + [True] * bool(whole)
    assert all(len(x) >= at_least for _, x, _ in whole)
    assert all([label + 0.5 for label in y] == x for _, x, y in whole)
    if whole:
        assert (whole[-1][0].taken, whole[-1][0].records) == (-(-total // size), total)
        assert sorted(r.index for b, _, _ in whole for r in b.bad) == sorted(b for b in bad if b < total)
    assert told(batches(0, together)) == told(whole)
    assume(skip == 0 or skip in {b.taken for b, _, _ in whole})  # a checkpoint lies behind a batch that was read
    again = batches(skip, together) if skip * size < total else []
    assert told(again) == told([found for found in whole if found[0].taken > skip])


@pytest.mark.parametrize("together", [2, 16])
def test_batches_of_a_lot_are_those_read_alone(tmp_path: Path, together: int) -> None:
    """Lots change nothing about moved and normalised images with bad records, over epochs and a validation."""
    x = np.random.default_rng(0).integers(0, 256, (23, 3, 5, 7), dtype=np.uint8)
    y = np.where(np.arange(23) % 9 == 4, np.nan, np.arange(23))
    transform = TransformSpec(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    spec = write(tmp_path / "d.npz", x, y, transform)

    def taken(together: int) -> list[tuple[Any, ...]]:
        with open_reader(spec, targets="numbers") as reader:
            augment = Augment(AugmentSpec(crop_padding=2, flip="both"), reader.signature, seed=3)
            segments = [
                segment(reader, batch_size=4, draws=Draws(places=partial(augment.places, epoch=1)), together=together),
                segment(reader, batch_size=4, together=together),
                segment(reader, batch_size=4, draws=Draws(places=partial(augment.places, epoch=2)), together=together),
            ]
            pixels = Pixels(transform, padding=2)
            with closing(Feed(in_turn(segments), pixels, HOST, batch_bytes=1, together=together)) as feed:
                found = [(n, batch) for n in range(3) for batch in feed.segment()]
        return [(n, b.host.taken, b.host.bad, b.x.numpy().tobytes(), b.y.tolist()) for n, b in found]

    assert taken(together) == taken(1)
    assert [n for n, *_ in taken(together)] == [0] * 6 + [1] * 6 + [2] * 6


def test_small_batches_make_lots() -> None:
    gpu = torch.device("cuda")
    assert [lot_size(n, gpu) for n in (0, 1, 393_216, 1 << 20, 3 << 20, 8 << 20, 19 << 20)] == [8, 8, 8, 8, 2, 1, 1]
    assert lot_size(1, torch.device("cpu")) == 1


@pytest.mark.parametrize("together", [1, 2, 8])
def test_a_label_without_a_class(tmp_path: Path, together: int) -> None:
    """A wrong label is found on the host: on a GPU it would end the process. The batches before it come first."""
    labels = np.array([0, 1, 2, 0, 1, 1, 0, 2, 0, 1, 3, 0])
    spec = write(tmp_path / "d.npz", np.zeros((12, 1), dtype=np.float32), labels)
    with open_reader(spec) as reader:
        segments = [segment(reader, batch_size=4, checks=Checks(classes=3), together=together)]
        feed = Feed(in_turn(segments), plain(), HOST)
        batches = feed.segment()
        assert [next(batches).y.tolist(), next(batches).y.tolist()] == [[0, 1, 2, 0], [1, 1, 0, 2]]
        with pytest.raises(DataError, match=r"found the label 3 of record 10 \(.*d\.npz: record 10\); expected 0 to 2"):
            next(batches)


def test_a_label_in_a_batch_that_is_left_out(tmp_path: Path) -> None:
    """A label in a batch that is left out is not checked, in lots of any size."""
    x = np.array([[1.0], [2.0], [np.nan], [3.0], [4.0], [5.0]], dtype=np.float32)
    spec = write(tmp_path / "d.npz", x, np.array([0, 1, 0, 9, 1, 0]))
    for together in (1, 3):
        with open_reader(spec) as reader:
            lots = list(read(reader, HOST, batch_size=2, checks=Checks(classes=2), at_least=2, together=together))
        assert [lot.y[b.rows].tolist() for lot in lots for b in lot.batches] == [[0, 1], [1, 0]]


def test_parts_of_a_lot_are_aligned() -> None:
    """Parts of a lot are aligned like tensors of their own; a part that is aligned already is not copied."""
    whole = torch.zeros(8, 64)
    assert whole.data_ptr() % 64 == 0
    for rows in (slice(0, 2), slice(2, 4), slice(3, 8)):
        part = _part(whole, rows)
        assert part.shape == whole[rows].shape
        assert rows.start == 0 or part.data_ptr() % 64 == 0
    odd = torch.zeros(9, 5)
    part = _part(odd, slice(1, 3))
    assert part.data_ptr() != odd[1:3].data_ptr()
    assert part.data_ptr() % 64 == 0


def test_one_segment_after_the_other(tmp_path: Path) -> None:
    """Segments, even an empty one, come whole and in order, and the next one is read before this one ends."""
    x = np.arange(10, dtype=np.float32).reshape(-1, 1)
    begun = []

    def segments() -> Iterator[Segment]:
        with open_reader(write(tmp_path / "d.npz", x, np.zeros(10))) as reader:
            for name, skip in (("a", 0), ("b", 3), ("c", 1)):
                begun.append(name)
                yield segment(reader, batch_size=4, skip=skip)

    with closing(Feed(in_turn(segments()), plain(), HOST, batch_bytes=1)) as feed:
        first = feed.segment()
        sizes = [len(next(first).x)]
        while len(begun) < 3:
            time.sleep(0.001)
        sizes += [len(batch.x) for batch in first]
        assert sizes == [4, 4, 2]
        assert list(feed.segment()) == []
        assert [batch.x[:, 0].tolist() for batch in feed.segment()] == [[4, 5, 6, 7], [8, 9]]


class Told:
    """Segments of some lots each, which note what was asked for."""

    def __init__(self, *sizes: int, fails: int | None = None) -> None:
        self.sizes, self.fails = sizes, fails
        self.asked: list[tuple[int, int]] = []
        self.closed: list[int] = []
        self.begun = [threading.Event() for _ in sizes]

    def segments(self) -> Iterator[Segment]:
        for number, size in enumerate(self.sizes):
            yield Segment(lots=self._lots(number, size), batches=size)

    def _lots(self, number: int, size: int) -> Generator[Lot]:
        try:
            self.begun[number].set()
            for taken in range(1, size + 1):
                self.asked.append((number, taken))
                if number == self.fails:
                    raise DataError("broken")
                batch = HostBatch(rows=slice(0, 1), taken=taken, records=taken, bad=(), last=taken == size)
                yield Lot(batches=(batch,), x=np.array([[number, taken]]), y=np.zeros(1), places=None)
        finally:
            self.closed.append(number)


def test_a_segment_begins_before_the_one_before_it_ends() -> None:
    """A segment begins once the one before it has asked for all its records, and no earlier; lots stay in order."""
    told = Told(5, 2, 4)
    with closing(in_turn(told.segments())) as lots:
        assert [next(lots) is not None for _ in range(2)] == [True, True]
        assert told.asked == [(0, 1), (0, 2)]
        next(lots)
        next(lots)  # two lots are left of five once the third was handed out
        assert told.begun[1].wait(PATIENCE_S)
        rest = [None if lot is None else lot.x[0].tolist() for lot in lots]
    assert rest == [[0, 5], None, [1, 1], [1, 2], None, [2, 1], [2, 2], [2, 3], [2, 4], None]
    assert sorted(told.closed) == [0, 1, 2]


@pytest.mark.parametrize("after", [1, 4, 6])
def test_closing_ends_a_segment_that_has_begun(after: int) -> None:
    """Closing also ends a segment of which nothing was taken yet."""
    told = Told(5, 5)
    with closing(in_turn(told.segments())) as lots:
        for _ in range(after):
            next(lots)
    assert told.closed == ([0, 1] if after >= 4 else [0])
    assert not [t for t in threading.enumerate() if t.name == "nimble-begin"]


def test_an_error_of_the_next_segment_waits_for_its_turn() -> None:
    told = Told(3, 3, fails=1)
    lots = in_turn(told.segments())
    assert [None if lot is None else lot.x[0].tolist() for lot in islice(lots, 4)] == [[0, 1], [0, 2], [0, 3], None]
    with pytest.raises(DataError, match="broken"):
        next(lots)


def test_numbers_as_labels(tmp_path: Path) -> None:
    """Fractional labels stay as they are, and a missing one makes a bad record."""
    y = np.array([0.5, -1.25, np.nan, 3.0])
    spec = write(tmp_path / "d.npz", np.zeros((4, 1), dtype=np.float32), y)
    for targets in ("numbers", "stored"):
        with open_reader(spec, targets=targets) as reader:  # type: ignore[arg-type]
            (batch,) = reader.batches(batch_size=4)
        assert batch.labels is not None
        assert (batch.labels.dtype, batch.labels.tolist()) == (np.float32, [0.5, -1.25, 3.0])
        assert [b.index for b in batch.bad] == [2]
