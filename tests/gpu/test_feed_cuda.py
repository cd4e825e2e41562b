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
from nimble_jobs.spec import AugmentSpec, FieldsSpec, InputSpec, TransformSpec
from nimble_jobs.workloads.training.augment import Augment
from nimble_jobs.workloads.training.feed import Feed
from nimble_jobs.workloads.training.pixels import Pixels
from nimble_jobs.workloads.training.reading import read
from nimble_jobs.workloads.training.segments import Segment

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
        with open_reader(spec) as reader:
            augment = Augment(AugmentSpec(crop_padding=2, flip="both"), reader.signature, seed=3)

            def segments() -> Iterator[Segment]:
                for epoch in range(1, 5):
                    order = np.random.default_rng(epoch).permutation(total)
                    places = partial(augment.places, epoch=epoch)
                    for given in ({"order": order, "places": places}, {}):
                        lots = read(reader, batch_size=8, together=together, stored=on.type == "cuda", **given)  # type: ignore[arg-type]
                        yield Segment(lots=lots, batches=-(-total // 8))

            found = []
            pixels = Pixels(transform, padding=2)
            with closing(Feed(segments(), pixels, on, batch_bytes=1, together=together)) as feed:
                for _ in range(8):
                    for batch in feed.segment():
                        if on.type == "cuda":
                            torch.cuda._sleep(_BUSY_CYCLES)
                        found.append((batch.x.clone(), batch.y.clone()))
            return [(x.cpu(), y.cpu()) for x, y in found]

    for (x, y), (there_x, there_y) in zip(taken(torch.device("cpu"), 1), taken(device, together), strict=True):
        assert torch.equal(x.view(torch.int32), there_x.view(torch.int32))
        assert torch.equal(y, there_y)
