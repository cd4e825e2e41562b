"""Which JPEGs are whole enough for a GPU's engines, as far as tables and markers show."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nimble_jobs.decoding import jpeg
from nimble_jobs.decoding.jpeg_scan import end_of
from tests.photographs import damaged, photographs
from tests.photographs import jpeg as encoded

PHOTO = photographs()["chelsea"].resize((67, 45))
PLAIN = encoded(PHOTO)
TURNS = encoded(PHOTO, restart_marker_blocks=2)  # with restart markers
SOS = PLAIN.index(b"\xff\xda")
DQT, DHT = PLAIN.index(b"\xff\xdb"), PLAIN.index(b"\xff\xc4")
FIRST = TURNS.index(b"\xff\xd0")


def end(data: bytes) -> int | None:
    header = jpeg.parse(data)
    assert header is not None
    return end_of(memoryview(data), header)


def changed(at: int, new: bytes, data: bytes = PLAIN) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def with_table(table: bytes) -> bytes:
    """The plain picture with one more DHT segment."""
    return PLAIN[:2] + b"\xff\xc4" + (len(table) + 2).to_bytes(2) + table + PLAIN[2:]


def counts(**of_bits: int) -> bytes:
    """Codes by their length, `_1` to `_16`."""
    return bytes(of_bits.get(f"_{bits}", 0) for bits in range(1, 17))


@pytest.mark.parametrize("name", ["chelsea", "ihc"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"subsampling": "4:4:4"},
        {"subsampling": "4:2:2"},
        {"optimize": True},
        {"restart_marker_blocks": 1},
        {"restart_marker_rows": 1},
        {"restart_marker_blocks": 1, "subsampling": "4:2:2"},
        {"quality": 1},
        {"quality": 100},
    ],
)
@pytest.mark.parametrize("size", [(67, 45), (8, 8), (1, 1), (16, 300)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_whole_pictures_end_where_they_end(name: str, how: dict[str, object], size: tuple[int, int], mode: str) -> None:
    data = encoded(photographs()[name].resize(size).convert(mode), **how)
    assert end(data) == len(data)


def test_what_follows_the_image_does_not_count() -> None:
    """As in files of phones, which put another JPEG behind."""
    assert end(PLAIN + TURNS) == len(PLAIN)
    assert end(TURNS + b"\xff\xff" + PLAIN) == len(TURNS)
    assert end(with_table(b"\0" + counts(_2=3) + bytes((0, 1, 11)))) == len(PLAIN) + 24


@pytest.mark.parametrize(
    "data",
    [
        PLAIN[:-1],
        PLAIN[:-2],
        PLAIN[:-1] + b"\xd8",
        changed(len(PLAIN) - 20, b"\xff\x01"),
        changed(len(PLAIN) - 20, b"\xff\xd0"),  # a restart marker, but no interval
        changed(len(PLAIN) - 20, b"\xff\xff"),
        changed(FIRST + 1, b"\xd1", TURNS),
        changed(FIRST, b"\0", TURNS),
        TURNS[:FIRST] + b"\xff\xd9",
        TURNS[:-2] + b"\xff\xd7\xff\xd9",
        changed(DQT + 4, b"\4"),  # table 4
        changed(DQT + 4, b"\1"),  # table 0 is missing then
        changed(DQT + 10, b"\0"),  # divides by zero
        changed(DHT + 4, b"\2"),
        changed(DHT + 4, b"\x11"),
        changed(DHT + 5, b"\3"),  # three codes of one bit
        PLAIN[:2] + b"\xff\xdb\0\3\0" + PLAIN[2:],  # a table that is cut
        PLAIN[:2] + b"\xff\xdd\0\3\0" + PLAIN[2:],  # an interval of one byte
        with_table(b"\0" + counts(_1=2)[:-1]),
        with_table(b"\0" + counts(_2=2) + b"\1"),
        with_table(b"\0" + counts()),
        with_table(b"\0" + counts(_2=2) + b"\1\1"),  # the same symbol twice
        with_table(b"\0" + counts(_2=1) + b"\x0c"),  # 12 bits of a difference
        with_table(b"\x10" + counts(_2=1) + b"\x0b"),
        with_table(b"\x10" + counts(_2=1) + b"\x10"),  # zeros without a value
        with_table(b"\0" + counts(_1=1, _2=3) + bytes((0, 1, 2, 3))),
        changed(SOS + 2, b"\0\x0d"),
        changed(SOS + 4, b"\2"),
        changed(SOS + 5, b"\2"),
        changed(SOS + 6, b"\x31"),
        changed(SOS + 11, b"\1"),
        changed(SOS + 12, b"\x3e"),
        changed(SOS + 13, b"\x01"),
        PLAIN[:2] + b"\xff" + PLAIN[2:],  # a fill byte, which may come here: the host decodes it
        PLAIN[: SOS + 7],
    ],
)
def test_damage_that_shows(data: bytes) -> None:
    assert end(data) is None


@given(st.integers(0, 2**32 - 1))
def test_a_cut_always_shows(seed: int) -> None:
    """Whatever is cut off; and nothing is raised for any other damage."""
    data = damaged(PLAIN, seed)
    header = jpeg.parse(data)
    found = None if header is None else end_of(memoryview(data), header)
    if len(data) < len(PLAIN):
        assert found is None
    else:
        assert found is None or found <= len(data)


@given(st.binary(max_size=300), st.integers(2, SOS + 20))
@example(b"", 2)
@example(b"\xff\xda", 20)
@example(b"\xff\xc4\0\2\xff\xdb\0\2", 2)
def test_any_bytes_can_be_given(middle: bytes, at: int) -> None:
    for data in (PLAIN[:at] + middle, PLAIN[:at] + middle + PLAIN[at:]):
        header = jpeg.parse(data)
        if header is not None:
            end_of(memoryview(data), header)
