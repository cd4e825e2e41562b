"""Image files: which are records, what is done to each, and which are bad."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nimble_jobs.data import open_reader
from nimble_jobs.decoding import picture
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.transform import TransformSpec

PIXELS = np.random.default_rng(0).integers(0, 256, size=(8, 6, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, kind: str, **options: object) -> bytes:
    sink = BytesIO()
    Image.fromarray(pixels).save(sink, kind, **options)
    return sink.getvalue()


def spec_of(folder: Path | str, **transform: object) -> InputSpec:
    return InputSpec(source=str(folder), format="images", transform=TransformSpec(**transform))  # type: ignore[arg-type]


def test_records_are_sorted_and_hidden_or_other_files_are_none(tmp_path: Path) -> None:
    """Ids are paths below the folder, in every subfolder, through links, sorted; other files are not records."""
    for name in ("b.png", "a/z.PNG", "a/c/d.png", ".hidden.png", ".git/e.png", "._f.png", "g.txt", "h"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(PIXELS, "PNG"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.png").write_bytes(encoded(PIXELS, "PNG"))
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "folder.png").mkdir()
    with open_reader(spec_of(tmp_path / "in")) as reader:
        assert [reader.id(i) for i in range(reader.total)] == ["a/c/d.png", "a/z.PNG", "b.png", "link/x.png"]
    with open_reader(spec_of(f"{tmp_path}/in/**/*.png")) as reader:
        assert {"a/c/d.png", "b.png"} <= {reader.id(i) for i in range(reader.total)}
    with open_reader(spec_of(tmp_path / "in" / "b.png")) as reader:
        assert reader.id(0) == "b.png"


def test_links_that_cannot_be_followed_are_bad_records(tmp_path: Path) -> None:
    """They lead to themselves, or have a target whose name is too long; the others are scored."""
    (tmp_path / "a.png").write_bytes(encoded(PIXELS, "PNG"))
    (tmp_path / "b.png").symlink_to("b.png")
    (tmp_path / "c.png").symlink_to("x" * 300)
    with open_reader(spec_of(tmp_path, resize=(8, 8))) as reader:
        [batch] = reader.batches(batch_size=3)
    assert batch.ids == ["a.png"]
    assert [bad.id for bad in batch.bad] == ["b.png", "c.png"]


def test_bad_images_are_named_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated, foreign, empty, oversized and dangling files are bad records with a reason; the others are scored."""
    whole = encoded(PIXELS.repeat(20, 0).repeat(20, 1), "JPEG")
    contents = {
        "0-good.jpg": whole,
        "1-truncated.jpg": whole[: len(whole) // 2],
        "2-text.jpg": b"no image at all",
        "3-empty.png": b"",
        "4-float.tiff": encoded(np.ones((4, 4), np.float32), "TIFF"),
        "6-good.png": encoded(PIXELS, "PNG"),
        "7-bomb.png": encoded(np.zeros((400, 400), np.uint8), "PNG"),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "5-dangling.png").symlink_to(tmp_path / "absent.png")
    monkeypatch.setattr(picture, "MAX_PIXELS", 100_000)
    with open_reader(spec_of(tmp_path, resize=(8, 8))) as reader:
        batches = list(reader.batches(batch_size=3))
    assert [i for b in batches for i in b.ids] == ["0-good.jpg", "6-good.png"]
    bad = {r.id: r for b in batches for r in b.bad}
    assert [r.index for r in bad.values()] == [1, 2, 3, 4, 5, 7]
    assert "truncated" in bad["1-truncated.jpg"].reason
    assert "cannot identify image" in bad["2-text.jpg"].reason
    assert "cannot be decoded" in bad["3-empty.png"].reason
    assert "mode F (32 bits a pixel)" in bad["4-float.tiff"].reason
    assert "it is a broken link" in bad["5-dangling.png"].reason
    assert bad["7-bomb.png"].reason == "image is 400x400 pixels; expected at most 100000 in all"
    assert [b.x.shape for b in batches] == [(1, 3, 8, 8), (0, 3, 8, 8), (1, 3, 8, 8)]


def test_an_image_beyond_pillows_own_limit_is_bad_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's decompression-bomb error becomes a bad record."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    (tmp_path / "a.png").write_bytes(encoded(PIXELS, "PNG"))
    with open_reader(spec_of(tmp_path, resize=(8, 8))) as reader:
        (batch,) = reader.batches(batch_size=1)
    assert "decompression bomb" in batch.bad[0].reason


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_images_are_turned_upright(orientation: int, tmp_path: Path) -> None:
    """The camera's orientation tag is applied, also to the size that is read from the header."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = Image.fromarray(PIXELS)
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that undoes each tag, as Pillow numbers them
    if orientation in back:
        turned = turned.transpose(Image.Transpose(back[orientation]))
    turned.save(tmp_path / "a.png", exif=exif)
    with open_reader(spec_of(tmp_path)) as reader:
        (batch,) = reader.batches(batch_size=1)
    assert batch.bad == ()
    np.testing.assert_allclose(batch.x[0] * 255, PIXELS.transpose(2, 0, 1), atol=1e-3)


def test_every_mode_becomes_rgb_or_grey(tmp_path: Path) -> None:
    """Palettes, alpha, 16 bits, one bit and CMYK are converted; 16 bits are scaled, not clipped."""
    grey = PIXELS[..., 0]
    base = Image.fromarray(PIXELS)
    base.convert("RGBA").save(tmp_path / "rgba.png")
    base.convert("P").save(tmp_path / "palette.png", transparency=bytes(range(256)))
    base.convert("CMYK").save(tmp_path / "cmyk.tiff")
    Image.fromarray(grey).convert("LA").save(tmp_path / "la.png")
    Image.fromarray(grey).convert("1").save(tmp_path / "one.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "sixteen.png")
    for channels in (1, 3):
        with open_reader(spec_of(tmp_path, channels=channels)) as reader:
            batch = reader.take(np.arange(reader.total))
        assert batch.bad == ()
        x = dict(zip(batch.ids, batch.x * 255, strict=True))
        assert x["rgba.png"].shape == (channels, 8, 6)
        np.testing.assert_allclose(x["sixteen.png"][0], grey, atol=1e-3)
        np.testing.assert_allclose(x["la.png"][-1], grey, atol=1e-3)
        assert set(np.unique(x["one.png"]).round().tolist()) == {0.0, 255.0}


def test_different_sizes_need_a_resize(tmp_path: Path) -> None:
    """Images of two sizes without a resize are refused, naming one of each; a crop that all can give is enough."""
    (tmp_path / "a.png").write_bytes(encoded(PIXELS, "PNG"))
    (tmp_path / "b.png").write_bytes(encoded(PIXELS[:5], "PNG"))
    (tmp_path / "c.png").write_bytes(b"broken")
    with pytest.raises(
        DataError, match=r"a\.png is 8x6 and b\.png is 5x6 pixels .*expected one size, or input\.transform"
    ):
        open_reader(spec_of(tmp_path))
    with open_reader(spec_of(tmp_path, center_crop=(4, 4))) as reader:
        batch = reader.take(np.arange(3))
    np.testing.assert_allclose(batch.x[0] * 255, PIXELS[2:6, 1:5].transpose(2, 0, 1), atol=1e-3)
    with open_reader(spec_of(tmp_path, center_crop=(6, 4))) as reader:
        reasons = [b.reason for b in reader.take(np.arange(3)).bad]
    assert reasons[0] == "image is 5x6 pixels; expected at least 6x4 for transform.center_crop"


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    """An empty folder, one without images, one of broken images and a missing one each say what was expected."""
    with pytest.raises(DataError, match=r"no images among 0 files; expected .*\.png"):
        open_reader(spec_of(tmp_path))
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="no images among 1 files"):
        open_reader(spec_of(tmp_path))
    with pytest.raises(DataError, match="no images among 0 files"):
        open_reader(spec_of(tmp_path / "*.png"))
    (tmp_path / "b.png").touch()
    with pytest.raises(DataError, match=r"none of 1 images can be decoded; the first: b\.png: cannot be decoded"):
        open_reader(spec_of(tmp_path))
    with pytest.raises(DataError, match="no such file or folder"):
        open_reader(spec_of(tmp_path / "absent"))


def test_only_the_parent_folder_can_be_a_label(tmp_path: Path) -> None:
    """Image files have no fields; ids and labels other than the built-in ones are refused."""
    (tmp_path / "a.png").write_bytes(encoded(PIXELS, "PNG"))
    for field in ("id", "label"):
        spec = spec_of(tmp_path).model_copy(update={"fields": FieldsSpec(**{field: "x"})})  # type: ignore[arg-type]
        with pytest.raises(DataError, match=rf"input\.fields\.{field}: found 'x'; expected"):
            open_reader(spec)
