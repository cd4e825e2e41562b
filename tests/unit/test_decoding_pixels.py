"""How far the pixels of one picture may differ between the ways to decode and resize it, on real photographs."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from nimble_jobs import resizing
from nimble_jobs.data import open_reader, reader
from nimble_jobs.data.source import Wanted
from nimble_jobs.decoding import picture, plain, resize
from nimble_jobs.decoding.picture import pixels
from nimble_jobs.decoding.pool import Decoders
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.spec.model import InputSpec
from nimble_jobs.spec.transform import TransformSpec
from tests.photographs import by_pillow, damaged, jpeg, photographs

SIZE = (96, 128)


def recipe(channels: int = 3, size: tuple[int, int] = SIZE) -> Recipe:
    return Recipe(channels=channels, resize=size, center_crop=None, size=size)


def by_definition(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """The resize of `nimble_jobs.resizing`, in float32."""
    x = np.asarray(image, dtype=np.float32).reshape(image.height, image.width, -1).transpose(2, 0, 1)
    x = resizing.weights(image.height, size[0]) @ x @ resizing.weights(image.width, size[1]).T
    return resizing.to_bytes(x).transpose(1, 2, 0)


def furthest(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.abs(a.astype(np.int16) - b.astype(np.int16)).max())


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "MPO"])
def test_formats_are_told_by_what_the_file_holds(name: str) -> None:
    sink = BytesIO()
    Image.new("RGB", (8, 6), (200, 0, 0)).save(sink, name)
    assert furthest(pixels(sink, recipe(size=(6, 8))), np.full((6, 8, 3), (200, 0, 0), dtype=np.uint8)) <= 2


def test_no_picture_starts_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow has Ghostscript draw what calls itself EPS."""
    started = tmp_path / "started"
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 96 128\n%%EndComments\nshowpage\n"
    with pytest.raises(picture.Undecodable, match="cannot identify image file"):
        pixels(BytesIO(eps), recipe())
    with pytest.raises(picture.Undecodable, match="cannot identify image file"):
        picture.header_size(BytesIO(eps))
    assert not started.exists()


@pytest.mark.parametrize("size", [(96, 128), (224, 224), (300, 1000), (1, 1), (700, 20)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_resize_is_near_the_definition(size: tuple[int, int], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 255 at most: with SIMD, and Pillow's own."""
    for name in ("china", "coffee"):
        image = photographs()[name].convert(mode)
        expected = by_definition(image, size)
        for simd in (resize.simd, None):
            with monkeypatch.context() as patched:
                patched.setattr(resize, "simd", simd)
                found = resize.resized(np.asarray(image), size)
            assert furthest(found.reshape(expected.shape), expected) <= 1


@pytest.mark.parametrize("quality", [30, 75, 95])
@pytest.mark.parametrize("how", ["4:2:0", "4:4:4", "grey", "progressive"])
def test_jpegs_are_as_pillow_makes_them(quality: int, how: str) -> None:
    """One of 255 at most, whatever the encoding, for pictures that are not decoded smaller."""
    channels = 1 if how == "grey" else 3
    for image in photographs().values():
        small = image.resize((300, 225)).convert("L" if how == "grey" else "RGB")
        subsampling = how if ":" in how else "4:2:0"
        data = jpeg(small, quality=quality, subsampling=subsampling, progressive=how == "progressive")
        found = pixels(BytesIO(data), recipe(channels))
        assert furthest(found, by_pillow(data, channels, SIZE)) <= 1


@pytest.fixture(params=["simplejpeg", "Pillow"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that decodes plain JPEGs."""
    name: str = request.param
    if name == "Pillow":
        monkeypatch.setattr(plain, "simplejpeg", None)
    return name


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the decoded pictures, before each resize."""
    seen: list[tuple[int, ...]] = []
    real = resize.resized

    def resized(pixels: np.ndarray, *args: Any) -> np.ndarray:
        seen.append(pixels.shape)
        return real(pixels, *args)

    monkeypatch.setattr(picture, "resized", resized)
    return seen


@pytest.mark.parametrize("factor", [4, 8, 16])
@pytest.mark.parametrize("how", ["4:2:0", "4:4:4", "CMYK"])
@pytest.mark.usefixtures("library")
def test_large_jpegs_are_decoded_smaller(factor: int, how: str, shapes: list[tuple[int, ...]]) -> None:
    """What a scaled decoding makes of a photograph differs from the whole one by 2 of 255 on average and 24 at most."""
    for name in ("china", "chelsea", "coffee"):
        large = photographs()[name].resize((SIZE[1] * factor + 5, SIZE[0] * factor + 3), Image.Resampling.LANCZOS)
        data = jpeg(large.convert("CMYK") if how == "CMYK" else large, subsampling=how if ":" in how else "4:2:0")
        found = pixels(BytesIO(data), recipe())
        expected = by_pillow(data, 3, SIZE)
        assert np.abs(found.astype(float) - expected).mean() <= 2
        assert furthest(found, expected) <= 24
        height, width, _ = shapes.pop()
        assert 2 * SIZE[0] <= height < large.height
        assert 2 * SIZE[1] <= width < large.width


@pytest.mark.parametrize("turned", [1, 6])
@pytest.mark.usefixtures("library")
def test_large_jpegs_are_decoded_smaller_by_their_shorter_edge(turned: int, shapes: list[tuple[int, ...]]) -> None:
    """Bilinearly only: bicubic pixels are those of the model's own processor, which decodes in full."""
    exif = Image.Exif()
    exif[0x0112] = turned
    image = photographs()["china"].resize((1600, 1040), Image.Resampling.LANCZOS)
    data = jpeg(image, exif=exif)
    upright = by_pillow(jpeg(picture.ImageOps.exif_transpose(Image.open(BytesIO(data)))), 3, 96, (90, 80))
    bilinear = Recipe(channels=3, resize=None, center_crop=(90, 80), size=(90, 80), shortest_edge=96)
    found = pixels(BytesIO(data), bilinear)
    assert np.abs(found.astype(float) - upright).mean() <= 2
    assert furthest(found, upright) <= 24
    pixels(BytesIO(data), replace(bilinear, interpolation="bicubic"))
    assert [max(shape) for shape in shapes] == [1600 // 4, 1600]


def test_sides_are_divided_by_powers_of_two_that_leave_twice_the_result() -> None:
    assert [plain.scale_of(n * 10, 1000, (10, 10)) for n in (3, 4, 7, 8, 15, 16, 99)] == [1, 2, 2, 4, 4, 8, 8]
    assert plain.scale_of(1000, 39, (10, 10)) == 1
    assert plain.scale_of(1000, 1000, None) == 1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("how", ["4:2:0", "4:2:2", "4:4:4", "grey", "progressive", "two pictures"])
def test_plain_jpegs_have_the_bytes_of_pillow(channels: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In full and decoded smaller, whole and in part, with odd sides, whoever decodes."""
    for factor in (1, 3, 9):
        image = photographs()["chelsea"].resize((SIZE[1] * factor + 5, SIZE[0] * factor + 3))
        kind = image.convert("L" if how == "grey" else "RGB")
        subsampling = how if ":" in how else "4:2:0"
        data = jpeg(kind, quality=80, subsampling=subsampling, progressive=how == "progressive")
        if how == "two pictures":
            both = BytesIO()
            kind.save(both, "MPO", quality=80, save_all=True, append_images=[kind])
            data = both.getvalue()
        wanted = recipe(channels), recipe(channels).of_parts
        parts = None, lambda height, width: (height // 3, width // 5, height // 2, width // 2)
        expected = []
        for simplejpeg in (plain.simplejpeg, None):
            with monkeypatch.context() as patched:
                patched.setattr(plain, "simplejpeg", simplejpeg)
                one = plain.decoded(BytesIO(data), wanted[0], smaller=True)
                assert (one is None) == (simplejpeg is None or (channels == 1 and how != "grey"))
                expected.append([pixels(BytesIO(data), *given) for given in zip(wanted, parts, strict=True)])
        np.testing.assert_array_equal(*expected)


def outcome(data: bytes) -> bytes | str:
    """The pixels of a file, or why there are none."""
    try:
        return pixels(BytesIO(data), recipe()).tobytes()
    except picture.Undecodable as e:
        return str(e)


@pytest.mark.filterwarnings("ignore")  # Pillow's about damaged files
def test_of_damaged_jpegs_pillow_makes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """What libjpeg only warns about is left to Pillow, so pixels and reasons are Pillow's."""
    files = [hostile(seed)[1] for seed in range(200)]
    mine = [outcome(data) for data in files]
    monkeypatch.setattr(plain, "simplejpeg", None)
    assert mine == [outcome(data) for data in files]
    assert 20 < sum(isinstance(one, bytes) for one in mine) < 180


def test_very_large_files_are_left_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads them in pieces."""
    data = jpeg(photographs()["coffee"].resize((64, 48)))
    monkeypatch.setattr(plain, "_LARGEST", len(data) - 1)
    file = BytesIO(data)
    assert plain.decoded(file, recipe(), smaller=True) is None
    assert file.tell() == 0
    assert pixels(file, recipe()).shape == (*SIZE, 3)


def test_the_decoder_is_named_with_its_version(library: str) -> None:
    names = [one.split()[0] for one in picture.decoder().split(", ")]
    assert names == (["simplejpeg"] if library == "simplejpeg" else []) + ["Pillow", "cykooz-resizer"]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("side", [512, 517])
def test_turned_jpegs_are_decoded_smaller_and_turned(orientation: int, side: int) -> None:
    """The same pixels as of the whole picture, turned, up to what scaling makes of it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    size = (64, 48)
    data = jpeg(photographs()["astronaut"].resize((side, side + 128)), exif=exif)
    with Image.open(BytesIO(data)) as image:
        image.load()
        whole = picture.ImageOps.exif_transpose(image)
    expected = by_definition(whole, size)
    found = pixels(BytesIO(data), recipe(size=size))
    assert np.abs(found.astype(float) - expected).mean() <= 2
    assert furthest(found, expected) <= 24


def hostile(seed: int) -> tuple[str, bytes]:
    """A name and a file that is wrong in some way, or nearly right."""
    rng = np.random.default_rng(seed)
    names = list(photographs())
    good = jpeg(photographs()[names[seed % len(names)]].resize((64, 48)), progressive=bool(seed % 2))
    kind = seed % 7
    if kind == 0:
        return "huge", good.replace(b"\0\x30\0\x40", rng.integers(200, 256, 4, dtype=np.uint8).tobytes(), 1)
    if kind == 1:
        return "empty", b""
    if kind == 2:
        sink = BytesIO()
        photographs()["coffee"].resize((40, 30)).save(sink, ("PNG", "GIF", "BMP", "TIFF", "WEBP")[seed // 7 % 5])
        return "other", damaged(sink.getvalue(), seed) if seed % 3 else sink.getvalue()
    if kind == 3:
        return "noise", good[:20] + rng.integers(0, 256, 300, dtype=np.uint8).tobytes()
    return "damaged", damaged(good, seed)


@pytest.mark.filterwarnings("ignore")  # Pillow's, which differ between threads and processes only as errors
def test_damaged_files_end_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Threads and processes make the same of each, pixels or a reason; no process dies. 500 with --all."""
    for seed in range(500 if request.config.getoption("--all") else 70):
        name, data = hostile(seed)
        (tmp_path / f"{seed:03}-{name}.jpg").write_bytes(data)
    monkeypatch.setattr(reader, "FEW", 1)
    spec = InputSpec(source=str(tmp_path), format="images", transform=TransformSpec(resize=(16, 12)))  # type: ignore[arg-type]
    decoders = Decoders(2)
    try:
        with warnings.catch_warnings(), open_reader(spec) as here, open_reader(spec) as away:
            warnings.simplefilter("ignore")
            away.hire(decoders)
            pids: set[int] = set()
            good = bad = 0
            for encoded in (False, True):
                wanted = Wanted(encoded=encoded, stored=not encoded)
                expected = here.batches(batch_size=32, wanted=wanted)
                for mine, theirs in zip(expected, away.batches(batch_size=32, wanted=wanted), strict=True):
                    pids |= set(decoders.pids)
                    np.testing.assert_array_equal(mine.x, theirs.x)
                    assert (mine.ids, mine.bad) == (theirs.ids, theirs.bad)
                    if mine.pictures is not None and theirs.pictures is not None:
                        np.testing.assert_array_equal(mine.pictures.spans[:, 1], theirs.pictures.spans[:, 1])
                        np.testing.assert_array_equal(mine.pictures.alike, theirs.pictures.alike)
                    good, bad = good + len(mine.ids), bad + len(mine.bad)
        assert len(pids) == 2
        assert decoders.trouble is None
        assert min(good, bad) > 10
    finally:
        decoders.close()
