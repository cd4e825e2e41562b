"""Batches of JPEGs to rows of pixels. On the CPU torchvision's other decoder stands in for nvJPEG."""

from __future__ import annotations

import io
import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from nimble_jobs.decoding.do import left_encoded
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.engine import nvjpeg, resize
from nimble_jobs.engine.picture_trial import available
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.errors import DeviceFault, EngineError, OutOfMemory
from nimble_jobs.resizing import Interpolation
from tests import prefork
from tests.photographs import batch, by_pillow, damaged, jpeg, photographs

CPU = torch.device("cpu")


def resized(height: int, width: int) -> Recipe:
    return Recipe(channels=3, size=(height, width), resize=(height, width))


def rows(decoder: PictureDecoder, encoded: list[bytes | np.ndarray], size: tuple[int, int, int]) -> np.ndarray:
    out = torch.zeros(len(encoded), *size, dtype=torch.uint8)
    assert decoder.decode(batch(encoded), out) == ()
    return out.numpy()


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("resized", "crop"), [((64, 80), None), ((72, 72), (64, 60)), (None, (50, 40)), (72, (64, 60)), (400, (300, 224))]
)
def test_rows_are_what_pillow_makes(
    channels: int, interpolation: Interpolation, resized: tuple[int, int] | int | None, crop: tuple[int, int] | None
) -> None:
    """Same decoder underneath, so that only the resize differs, by its rounding. One number is the shorter edge."""
    encoded = [jpeg(image) for image in photographs().values()]
    encoded += [jpeg(photographs()["china"].convert("L")), jpeg(photographs()["coffee"].resize((51, 55)))]
    edge = resized if isinstance(resized, int) else None
    size = None if isinstance(resized, int) else resized
    recipe = Recipe(
        channels=channels,
        size=crop or size or (0, 0),
        resize=size,
        center_crop=crop,
        shortest_edge=edge,
        interpolation=interpolation,
    )
    decoder = PictureDecoder(CPU, recipe)
    found = rows(decoder, list(encoded), recipe.shape).astype(int)
    kind = Image.Resampling.BICUBIC if interpolation == "bicubic" else Image.Resampling.BILINEAR
    expected = np.stack([by_pillow(one, channels, resized, crop, kind) for one in encoded])
    if channels == 3:
        assert np.abs(found - expected).max() <= 1
    else:  # the JPEG's own luma, which knows no clipped colours
        assert np.abs(found - expected).mean() < 0.5
        assert np.abs(found - expected).max() <= 32
    assert not decoder.refusals


def test_the_smallest_picture_is_spread() -> None:
    one = jpeg(np.full((1, 1, 3), 77, dtype=np.uint8))
    assert (rows(PictureDecoder(CPU, resized(5, 7)), [one], (5, 7, 3)) == 77).all()


def test_a_damaged_picture_fails_alone() -> None:
    good = [jpeg(image.resize((60 + 3 * i, 50))) for i, image in enumerate(photographs().values())]
    decoder = PictureDecoder(CPU, resized(32, 32))
    clean = rows(decoder, list(good), (32, 32, 3))
    out = torch.zeros(len(good), 32, 32, 3, dtype=torch.uint8)
    broken = [b"\xff\xd8\xff no picture" if i in (2, 5) else one for i, one in enumerate(good)]
    assert decoder.decode(batch(broken, [(50, 60 + 3 * i) for i in range(len(good))]), out) == (2, 5)
    others = [i for i in range(len(good)) if i not in (2, 5)]
    np.testing.assert_array_equal(out.numpy()[others], clean[others])
    assert sum(decoder.refusals.values()) == 2


def test_only_what_is_decoded_in_batches_reaches_the_device() -> None:
    """The others are pixels already, by the slow way, when they arrive."""
    image = photographs()["chelsea"]
    turned = image.getexif()
    turned[0x0112] = 6
    png = io.BytesIO()
    image.save(png, "PNG")
    recipe = resized(32, 32)
    taken = [jpeg(image), jpeg(image.convert("L")), jpeg(image, subsampling="4:4:4"), jpeg(image, optimize=True)]
    others = [
        jpeg(image, progressive=True),
        jpeg(image.convert("CMYK")),
        jpeg(image, exif=turned),
        jpeg(image)[:-100],
        b"\xff\xd8\xff\xd9",
        png.getvalue(),
    ]
    assert [left_encoded(one, recipe) is not None for one in (*taken, *others)] == [True] * 4 + [False] * 6
    row = left_encoded(taken[0], recipe)
    assert row is not None
    assert (row.height, row.width, row.alike > 0) == (image.height, image.width, True)


def test_hundreds_of_damaged_pictures_only_fail() -> None:
    good = jpeg(photographs()["chelsea"].resize((64, 48)))
    decoder = PictureDecoder(CPU, resized(16, 16))
    expected = rows(decoder, [good], (16, 16, 3))[0]
    out = torch.zeros(21, 16, 16, 3, dtype=torch.uint8)
    failures = 0
    for start in range(0, 200, 20):
        encoded = [damaged(good, start + i) for i in range(20)]
        failed = decoder.decode(batch([*encoded, good], [(48, 64)] * 21), out)
        failures += len(failed)
        assert 20 not in failed
        np.testing.assert_array_equal(out[20].numpy(), expected)
    assert failures > 50


def test_a_picture_whose_size_does_not_fit_fails_before_it_is_decoded() -> None:
    encoded = [jpeg(photographs()["china"].resize(size)) for size in ((40, 30), (30, 40), (40, 30))]
    asked: list[int] = []

    def counts(spans: list[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(len(spans))
        return nvjpeg.decoder(CPU, 3)(spans)

    out = torch.zeros(3, 30, 40, 3, dtype=torch.uint8)
    decoder = PictureDecoder(CPU, Recipe(channels=3, size=(30, 40)), decode=counts)
    assert decoder.decode(batch(encoded), out) == (1,)
    small = PictureDecoder(CPU, Recipe(channels=3, size=(30, 40), center_crop=(30, 40)), decode=counts)
    assert small.decode(batch(encoded), out) == (1,)
    assert asked == [2, 2]
    assert decoder.refusals == small.refusals == {"its size does not fit": 1}


def test_a_header_that_gives_another_size_than_the_decoder_fails() -> None:
    encoded = [jpeg(photographs()["china"].resize((40, 30)))] * 2
    decoder = PictureDecoder(CPU, resized(8, 8))
    out = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    assert decoder.decode(batch(encoded, [(30, 40), (40, 30)]), out) == (1,)


def test_what_holds_pixels_already_is_copied() -> None:
    """Single ones, and runs of them that lie side by side, between JPEGs."""
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (8, 9, 3), dtype=np.uint8) for _ in range(4)]
    one = jpeg(photographs()["flower"].resize((20, 20)))
    decoder = PictureDecoder(CPU, resized(8, 9))
    alone = rows(decoder, [one], (8, 9, 3))[0]
    found = rows(decoder, [pixels[0], pixels[1], one, pixels[2], one, one, pixels[3]], (8, 9, 3))
    np.testing.assert_array_equal(found, np.stack([*pixels[:2], alone, pixels[2], alone, alone, pixels[3]]))


def test_pixels_are_found_wherever_their_spans_lie() -> None:
    """Side by side for rows that are apart, and apart, or in another order, for rows that are side by side."""
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (8, 9, 3), dtype=np.uint8) for _ in range(4)]
    one = jpeg(photographs()["flower"].resize((20, 20)))
    decoder = PictureDecoder(CPU, resized(8, 9))
    alone = rows(decoder, [one], (8, 9, 3))[0]
    packed = batch([pixels[0], pixels[1], b"a gap", pixels[3], pixels[2], one], [(8, 9)] * 5 + [(20, 20)])
    order = [0, 5, 1, 3, 4]
    moved = replace(packed, spans=packed.spans[order], sizes=packed.sizes[order], alike=packed.alike[order])
    out = torch.zeros(5, 8, 9, 3, dtype=torch.uint8)
    assert decoder.decode(moved, out) == ()
    np.testing.assert_array_equal(out.numpy(), np.stack([pixels[0], alone, pixels[1], pixels[3], pixels[2]]))


def test_little_memory_means_more_calls_and_the_same_rows() -> None:
    encoded: list[bytes | np.ndarray] = [jpeg(image.resize((100, 80))) for image in photographs().values()]
    whole = rows(PictureDecoder(CPU, resized(16, 16)), encoded, (16, 16, 3))
    calls: list[int] = []

    def counts(spans: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(len(spans))
        return nvjpeg.decoder(CPU, 3)(spans)

    little = PictureDecoder(CPU, resized(16, 16), decode=counts, at_once_bytes=2 * 100 * 80 * 3)
    np.testing.assert_array_equal(rows(little, encoded, (16, 16, 3)), whole)
    assert calls == [2, 2, 2, 1]


def test_a_box_is_cut_out_before_it_is_resized() -> None:
    image = photographs()["astronaut"]
    encoded = jpeg(image, subsampling="4:4:4")
    decoded = Image.fromarray(by_pillow(encoded, 3, None))
    boxes = np.array([(10, 20, 200, 300), (0, 0, 512, 512), (511, 511, 1, 1)], dtype=np.int32)
    out = torch.zeros(3, 32, 24, 3, dtype=torch.uint8)
    decoder = PictureDecoder(CPU, Recipe(channels=3, size=(32, 24), resize=(40, 40), center_crop=(32, 24)))
    assert decoder.decode(batch([encoded] * 3), out, boxes=boxes) == ()
    for row, (top, left, height, width) in zip(out.numpy(), boxes.tolist(), strict=True):
        part = decoded.crop((left, top, left + width, top + height)).resize((24, 32), Image.Resampling.BILINEAR)
        assert np.abs(row.astype(int) - np.asarray(part)).max() <= 1
    for wrong in ((-1, 0, 5, 5), (0, 0, 0, 5), (500, 0, 20, 5), (0, 513, 1, 1)):
        with pytest.raises(ValueError, match="boxes must lie in their pictures"):
            decoder.decode(batch([encoded]), out, boxes=np.array([wrong], dtype=np.int32))


def test_rows_of_another_shape_are_a_mistake_of_the_caller() -> None:
    decoder = PictureDecoder(CPU, resized(8, 8))
    one = batch([jpeg(photographs()["china"])])
    for out in (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, 8, 8, 3)):
        with pytest.raises(ValueError, match="expected contiguous uint8"):
            decoder.decode(one, out)
    with pytest.raises(ValueError, match="as many rows"):
        decoder.decode(one, torch.zeros(0, 8, 8, 3, dtype=torch.uint8))


@pytest.mark.parametrize(
    "text",
    [
        "Error while decoding JPEG images: CUDA out of memory. Tried to allocate 20 MiB\nmore",
        "Error while decoding JPEG images: Failed to decode batch: 5",
    ],
)
def test_memory_that_runs_out_is_no_fault_of_a_picture(text: str) -> None:
    def fails(_: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError(text)

    decoder = PictureDecoder(CPU, resized(8, 8), decode=fails)
    with pytest.raises(OutOfMemory, match="not enough device memory to decode pictures"):
        decoder.decode(batch([jpeg(photographs()["china"])] * 3), torch.zeros(3, 8, 8, 3, dtype=torch.uint8))


def test_a_lost_device_is_no_fault_of_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Lost())
    with pytest.raises(DeviceFault, match=r"lost while it decoded pictures: RuntimeError: .*: 6; .* illegal memory"):
        nvjpeg.refusal(RuntimeError("Failed to decode batch: 6"), torch.device("cuda", 0))


def test_a_batch_too_large_for_the_memory_is_decoded_in_smaller_ones() -> None:
    def two_fit(spans: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(spans) > 2:
            raise RuntimeError("Error while decoding JPEG images: CUDA out of memory.")
        return nvjpeg.decoder(CPU, 3)(spans)

    encoded: list[bytes | np.ndarray] = [jpeg(image.resize((40, 30))) for image in photographs().values()]
    found = rows(PictureDecoder(CPU, resized(8, 8), decode=two_fit), encoded, (8, 8, 3))
    np.testing.assert_array_equal(found, rows(PictureDecoder(CPU, resized(8, 8)), encoded, (8, 8, 3)))


def test_the_reason_is_said_where_pictures_cannot_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available(CPU) == "the job runs on the CPU, and only CUDA devices decode"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available(torch.device("cuda")) == "CUDA is not available"


def test_a_torchvision_without_decoders_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RuntimeError, match="torchvision is not installed"):
        nvjpeg.load_library.__wrapped__()


def test_the_kernel_is_compiled_without_a_gpu() -> None:
    kinds: tuple[Interpolation, ...] = ("bilinear", "bicubic")
    for channels, interpolation in itertools.product((1, 3), kinds):
        kernel = resize.compiled(90, channels, interpolation)
        assert (kernel.name, kernel.binary[:4], kernel.arg_types[:5]) == ("resize_ragged", b"\x7fELF", "OOOii")


def test_a_kernel_that_cannot_be_compiled_is_an_error_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        raise ValueError("no such target\nand more")

    monkeypatch.setattr("triton.compile", fails)
    with pytest.raises(EngineError, match=r"Triton cannot compile it: ValueError: no such target$"):
        resize.compiled.__wrapped__(70, 3, "bilinear")


RUN = """
import numpy as np, torch
from triton.runtime import interpreter
patch = interpreter._patch_lang_tensor
def with_counts(tensor, scope):
    patch(tensor, scope)
    tensor.__index__ = lambda self: self.handle.data.item()  # numpy 2.4 makes no number of an array of one
interpreter._patch_lang_tensor = with_counts
np.seterr(all="ignore")  # places beyond the last one
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.engine import resize_triton
from nimble_jobs.engine.blank import BLANK
from nimble_jobs.engine.resize import Planes, constants_of, fitting, lines, resize_into
generator = torch.Generator().manual_seed(0)
sizes = [(13, 21), (5, 6), (40, 9)]
def cut(picture, box):
    top, left, height, width = box.tolist()
    return picture[:, top : top + height, left : left + width]
for channels in (3, 1):
    for how, crop, size, first in (
        (dict(resize=(9, 7)), None, (9, 7), [(1, 1)]),
        (dict(resize=(12, 16)), (8, 9), (8, 9), []),
        ({}, (5, 6), (5, 6), []),
        (dict(shortest_edge=10), (8, 9), (8, 9), [(3, 2)]),
        (dict(resize=(9, 7), interpolation="bicubic"), None, (9, 7), [(1, 1)]),
        (dict(shortest_edge=17, interpolation="bicubic"), (8, 9), (8, 9), [(3, 2)]),
    )[:: 2 if channels == 1 else 1]:
        recipe = Recipe(channels=channels, size=size, center_crop=crop, **how)
        chosen = [s for s in first + sizes if fitting(recipe, np.array([s])).all()]
        pictures = [torch.randint(0, 256, (channels, *s), dtype=torch.uint8, generator=generator) for s in chosen]
        pictures[-1][:] = BLANK
        boxes = np.array([(s[0] // 3, s[1] // 4, s[0] - s[0] // 2, s[1] - s[1] // 2) for s in chosen])
        for these in (None, boxes)[: channels - 1 or 1]:
            rows = np.arange(len(pictures))[::-1]
            expected, found = torch.zeros(2, len(pictures) + 1, *size, channels, dtype=torch.uint8)
            resize_into(expected, Planes.of(pictures), rows, recipe, these)
            table = torch.from_numpy(lines(recipe, Planes.of(pictures), rows, these))
            grid = (-(-size[0] * size[1] // 64), len(pictures))
            flags = torch.full((len(pictures),), 7, dtype=torch.uint8)
            constants = constants_of(channels, 64, recipe.interpolation)
            resize_triton.resize_ragged[grid](table, found, flags, *size, **constants)
            blank = [bool((p if these is None else cut(p, b)).eq(BLANK).all()) for p, b in zip(pictures, boxes)]
            assert flags.tolist() == blank, (flags, blank)
            far = (found.int() - expected.int()).abs()
            assert far.max() <= 1 and (far > 0).float().mean() < 0.01, (channels, how, far.max())
print("equal")
"""


def test_the_kernel_computes_what_matrix_products_do() -> None:
    """Under Triton's interpreter, which is chosen when Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = prefork.run_light(RUN, env=environment, timeout=300, check=False)
    assert done.stdout == "equal\n", done.stderr
