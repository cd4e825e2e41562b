"""Unquoted scalars mean what YAML 1.2 says, and never what only YAML 1.1 says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.spec.scalars import Scalar, resolve
from nimble_jobs.spec.tree import parse
from nimble_jobs.spec.units import BadValue


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1.0e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("1.", 1.0), ("+7", 7), ("-0", 0), ("0x1F", 31)]
    + [("0o17", 15), ("0b11", "0b11"), ("12:30:00", "12:30:00"), ("1_000", "1_000"), ("2026-01-02", "2026-01-02")]
    + [(word, word) for word in ("on", "off", "yes", "no", "Yes", "NO", "y", "n", "tRUE", "1e", "e5", ".", "-", "=")]
    + [("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("nULL", "nULL"), ("1.2.3", "1.2.3")],
)
def test_core_schema(text: str, value: Scalar) -> None:
    """Type and value."""
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)


@pytest.mark.parametrize(
    "text", ["010", "-007", "00", ".inf", "-.INF", ".nan", "1e999", "9" * 20, "0x" + "f" * 20, "9" * 9999]
)
def test_refused(text: str) -> None:
    """A leading zero has two readings; what is not finite or beyond 64 bits has no place in a spec."""
    with pytest.raises(BadValue):
        resolve(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip(number: float) -> None:
    """Python's own spelling of a float is read back exactly."""
    assert resolve(repr(number)) == number


@given(st.integers(-(2**63), 2**63 - 1))
def test_integers_round_trip(number: int) -> None:
    """All of 64 bits, in three bases."""
    assert resolve(str(number)) == number
    if number >= 0:
        assert resolve(hex(number)) == resolve(f"0o{number:o}") == number


@given(st.text(alphabet="0123456789+-.eExo_:infaNtrule~", max_size=12))
def test_any_scalar(text: str) -> None:
    """A scalar is a value of five types or one kind of error; a number is finite; a text is itself."""
    try:
        value = resolve(text)
    except BadValue:
        return
    assert value is None or isinstance(value, bool | int | float | str)
    if isinstance(value, float):
        assert math.isfinite(value)
    if isinstance(value, str):
        assert value == text


def test_quotes_make_a_text() -> None:
    """Quoted scalars, block scalars and !!str are texts; other core tags must fit."""
    text = "a: '1'\nb: \"true\"\nc: |\n  null\nd: !!str 010\ne: !!float 1\nf: !!int 0x10\ng: ! 5\n"
    tree = parse(text, "f")
    assert tree.value == {"a": "1", "b": "true", "c": "null\n", "d": "010", "e": 1.0, "f": 16, "g": "5"}
    assert tree.problems == []


def test_keys_are_texts() -> None:
    """A key is what is written, whatever a value of that spelling would be."""
    assert parse("on: 1\n1: 2\nnull: 3\n12:30: 4\n", "f").value == {"on": 1, "1": 2, "null": 3, "12:30": 4}


def test_lines() -> None:
    """Every value knows its line, also in flow collections and after folded texts."""
    tree = parse("a:\n  b: [1,\n    2]\n  c: >\n    x\n    y\nd: {e: 1,\n  f: 2}\n", "f")
    lines = {where: origin.line for where, origin in tree.origins.items()}
    assert lines[("a", "b", 0)] == 2
    assert lines[("a", "b", 1)] == 3
    assert lines[("a", "c")] == 4
    assert lines[("d", "e")] == 7
    assert lines[("d", "f")] == 8
