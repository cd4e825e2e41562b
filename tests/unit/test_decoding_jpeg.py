"""What the header of a JPEG says, for any bytes, and who may decode it."""

from __future__ import annotations

from io import BytesIO

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from nimble_jobs.decoding import jpeg
from tests.photographs import damaged, photographs
from tests.photographs import jpeg as encoded

SMALL = photographs()["coffee"].resize((64, 48))
PLAIN = encoded(SMALL)


def with_orientation(value: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    return encoded(SMALL, exif=exif)


def in_mode(mode: str) -> bytes:
    sink = BytesIO()
    SMALL.convert(mode).save(sink, "JPEG")
    return sink.getvalue()


def after_start(segment: bytes) -> bytes:
    """The plain picture with one more segment."""
    return PLAIN[:2] + segment + PLAIN[2:]


XMP = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'


@pytest.mark.parametrize(
    ("data", "plain"),
    [
        (PLAIN, True),
        (encoded(SMALL, subsampling="4:4:4"), True),
        (encoded(SMALL, subsampling="4:2:2"), True),
        (encoded(SMALL, progressive=True), True),
        (in_mode("L"), True),
        (with_orientation(1), True),
        (after_start(b"\xff\xff\xfe\0\5abc"), True),
        (in_mode("CMYK"), False),
        (with_orientation(6), False),
        (with_orientation(9), False),
        (PLAIN[:-1], False),
        (PLAIN + b"\0", False),
        (after_start(b"\xff\xe1" + (len(XMP) + 2).to_bytes(2, "big") + XMP), False),
        (after_start(b"\xff\xe1\0\x10Exif\0\0II*\0\xff\xff\xff\xff"), False),
        (PLAIN.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"), False),
        (PLAIN.replace(b"\xff\xc0", b"\xff\xc9"), False),
        (keep_rgb := encoded(SMALL, keep_rgb=True, subsampling="4:4:4"), False),
    ],
)
def test_who_may_decode(data: bytes, plain: bool) -> None:
    """8 bits, baseline or progressive, grey or YCbCr, upright and complete; in doubt it is not plain."""
    found = jpeg.parse(data)
    assert found is not None
    assert found.plain == plain
    assert (found.height, found.width) == (48, 64)


@given(st.binary(max_size=400))
@example(b"")
@example(b"\xff\xd8")
@example(b"\xff\xd8\xff\xe1\0\2")
@example(b"\xff\xd8\xff\xc0\0\x08\x08\0\0\0\0\0")
def test_any_bytes_can_be_given(data: bytes) -> None:
    """Nothing is raised, also after what looks like the beginning of a JPEG."""
    for start in (b"", b"\xff\xd8", PLAIN[:20], PLAIN[:200], with_orientation(3)[:40]):
        jpeg.parse(start + data)
        jpeg.parse(memoryview(bytearray(start + data)))


@given(st.integers(0, 2**32 - 1))
def test_damaged_headers_can_be_given(seed: int) -> None:
    """What is said of them agrees with Pillow where that can read them."""
    data = damaged(PLAIN, seed)
    found = jpeg.parse(data)
    if found is None or not found.plain:
        return
    try:
        with Image.open(BytesIO(data)) as image:
            assert (found.height, found.width) == (image.height, image.width)
    except OSError:
        return


def number(data: bytes) -> int:
    header = jpeg.parse(data)
    assert header is not None
    return jpeg.alike(memoryview(data), header)


def test_headers_are_alike_if_they_differ_in_what_decoders_skip() -> None:
    """Other pixels, EXIF, a comment; and not if size, tables, sampling or components differ."""
    other = photographs()["chelsea"].resize(SMALL.size)
    alike = [PLAIN, encoded(other), with_orientation(1), after_start(b"\xff\xfe\0\5abc")]
    assert len({number(data) for data in alike}) == 1
    different = [
        PLAIN,
        encoded(SMALL.resize((48, 64))),
        encoded(SMALL, quality=89),
        encoded(SMALL, optimize=True),
        encoded(SMALL, subsampling="4:4:4"),
        encoded(SMALL, restart_marker_blocks=2),
        in_mode("L"),
        PLAIN.replace(b"JFIF", b"JFXX"),
    ]
    numbers = [number(data) for data in different]
    assert len(set(numbers)) == len(different)
    assert all(0 < one < 1 << 63 for one in numbers)


@pytest.mark.parametrize("marker", [0x02, 0xC8, 0xCC, 0xDE, 0xDF, 0xF0, 0xFD])
def test_a_header_with_what_some_decoders_obey(marker: int) -> None:
    """Such a segment may say another size. No decoder on the device gets the file because it got one like it."""
    with_frame = bytes((0xFF, marker, 0, 17, 8, 2, 0, 2, 0, 3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1))
    for data in (after_start(with_frame), PLAIN.replace(b"\xff\xda", with_frame + b"\xff\xda", 1)):
        header = jpeg.parse(data)
        assert header is None or header.scan is None
