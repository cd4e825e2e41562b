"""Which rows of a listing are printed, and how wide its columns are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.cli import output
from nimble_jobs.cli.listing import Column, Selection, _widths
from nimble_jobs.errors import UsageError

NOW = 1_800_000_000.0
KEYS = ["id", "bytes", "replay_us", "build_s", "created_at", "last_used_at", "state"]


def row(name: str, *, nbytes: int = 0, replay_us: float = 0.0, age_s: float = 0.0) -> dict[str, object]:
    return {
        "id": name,
        "bytes": nbytes,
        "replay_us": replay_us,
        "build_s": age_s,
        "created_at": output.iso(NOW - age_s),
        "last_used_at": None if name == "never" else output.iso(NOW - age_s),
        "state": "ready",
    }


ROWS = [
    row("small", nbytes=10, replay_us=500.0, age_s=60.0),
    row("large", nbytes=2_000_000, replay_us=2500.0, age_s=40 * 86400.0),
    row("never", nbytes=1000, replay_us=1000.0, age_s=3600.0),
]


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        ("size>1MB", ["large"]),
        ("size>=1kB", ["large", "never"]),
        ("bytes=10", ["small"]),
        ("replay<2ms", ["small", "never"]),
        ("replay_us<=500", ["small"]),
        ("build>1d", ["large"]),
        ("used>30d", ["large"]),
        ("used<1h", ["small"]),
        ("used=null", ["never"]),
        ("created>=1h", ["large", "never"]),
        ("created<1h30m", ["small", "never"]),
        ("created<2027-01-01", ["large"]),
        ("id=*l*", ["small", "large"]),
        ("state!=ready", []),
    ],
)
def test_filters(condition: str, names: list[str]) -> None:
    """Sizes, durations and ages are understood under short names; a row without a value never matches an order."""
    assert [r["id"] for r in Selection(filters=[condition], now=NOW).apply(list(ROWS), KEYS)] == names


@pytest.mark.parametrize("condition", ["siz>1", "size", "size>lots", "used"])
def test_bad_filters(condition: str) -> None:
    """Named, with what was expected."""
    with pytest.raises(UsageError, match="--filter"):
        Selection(filters=[condition]).apply(list(ROWS), KEYS)


def test_sort_under_short_names() -> None:
    """Rows without a value come last, whichever way."""
    for sort, names in (("-size", ["large", "never", "small"]), ("used", ["large", "small", "never"])):
        assert [r["id"] for r in Selection(sort=sort, now=NOW).apply(list(ROWS), KEYS)] == names


@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=6),
    available=st.integers(20, 200),
)
def test_widths(lengths: list[tuple[int, bool]], available: int) -> None:
    """Nothing is cut that need not be: flexible columns give way, none below eight, all others keep what they hold."""
    cells = {f"c{i}": "x" * length for i, (length, _) in enumerate(lengths)}
    columns = [
        Column(header="H", cell=lambda r, name=f"c{i}": r[name], flexible=flexible)
        for i, (_, flexible) in enumerate(lengths)
    ]
    found = _widths([cells], columns, available)
    needed = [max(1, length) for length, _ in lengths]
    gaps = 2 * (len(columns) - 1)
    if sum(needed) + gaps <= available:
        assert found == needed
        return
    for width, need, column in zip(found, needed, columns, strict=True):
        assert width == need if not column.flexible else min(8, need) <= width <= need
    cannot = all(width <= 8 for width, column in zip(found, columns, strict=True) if column.flexible)
    assert sum(found) + gaps == available or cannot


@given(text=st.text(alphabet=st.sampled_from("a \t\n\0\x1b\x7f\x9b\ud800é")))
def test_nothing_printed_steers_a_terminal(text: str) -> None:
    """Escapes for controls and lone surrogates, in text and in JSON, which still reads as the same value."""
    shown = output.visible(text)
    assert all(letter.isprintable() or letter in "\t\n" for letter in shown)
    shown.encode()
    assert json.loads(output.visible(json.dumps([text], ensure_ascii=False))) == [text]
    assert output.visible(shown) == shown
