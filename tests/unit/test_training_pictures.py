"""Trainings on folders of pictures: the same bits however they are read, resumed and decoded; random parts of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from nimble_jobs.chance import RandomCrops
from nimble_jobs.data import Wanted, batches, open_reader
from nimble_jobs.decoding.pool import Decoders
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.errors import DataError, OutOfMemory
from nimble_jobs.resizing import to_bytes, weights
from nimble_jobs.spec import AugmentSpec, FieldsSpec, InputSpec, TransformSpec
from nimble_jobs.views.stages import lines
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.look import look
from nimble_jobs.workloads.training.batches.augment import Augment, Pixels
from nimble_jobs.workloads.training.batches.epochs import Segment, in_turn
from nimble_jobs.workloads.training.batches.feed import Feed
from nimble_jobs.workloads.training.batches.intake import Intake
from nimble_jobs.workloads.training.batches.lots import Draws, read
from tests.photographs import jpeg, photographs
from tests.trainings import Attempt, digests, lay_out, spec_of
from tests.waiting import until

CLASSES = 4
CROPS = {"scale": (0.2, 1.0), "ratio": (0.75, 1.3333)}


def write(folder: Path, count: int = 30, seed: int = 0) -> None:
    """JPEGs of several sizes in a folder for each class, parts of photographs."""
    rng = np.random.default_rng(seed)
    photos = list(photographs().values())
    for i in range(count):
        path = folder / f"class{i % CLASSES}" / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = rng.integers(20, 60, 2).tolist()
        photo = photos[int(rng.integers(len(photos)))]
        left, top = int(rng.integers(photo.width - width)), int(rng.integers(photo.height - height))
        path.write_bytes(jpeg(photo.crop((left, top, left + width, top + height))))


def job(folder: Path, output: str, **changes: Any) -> Any:
    """A training on the pictures, with random parts and flips."""
    return spec_of(
        folder,
        output=output,
        input__source=str(folder / "pictures"),
        input__format="images",
        input__fields={"label": "parent"},
        input__transform={"resize": 8, "channels": 1},
        schedule__on_miss="eager",
        train__validation={"source": str(folder / "held-out")},
        **{
            "train__augment": {"random_resized_crop": {"scale": [0.2, 1.0]}, "flip": "horizontal"},
            "train__checkpoint": {"every_steps": 1},
            **changes,
        },
    )


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    lay_out(tmp_path)
    write(tmp_path / "pictures")
    write(tmp_path / "held-out", 9, seed=1)
    return tmp_path


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    with closing(Decoders(2)) as found:
        yield found


def spec(folder: Path, **transform: Any) -> InputSpec:
    return InputSpec(
        source=str(folder / "pictures"),
        format="images",
        fields=FieldsSpec(label="parent"),
        transform=TransformSpec(**{"resize": (16, 12), **transform}),
    )


def test_a_part_is_resized_as_if_it_were_the_picture(pictures: Path) -> None:
    """By the one resize, up to its rounding; the rest of the picture has no part in it."""
    crops = RandomCrops(seed=5, epoch=2, **CROPS)
    with open_reader(spec(pictures)) as reader:
        order = np.arange(reader.total)[::-1]
        (batch,) = reader.batches(batch_size=reader.total, order=order, wanted=Wanted(stored=True, crops=crops))
        for index, found in zip(batch.indexes.tolist(), batch.x, strict=True):
            whole = np.asarray(Image.open(reader.place(index)).convert("RGB"))
            top, left, height, width = crops.rectangle(index, *whole.shape[:2])
            part = whole[top : top + height, left : left + width].astype(np.float32).transpose(2, 0, 1)
            expected = to_bytes(weights(height, 16) @ part @ weights(width, 12).T).transpose(1, 2, 0)
            assert np.abs(found.astype(int) - expected).max() <= 1
            assert reader.redo(index, crops).tobytes() == found.tobytes()  # type: ignore[union-attr]


def test_parts_of_joined_tables_are_those_of_one(tmp_path: Path) -> None:
    """Records count through all files of an input."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    encoded = [jpeg(photo.crop((i, i, i + 40, i + 30))) for i, photo in enumerate(list(photographs().values()) * 2)]
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    pq.write_table(pa.table({"x": encoded}), one / "all.parquet")
    pq.write_table(pa.table({"x": encoded[:3]}), two / "a.parquet")
    pq.write_table(pa.table({"x": encoded[3:]}), two / "b.parquet")
    found = []
    for folder in (one, two):
        table = InputSpec(source=str(folder), format="parquet", transform=TransformSpec(resize=(9, 9)))
        with open_reader(table) as reader:
            crops = RandomCrops(seed=1, epoch=1, **CROPS)
            (batch,) = reader.batches(
                batch_size=reader.total, order=np.arange(reader.total), wanted=Wanted(crops=crops)
            )
            found.append(batch.x)
    assert found[0].tobytes() == found[1].tobytes()


def epochs(folder: Path, decoders: Decoders | None = None) -> list[bytes]:
    """The batches of two epochs with a validation after each."""
    intake = Intake(torch.device("cpu"))
    with open_reader(spec(folder)) as reader, open_reader(spec(folder)) as held_out:
        for each in (reader, held_out):
            if decoders is not None:
                each.hire(decoders)
        augment = AugmentSpec.model_validate({"random_resized_crop": True, "flip": "both"})
        changes = Augment(augment, reader.signature, seed=3)

        def segments() -> Iterator[Segment]:
            for epoch in (1, 2):
                order = np.random.default_rng(epoch).permutation(reader.total)
                places = partial(changes.places, epoch=epoch)
                draws = Draws(order=order, places=places, crops=changes.crops(epoch))
                lots = read(reader, intake, batch_size=7, draws=draws)
                yield Segment(lots=lots, batches=-(-reader.total // 7))
                yield Segment(lots=read(held_out, intake, batch_size=7), batches=-(-reader.total // 7))

        with closing(Feed(in_turn(segments()), Pixels(TransformSpec()), intake)) as feed:
            return [b.x.numpy().tobytes() + b.y.numpy().tobytes() for _ in range(4) for b in feed.segment()]


def test_batches_are_the_same_for_any_number_of_threads_and_processes(
    pictures: Path, decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random parts do not depend on who decodes."""
    monkeypatch.setattr("nimble_jobs.data.reader.FEW", 1)
    expected = epochs(pictures)
    assert len(set(expected)) > len(expected) // 2
    assert epochs(pictures, decoders=decoders) == expected
    assert decoders.pids
    monkeypatch.setattr(batches, "usable_cores", lambda: 1)
    assert epochs(pictures) == expected


def test_parts_on_the_device_are_those_of_the_host(pictures: Path) -> None:
    """The device's resize equals the host's up to rounding; the host decodes what the device does not take."""
    grey = pictures / "pictures/class0/000.jpg"
    Image.open(grey).convert("RGB").save(grey, "JPEG", progressive=True)
    crops = RandomCrops(seed=5, epoch=1, **CROPS)
    device = torch.device("cpu")
    with open_reader(spec(pictures)) as reader, closing(Intake(device, [reader], on_device=True)) as intake:
        order = np.random.default_rng(0).permutation(reader.total)
        here = reader.batches(batch_size=8, order=order, wanted=Wanted(stored=True, crops=crops))
        there = intake.batches(reader, 0, batch_size=8, order=order, crops=crops)
        for expected, found in zip(here, there, strict=True):
            assert isinstance(found.x, torch.Tensor)
            assert found.batch.indexes.tolist() == expected.indexes.tolist()
            assert (found.x.to(torch.int16) - torch.from_numpy(expected.x).to(torch.int16)).abs().max() <= 3


def test_a_batch_is_decoded_before_anyone_asks_for_it(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decoder works ahead. Batches keep their order, and an error takes the place of its batch."""
    decoded, decoders = threading.Semaphore(0), set[PictureDecoder]()
    broken: list[list[int]] = []  # heights and widths of the pictures that cannot be decoded
    original = PictureDecoder.decode

    def decode(self: PictureDecoder, *given: Any, **more: Any) -> tuple[int, ...]:
        decoders.add(self)
        decoded.release()
        if given[0].sizes.tolist() == broken:
            raise OutOfMemory("no memory is left")
        return original(self, *given, **more)

    monkeypatch.setattr(PictureDecoder, "decode", decode)
    with (
        open_reader(spec(pictures)) as reader,
        closing(Intake(torch.device("cpu"), [reader], on_device=True)) as intake,
    ):
        expected = [[i, i + 1] for i in range(0, reader.total, 2)]
        batches = intake.batches(reader, 0, batch_size=2)
        found = [next(batches).batch.indexes.tolist()]
        assert all(decoded.acquire(timeout=30.0) for _ in range(2))  # the next one, too
        found += [taken.batch.indexes.tolist() for taken in batches]
        assert found == expected
        assert len(decoders) == 1
        for index in expected[5]:
            with Image.open(reader.place(index)) as image:
                broken.append([image.height, image.width])
        arrived: list[list[int]] = []
        with pytest.raises(OutOfMemory, match="no memory is left"):
            arrived.extend(taken.batch.indexes.tolist() for taken in intake.batches(reader, 0, batch_size=2))
        assert arrived == expected[:5]


def test_what_the_device_refuses_is_redone_or_left_out(pictures: Path) -> None:
    """The rest of the batch closes up, and labels, ids and reasons stay with their records."""
    torn, odd = (pictures / f"pictures/class1/{name}.jpg" for name in ("001", "005"))
    data = bytearray(torn.read_bytes())
    data[data.index(b"\xff\xda") + 2 : -2] = b""  # no scan at all
    torn.write_bytes(bytes(data))
    with (
        open_reader(spec(pictures)) as reader,
        closing(Intake(torch.device("cpu"), [reader], on_device=True)) as intake,
    ):
        kept = Intake(torch.device("cpu"))
        (here,) = kept.batches(reader, 0, batch_size=reader.total)
        (there,) = intake.batches(reader, 0, batch_size=reader.total)
        assert [bad.id for bad in there.batch.bad] == [bad.id for bad in here.batch.bad]
        assert there.batch.ids == here.batch.ids
        assert here.batch.bad
        (expected,) = reader.batches(batch_size=reader.total, wanted=Wanted(stored=True))
        assert isinstance(there.x, torch.Tensor)
        assert len(there.x) == len(expected.x) == len(there.batch)
        assert np.abs(there.x.numpy().astype(int) - expected.x).max() <= 3
        assert str(odd.relative_to(pictures / "pictures")) in there.batch.ids


def test_resumed_in_the_middle_of_an_epoch(pictures: Path) -> None:
    """A resumed training publishes the bytes of an undisturbed one."""
    whole = Attempt(job(pictures, "whole/net"))
    whole.run()
    assert any("decoded by cpu" in said for said in whole.said("decode"))
    expected = digests(pictures / "whole/net")
    for stop in (2, 5):
        name = f"stopped{stop}/net"
        Attempt(job(pictures, name), stop=lambda asked, stop=stop: Stop.DRAIN if asked == stop else Stop.GO).run()  # type: ignore[misc]
        again = Attempt(job(pictures, name), number=2)
        again.run()
        assert again.said("resumed")
        assert digests(pictures / name) == expected


def test_a_training_draws_other_parts_in_each_epoch(pictures: Path) -> None:
    """Each epoch draws other parts of pictures, and none if the spec asks for none."""
    found = {}
    for name, augment in (("parts", {"random_resized_crop": True}), ("whole", {})):
        spec_ = job(pictures, f"{name}/net", train__augment=augment, train__epochs=1, train__checkpoint=None)
        Attempt(spec_).run()
        found[name] = digests(pictures / name / "net")["metrics.jsonl"]
    assert found["parts"] != found["whole"]
    with open_reader(spec(pictures)) as reader:
        given_ = AugmentSpec.model_validate({"random_resized_crop": {"scale": [0.3, 0.5], "ratio": [1, 2]}})
        augment_ = Augment(given_, reader.signature, seed=3)
    expected = [RandomCrops(seed=3, epoch=n, scale=(0.3, 0.5), ratio=(1.0, 2.0)) for n in (1, 2)]
    assert [augment_.crops(n) for n in (1, 2)] == expected


def test_corrupted_pictures(pictures: Path) -> None:
    """Corrupted pictures are bad records of the training or its validation, and fail it if none are tolerated."""
    for path in ("pictures/class2/002.jpg", "held-out/class1/001.jpg"):
        (pictures / path).write_bytes(b"\xff\xd8 no picture")
    with pytest.raises(DataError, match=r"class2/002\.jpg: cannot be decoded"):
        Attempt(job(pictures, "strict/net")).run()
    attempt = Attempt(job(pictures, "lenient/net", run__error_threshold=0.5))
    attempt.run()
    errors = (pictures / "lenient/net/errors.jsonl").read_text()
    assert errors.count("class2/002.jpg") >= 1
    assert any("validations leave out 1 of 9" in said for said in attempt.said("bad-records"))


def test_cancelled_while_processes_decode(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a cancellation no process and no thread is left."""
    monkeypatch.setattr("nimble_jobs.data.reader.FEW", 1)
    before = set(threading.enumerate())
    with closing(Decoders(2)) as own:
        pids: list[int] = []

        def stop(asked: int) -> Stop:
            pids.extend(own.pids)
            return Stop.CANCEL if asked == 2 else Stop.GO

        outcome = Attempt(job(pictures, "out/net"), stop=stop, decoders=own).run()
        assert outcome.stop is Stop.CANCEL
    assert pids
    until(lambda: all("Z (" in status(pid) for pid in pids))
    assert not [t.name for t in set(threading.enumerate()) - before if t.name.startswith("nimble-")]


def status(pid: int) -> str:
    """The state of a process, from the kernel; Z, as of a zombie, if it is gone."""
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "Z ("


def test_random_parts_need_encoded_pictures(tmp_path: Path) -> None:
    """Found before anything runs, and by a look at the data."""
    lay_out(tmp_path)
    asked = spec_of(tmp_path, train__augment={"random_resized_crop": True})
    told = "train.augment.random_resized_crop: the input holds arrays; expected encoded pictures, or crop_padding"
    with pytest.raises(DataError, match=told):
        Attempt(asked).run()
    assert look(asked, [tmp_path]).problems == [told]


def test_stages_are_measured(pictures: Path) -> None:
    timings = Attempt(job(pictures, "out/net")).run().timings
    assert [stage["name"] for stage in timings["stages"]] == ["read and decode", "augment", "step"]
    assert all(stage["items"] > 0 and 0 <= stage["busy"] <= 1 for stage in timings["stages"])
    assert timings["bottleneck"] in ("read and decode", "augment", "step")
    assert [name for name, _ in lines(timings)] == ["read and decode", "augment", "step", "bottleneck"]
