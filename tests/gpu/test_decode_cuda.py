"""JPEGs decoded, resized and cropped on the device, against Pillow and against ourselves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image

from nimble_jobs.decoding.do import left_encoded
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.engine import jpeg_engines, nvjpeg
from nimble_jobs.engine.blank import BLANK
from nimble_jobs.engine.jpeg_engines import JpegEngines
from nimble_jobs.engine.picture_trial import available
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.engine.resize import Planes, resize_into
from nimble_jobs.pictures import Pictures
from nimble_jobs.resizing import Interpolation
from tests.photographs import batch, by_pillow, damaged, jpeg, photographs

RESIZED = (224, 224)
RECIPE = Recipe(channels=3, size=RESIZED, resize=RESIZED)


@dataclass(frozen=True)
class Bound:
    """Largest differences from Pillow, of 255. nvJPEG repeats subsampled colours; libjpeg interpolates them."""

    mean: float
    most: int


@pytest.fixture
def decoder(device: torch.device) -> Iterator[PictureDecoder]:
    assert available(device) is None
    with closing(PictureDecoder(device, RECIPE)) as found:
        yield found


def decoded(decoder: PictureDecoder, pictures: Pictures, shape: tuple[int, int, int]) -> tuple[np.ndarray, list[int]]:
    """All rows, and those that failed. What the rows are made of is overwritten as soon as that is allowed."""
    out = torch.zeros(len(pictures), *shape, dtype=torch.uint8, device=decoder.device)
    ready = torch.cuda.Event()
    ready.record()
    failed = decoder.decode(pictures, out, after=ready)
    pictures.data[:] = 0
    assert decoder.done is not None
    decoder.done.synchronize()
    return out.cpu().numpy(), list(failed)


@pytest.mark.parametrize(
    ("subsampling", "resized", "bound"),
    [
        ("4:2:0", RESIZED, Bound(1.0, 16)),
        ("4:2:2", RESIZED, Bound(1.0, 16)),
        ("4:4:4", RESIZED, Bound(0.5, 3)),
        ("4:2:0", None, Bound(2.0, 80)),
        ("4:4:4", None, Bound(0.7, 5)),
        ("4:2:0", 256, Bound(1.0, 24)),
        ("4:4:4", 256, Bound(0.5, 4)),
    ],
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_rows_are_close_to_pillows(
    subsampling: str,
    resized: tuple[int, int] | int | None,
    bound: Bound,
    interpolation: Interpolation,
    device: torch.device,
) -> None:
    """One number is the size of the shorter edge."""
    size, edge = (None, resized) if isinstance(resized, int) else (resized, None)
    crop = (224, 230) if edge else None if size else (299, 301)
    kind = Image.Resampling.BICUBIC if interpolation == "bicubic" else Image.Resampling.BILINEAR
    further = 2 if interpolation == "bicubic" and resized else 1  # its weights sharpen what decoders differ by
    encoded = [jpeg(image, subsampling=subsampling) for image in photographs().values()]
    encoded.append(jpeg(photographs()["coffee"].resize((333, 301)), subsampling=subsampling))
    recipe = Recipe(
        channels=3,
        size=crop or RESIZED,
        resize=size,
        center_crop=crop,
        shortest_edge=edge,
        interpolation=interpolation,
    )
    with closing(PictureDecoder(device, recipe)) as decoder:
        found, failed = decoded(decoder, batch(encoded), recipe.shape)
    assert not failed, decoder.refusals
    far = np.abs(found.astype(int) - np.stack([by_pillow(one, 3, resized, crop, kind) for one in encoded]))
    assert far.mean() <= further * bound.mean
    assert far.max() <= further * bound.most


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_pictures_and_grey_rows(channels: int, device: torch.device) -> None:
    grey = [jpeg(image.convert("L")) for image in photographs().values()]
    coloured = [jpeg(image) for image in photographs().values()] if channels == 1 else []
    with closing(PictureDecoder(device, replace(RECIPE, channels=channels))) as decoder:
        found, failed = decoded(decoder, batch(grey + coloured), (*RESIZED, channels))
    assert not failed, decoder.refusals
    far = np.abs(found.astype(int) - np.stack([by_pillow(one, channels, RESIZED) for one in grey + coloured]))
    assert far[: len(grey)].max() <= 3
    assert far.mean() <= 1.0


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (7, 9), (17, 33), (4031, 3023)])
def test_sizes_at_the_edges(size: tuple[int, int], decoder: PictureDecoder) -> None:
    """What the hardware engines refuse is decoded otherwise, or fails; it is never wrong."""
    image = photographs()["china"].resize(size)
    encoded = [jpeg(image, subsampling=subsampling) for subsampling in ("4:4:4", "4:2:0")]
    found, failed = decoded(decoder, batch(encoded), (*RESIZED, 3))
    for row, one in enumerate(encoded):
        if row not in failed:
            far = np.abs(found[row].astype(int) - by_pillow(one, 3, RESIZED))
            assert far.mean() <= 3.0
    assert max(size) < 1000 or not failed


def ragged(count: int, seed: int) -> list[bytes]:
    """Photographs of random sizes, samplings and qualities."""
    rng = np.random.default_rng(seed)
    images = list(photographs().values())
    return [
        jpeg(
            images[int(rng.integers(len(images)))].resize((int(rng.integers(30, 500)), int(rng.integers(30, 500)))),
            quality=int(rng.integers(40, 96)),
            subsampling=("4:2:0", "4:2:2", "4:4:4")[int(rng.integers(3))],
        )
        for _ in range(count)
    ]


def test_a_ragged_batch_is_what_its_pictures_are_alone(decoder: PictureDecoder) -> None:
    encoded = ragged(48, 0)
    together, failed = decoded(decoder, batch(encoded), (*RESIZED, 3))
    assert not failed, decoder.refusals
    for row, one in enumerate(encoded):
        alone, _ = decoded(decoder, batch([one]), (*RESIZED, 3))
        np.testing.assert_array_equal(together[row], alone[0])


def test_engines_and_torchvision_make_the_same_bytes(decoder: PictureDecoder, device: torch.device) -> None:
    encoded = ragged(16, 5)
    by_engines, failed = decoded(decoder, batch(encoded), (*RESIZED, 3))
    assert not failed, decoder.refusals
    with closing(PictureDecoder(device, RECIPE, decode=nvjpeg.decoder(device, 3))) as theirs:
        by_torchvision, failed = decoded(theirs, batch(encoded), (*RESIZED, 3))
    assert not failed, theirs.refusals
    np.testing.assert_array_equal(by_engines, by_torchvision)


def test_portions_of_a_batch_give_the_same_rows(device: torch.device, decoder: PictureDecoder) -> None:
    encoded = ragged(48, 1)
    whole, _ = decoded(decoder, batch(encoded), (*RESIZED, 3))
    with closing(PictureDecoder(device, RECIPE, at_once_bytes=1 << 20)) as little:
        found, _ = decoded(little, batch(encoded), (*RESIZED, 3))
    np.testing.assert_array_equal(found, whole)


def test_only_damaged_pictures_fail(decoder: PictureDecoder) -> None:
    """In the middle of a batch, in several ways. Their neighbours are as they are without them."""
    good = ragged(32, 2)
    clean, _ = decoded(decoder, batch(good), (*RESIZED, 3))
    sizes = [tuple(size) for size in batch(good).sizes.tolist()]
    broken = list(good)
    broken[3] = good[3][:4]
    broken[15] = b"\xff\xd8" + bytes(range(256)) + b"\xff\xd9"
    broken[16] = b"no picture at all"
    broken[31] = good[31].replace(b"\xff\xda", b"\xff\xd9", 1)  # ends before its first scan
    found, failed = decoded(decoder, batch(broken, sizes), (*RESIZED, 3))
    assert {3, 15, 16} <= set(failed) <= {3, 15, 16, 31}, decoder.refusals
    others = [i for i in range(32) if i not in (3, 15, 16, 31)]
    np.testing.assert_array_equal(found[others], clean[others])


def header_size(encoded: bytes) -> tuple[int, int] | None:
    """Height and width; None if readers see from the header that the device must not get it."""
    row = left_encoded(encoded, RECIPE)
    return None if row is None else (row.height, row.width)


def test_five_hundred_damaged_pictures_leave_the_device_working(decoder: PictureDecoder) -> None:
    """Those that readers let through: they fail or are decoded to something, and do no harm."""
    good = ragged(20, 3)
    clean, _ = decoded(decoder, batch(good), (*RESIZED, 3))
    sent = seed = 0
    while sent < 500:
        broken, sizes = list(good), [header_size(one) for one in good]
        for i in range(1, 20, 2):
            while (size := header_size(damaged(good[i], seed))) is None:
                seed += 1
            broken[i], sizes[i] = damaged(good[i], seed), size
            seed += 1
            sent += 1
        found, failed = decoded(decoder, batch(broken, [size for size in sizes if size]), (*RESIZED, 3))
        assert all(i % 2 for i in failed), decoder.refusals
        np.testing.assert_array_equal(found[::2], clean[::2])
    x = torch.ones(64, 64, device=decoder.device)
    assert (x @ x).sum().item() == 64**3


def next_engines(decoder: PictureDecoder) -> JpegEngines:
    """Those that decode its next batch, unless another decoder takes them."""
    engines = jpeg_engines.take(decoder.device, 3)
    assert engines is not None
    jpeg_engines.give_back(engines)
    return engines


def test_a_batch_that_the_engines_refuse_is_left_to_the_host(
    decoder: PictureDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch is decoded by other engines: a state that failed once may never finish."""
    good = ragged(8, 4)
    clean, _ = decoded(decoder, batch(good), (*RESIZED, 3))
    before = next_engines(decoder)

    def fails(*_: object) -> None:
        raise RuntimeError("nvJPEG failed to decode a batch: 6")

    monkeypatch.setattr(before, "decode", fails)
    assert decoded(decoder, batch(good), (*RESIZED, 3))[1] == list(range(8))
    assert decoder.refusals == {"RuntimeError: nvJPEG failed to decode a batch: 6": 8}
    assert next_engines(decoder) is not before
    again, failed = decoded(decoder, batch(good), (*RESIZED, 3))
    assert not failed
    np.testing.assert_array_equal(again, clean)


def test_a_picture_that_the_engines_leave_out_is_left_to_the_host(
    decoder: PictureDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They report success. Neither the picture before it nor the one that was there in the last batch is returned."""
    good = ragged(8, 5)
    clean, failed = decoded(decoder, batch(good), (*RESIZED, 3))
    assert not failed
    engines = next_engines(decoder)
    decode, left_out = engines.decode, np.array([2, 7])

    def some(addresses: np.ndarray, lengths: np.ndarray, sizes: np.ndarray, targets: np.ndarray, stream: int) -> None:
        decode(*(np.delete(given, left_out, axis=0) for given in (addresses, lengths, sizes, targets)), stream)

    monkeypatch.setattr(engines, "decode", some)
    for _ in range(2):
        found, failed = decoded(decoder, batch(good), (*RESIZED, 3))
        assert failed == left_out.tolist()
        np.testing.assert_array_equal(np.delete(found, left_out, axis=0), np.delete(clean, left_out, axis=0))
    assert decoder.refusals == {"the device reported a picture that it had not decoded": 4}
    boxes = np.array([[1, 2, h - 3, w - 5] for h, w in batch(good).sizes.tolist()], dtype=np.int32)
    out = torch.zeros(8, *RESIZED, 3, dtype=torch.uint8, device=decoder.device)
    assert list(decoder.decode(batch(good), out, boxes=boxes)) == left_out.tolist()


def test_two_threads_make_the_same_bytes_as_one(device: torch.device, decoder: PictureDecoder) -> None:
    """Many batches without a pause, so that memory that was just freed is decoded into."""
    batches = [ragged(16, seed) for seed in range(10, 16)]
    expected = [decoded(decoder, batch(encoded), (*RESIZED, 3))[0] for encoded in batches]

    def work(first: int) -> list[tuple[int, torch.Tensor]]:
        rows = [torch.zeros(16, *RESIZED, 3, dtype=torch.uint8, device=device) for _ in range(30)]
        torch.cuda.synchronize(device)
        with closing(PictureDecoder(device, RECIPE)) as mine:
            for i, out in enumerate(rows):
                assert mine.decode(batch(batches[(first + i) % 6]), out) == ()
        return [((first + i) % 6, out) for i, out in enumerate(rows)]

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(work, (0, 3)):
            for which, out in done:
                np.testing.assert_array_equal(out.cpu().numpy(), expected[which])


def test_memory_that_is_still_read_is_not_decoded_into(decoder: PictureDecoder) -> None:
    """The first batch waits long for its rows to be free, while its decoded pictures are given back already."""
    first, second = ragged(16, 20), ragged(16, 21)
    expected, _ = decoded(decoder, batch(first), (*RESIZED, 3))
    out = torch.zeros(2, 16, *RESIZED, 3, dtype=torch.uint8, device=decoder.device)
    x = torch.ones(4096, 4096, device=decoder.device)
    torch.cuda.synchronize(decoder.device)
    late, others = torch.cuda.Event(), torch.cuda.Stream(decoder.device)
    with torch.cuda.stream(others):
        for _ in range(60):
            x @ x
        late.record()
    decoder.decode(batch(first), out[0], after=late)
    decoder.decode(batch(second), out[1])
    torch.cuda.synchronize(decoder.device)
    np.testing.assert_array_equal(out[0].cpu().numpy(), expected)


def test_memory_stays_within_its_bound(device: torch.device) -> None:
    """Large pictures of many sizes, for each of which the allocator would keep a piece of memory."""
    image = photographs()["china"]
    encoded = [jpeg(image.resize((1900 + 60 * i, 1900 + 40 * i)), quality=40) for i in range(12)]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    with closing(PictureDecoder(device, RECIPE, at_once_bytes=32 << 20)) as decoder:
        bound = before + decoder.memory_bytes + (64 << 20)  # single pictures here are up to 20 MB
        for _ in range(3):
            for one in encoded:
                assert not decoded(decoder, batch([one] * 3), (*RESIZED, 3))[1]
                assert torch.cuda.memory_reserved(device) <= bound


def test_pixels_from_the_host_lie_between_decoded_ones(decoder: PictureDecoder) -> None:
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (*RESIZED, 3), dtype=np.uint8) for _ in range(3)]
    one = jpeg(photographs()["flower"])
    alone = decoded(decoder, batch([one]), (*RESIZED, 3))[0][0]
    found, failed = decoded(decoder, batch([pixels[0], one, pixels[1], pixels[2]]), (*RESIZED, 3))
    assert not failed
    np.testing.assert_array_equal(found, np.stack([pixels[0], alone, *pixels[1:]]))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("resized", "crop"), [((224, 224), None), ((256, 300), (224, 220)), (None, (17, 31)), (240, (224, 220))]
)
def test_the_kernel_computes_what_matrix_products_do(
    channels: int,
    interpolation: Interpolation,
    resized: tuple[int, int] | int | None,
    crop: tuple[int, int] | None,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(375, 500), (40, 33), (3000, 4000), (1080, 31), (224, 224)] + ([(1, 1), (2, 900)] if resized else [])
    pictures = [torch.randint(0, 256, (channels, *s), dtype=torch.uint8, generator=generator) for s in sizes]
    size, edge = (None, resized) if isinstance(resized, int) else (resized, None)
    recipe = Recipe(
        channels=channels,
        size=crop or size or (0, 0),
        resize=size,
        center_crop=crop,
        shortest_edge=edge,
        interpolation=interpolation,
    )
    parts = np.array([(h // 3, w // 4, h - h // 2, w - w // 2) for h, w in sizes], dtype=np.int32)
    for boxes in (None, parts):
        rows = np.arange(len(sizes))[::-1]
        expected = torch.zeros(len(sizes), *recipe.shape, dtype=torch.uint8)
        found = expected.to(device)
        resize_into(expected, Planes.of(pictures), rows, recipe, boxes)
        resize_into(found, Planes.of([p.to(device) for p in pictures]), rows, recipe, boxes)
        far = (found.cpu().int() - expected.int()).abs()
        assert far.max() <= 1
        assert (far > 0).float().mean() < 0.01


def test_flat_pictures_stay_flat(device: torch.device) -> None:
    """Each of the 256 values, through all rounding. Only a picture that looks like blank memory is left to the host."""
    with closing(PictureDecoder(device, Recipe(channels=1, size=(5, 7), resize=(5, 7)))) as decoder:
        flat = [jpeg(Image.new("L", (64, 48), value), quality=100) for value in range(256)]
        found, failed = decoded(decoder, batch(flat), (5, 7, 1))
    assert all(abs(row - BLANK) <= 1 for row in failed)
    assert (found == found[:, :1, :1]).all()
    assert np.abs(found[:, 0, 0, 0].astype(int) - np.arange(256)).max() <= 1
