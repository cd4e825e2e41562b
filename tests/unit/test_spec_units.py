"""Durations and sizes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.errors import UsageError
from nimble_jobs.spec.units import LONGEST_S, format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("10m", 600),
        ("5s", 5),
        (90, 90),
        ("90", 90),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("500ms", 0.5),
        (0, 0),
        (0.25, 0.25),
        ("1d2h3m4s5ms", 93784.005),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    """Numbers are seconds; units may follow each other from large to small."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h",
        "2 h",
        "2H",
        "-5s",
        "1m1h",
        "1m1m",
        "1e3s",
        "5 s",
        ".5s",
        "٣s",
        "1h30",
        -1,
        True,
        None,
        [],
        "9999d",
        1e300,
        10**400,
        float("nan"),
        float("inf"),
        "9" * 400,
    ],
)
def test_what_is_no_duration(text: object) -> None:
    """Anything doubtful is refused with what was expected."""
    with pytest.raises(UsageError, match=r"; expected .*duration"):
        parse_duration(text)


@given(st.floats(0, LONGEST_S))
def test_duration_round_trip(seconds: float) -> None:
    """What is shown is read back to the nearest millisecond."""
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=0.000501, rel=0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.012, "12ms"),
        (5, "5s"),
        (5.25, "5.25s"),
        (90, "1m30s"),
        (5400, "1h30m"),
        (86400, "1d"),
        (59.9999, "1m"),
        (3600.5, "1h0.5s"),
    ],
)
def test_durations_shown(seconds: float, text: str) -> None:
    """The shortest of the forms."""
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GB", 20 * 10**9),
        ("512MiB", 512 * 2**20),
        (7, 7),
        ("7", 7),
        ("1.5 kB", 1500),
        ("1TiB", 2**40),
        ("0", 0),
        ("9007199254740993B", 2**53 + 1),
    ],
)
def test_sizes(text: object, size: int) -> None:
    """Powers of 1000, or of 1024 with an i; whole numbers are exact."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "20G", "-1", "1e9", "1 0", True, None, 1.5, "99999999TB", 2**63, "20  GB"])
def test_what_is_no_size(text: object) -> None:
    """Anything doubtful is refused."""
    with pytest.raises(UsageError, match="expected bytes or a size"):
        parse_bytes(text)


@given(st.integers(0, 2**62))
def test_size_round_trip(size: int) -> None:
    """What is shown is read back to three digits."""
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.0051, abs=0)


@given(st.text(max_size=12) | st.from_regex(r"[0-9.]{1,4}[a-zA-Z]{0,3}", fullmatch=True))
def test_no_other_error(text: str) -> None:
    """Whatever the text, there is an answer in range or one kind of error."""
    for parse in (parse_duration, parse_bytes):
        with contextlib.suppress(UsageError):
            assert parse(text) >= 0
