"""Batches of a training on a GPU: those of the host, bit for bit, however many are sent together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from nimble_jobs.data import open_reader
from nimble_jobs.engine.picture_trial import available
from nimble_jobs.spec import AugmentSpec, FieldsSpec, InputSpec, TransformSpec
from nimble_jobs.workloads.training.batches.augment import Augment, Pixels
from nimble_jobs.workloads.training.batches.epochs import Segment, in_turn
from nimble_jobs.workloads.training.batches.feed import Feed
from nimble_jobs.workloads.training.batches.intake import Intake
from nimble_jobs.workloads.training.batches.lots import Draws, read
from tests.photographs import jpeg, photographs

_BUSY_CYCLES = 500_000  # of the device before it reads a batch: the host is far ahead of it


@pytest.mark.parametrize("together", [1, 3, 8])
@pytest.mark.parametrize("side", [5, 16])
def test_batches_are_those_of_the_host(tmp_path: Path, device: torch.device, together: int, side: int) -> None:
    """Images, moved and normalised, over epochs and validations; 5 pixels make batches that begin at odd addresses."""
    total = 203
    images = np.random.default_rng(0).integers(0, 256, (total, 3, side, side), dtype=np.uint8)
    np.savez(tmp_path / "d.npz", x=images, y=np.arange(total))
    transform = TransformSpec(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    spec = InputSpec(
        source=str(tmp_path / "d.npz"), format="npz", fields=FieldsSpec(label="y"), batch_size=8, transform=transform
    )

    def taken(on: torch.device, together: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with open_reader(spec) as reader, closing(Intake(on, [reader], batch_size=8 * together)) as intake:
            augment = Augment(AugmentSpec(crop_padding=2, flip="both"), reader.signature, seed=3)

            def segments() -> Iterator[Segment]:
                for epoch in range(1, 5):
                    order = np.random.default_rng(epoch).permutation(total)
                    places = partial(augment.places, epoch=epoch)
                    for draws in (Draws(order=order, places=places), Draws()):
                        lots = read(reader, intake, batch_size=8, together=together, draws=draws)
                        yield Segment(lots=lots, batches=-(-total // 8))

            found = []
            pixels = Pixels(transform, padding=2)
            with closing(Feed(in_turn(segments()), pixels, intake, batch_bytes=1, together=together)) as feed:
                for _ in range(8):
                    for batch in feed.segment():
                        if on.type == "cuda":
                            torch.cuda._sleep(_BUSY_CYCLES)
                        found.append((batch.x.clone(), batch.y.clone()))
            return [(x.cpu(), y.cpu()) for x, y in found]

    for (x, y), (there_x, there_y) in zip(taken(torch.device("cpu"), 1), taken(device, together), strict=True):
        assert torch.equal(x.view(torch.int32), there_x.view(torch.int32))
        assert torch.equal(y, there_y)


def test_pictures_decoded_on_the_device(tmp_path: Path, device: torch.device) -> None:
    """Random parts of JPEGs, flipped and normalised, beside a busy device: the host's values up to what decoders differ
    by, the same bits each time, and what the device refuses in its place.
    """
    if (why := available(device)) is not None:
        pytest.skip(why)
    photos = list(photographs().values())
    for i in range(60):
        path = tmp_path / "photos" / f"class{i % 3}" / f"{i:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo = photos[i % len(photos)].crop((i, 2 * i, 180 + i, 170 + i))
        path.write_bytes(jpeg(photo, progressive=i % 7 == 0))
    (tmp_path / "photos/class1/10.jpg").write_bytes(b"\xff\xd8 no picture")
    transform = TransformSpec(resize=(64, 64), mean=(0.5,), std=(0.25,))
    spec = InputSpec(
        source=str(tmp_path / "photos"), format="images", fields=FieldsSpec(label="parent"), transform=transform
    )

    def taken(on: torch.device, *, gpu: bool) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
        with open_reader(spec) as reader, closing(Intake(on, [reader], on_device=gpu, batch_size=16)) as intake:
            given = AugmentSpec.model_validate({"random_resized_crop": True, "flip": "both"})
            augment = Augment(given, reader.signature, seed=3)

            def segments() -> Iterator[Segment]:
                for epoch in (1, 2):
                    order = np.random.default_rng(epoch).permutation(reader.total)
                    places, crops = partial(augment.places, epoch=epoch), augment.crops(epoch)
                    for draws in (Draws(order=order, places=places, crops=crops), Draws()):
                        yield Segment(lots=read(reader, intake, batch_size=16, draws=draws), batches=4)

            found = []
            with closing(Feed(in_turn(segments()), Pixels(transform), intake)) as feed:
                for _ in range(4):
                    for batch in feed.segment():
                        if on.type == "cuda":
                            torch.cuda._sleep(_BUSY_CYCLES)
                        bad = [record.index for record in batch.host.bad]
                        found.append((bad, batch.x.cpu(), batch.y.cpu()))
            return found

    expected = taken(torch.device("cpu"), gpu=False)
    stored, decoded, again = (taken(device, gpu=gpu) for gpu in (False, True, True))
    assert len(expected) == 16
    for host, there, gpu, twice in zip(expected, stored, decoded, again, strict=True):
        assert host[0] == there[0] == gpu[0]
        assert torch.equal(host[2], there[2])
        assert torch.equal(host[2], gpu[2])
        assert torch.equal(host[1].view(torch.int32), there[1].view(torch.int32))
        assert torch.equal(gpu[1].view(torch.int32), twice[1].view(torch.int32))
        assert float((host[1] - gpu[1]).abs().mean()) * 0.25 * 255 < 1.5
