"""Whatever a file or an override holds, the answer is a spec or a SpecError of printable lines."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs import spec
from nimble_jobs.errors import Problem, SpecError
from tests.bad_timers import timer
from tests.unit.test_spec_good import FULL_SCORE, FULL_TRAIN
from tests.unit.test_spec_timers import FULL

BASE = Path("/nowhere")
TIMER = timer(FULL)
FRAGMENTS = [
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!python/x ",
    b"!<%ff> ",
    b"%YAML 9.9\n",
    b"---\n",
    b"...\n",
    b"[",
    b"{",
    b"]",
    b"}",
]
FRAGMENTS += [
    b'"\\U0011ffff"',
    b'"\\ud800"',
    b"\t",
    b"\0",
    b"? ",
    b"- ",
    b": ",
    b"|",
    b">",
    b"\xff",
    b"\xe2\x80\xa8",
    b"\r",
]
FRAGMENTS += [
    b"010",
    b".inf",
    b"1e999",
    b"null",
    b"'",
    b'"',
    b"~",
    b"\n",
    b"9" * 40,
    b"%TAG ! x\n",
    b"\x85",
    b"\xef\xbb\xbf",
]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def accept(text: str | bytes, *overrides: str) -> None:
    """Fails for any error but a well-made SpecError, and for a spec that cannot be stored."""
    problems: tuple[Problem, ...] = ()
    try:
        job = spec.loads(text, "f", BASE, overrides, check_files=False)
    except SpecError as e:
        problems = e.problems
        job = None
    assert (job is None) == bool(problems)
    for problem in problems:
        assert str(problem).isprintable()
        str(problem).encode()
    assert job is None or spec.restore(json.loads(json.dumps(spec.dump(job), allow_nan=False))) == job


@given(st.binary(max_size=80))
def test_random_bytes(raw: bytes) -> None:
    """No bytes get through as anything else."""
    accept(raw)


@given(st.sampled_from([FULL_SCORE, FULL_TRAIN, TIMER]), st.data())
def test_damaged_specs(text: str, data: st.DataObject) -> None:
    """A good spec with pieces cut out and put in."""
    raw = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        cut = data.draw(st.integers(0, 20))
        raw[at : at + cut] = data.draw(st.sampled_from(FRAGMENTS) | st.binary(max_size=2))
    accept(bytes(raw))


@given(st.sampled_from(sorted(json.loads(json.dumps(spec.json_schema()["properties"])))), st.text(max_size=8), values)
def test_any_value_anywhere(section: str, field: str, value: object) -> None:
    """Any JSON value in any place, by file and by override, also inside a section."""
    shown = json.dumps(value)
    accept(f"{FULL_SCORE}\n? {json.dumps(field)}\n: {shown}\n", f"{section}={shown}", f"{section}.{field}={shown}")


@given(st.text(max_size=30))
def test_any_override(text: str) -> None:
    """An override is an assignment or a problem."""
    accept(FULL_SCORE, text)


@settings(deadline=None)  # years are walked through
@given(
    st.sampled_from([*spec.json_schema()["$defs"]["CronSpec"]["properties"], "x"]),
    values | st.text("0123456789*/-: T+Z"),
)
def test_any_value_in_cron(field: str, value: object) -> None:
    """Any JSON value in any field of a timer."""
    accept(TIMER, f"cron.{field}={json.dumps(value)}")


@settings(deadline=None)
@given(st.text("{}%:tickprevous_ Ymd./", max_size=30) | st.text(max_size=20))
def test_any_template(text: str) -> None:
    """Any text where templates may stand."""
    accept(TIMER, *(f"{field}={json.dumps(text)}" for field in ("input.source", "output.path", "run.key")))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1000000,
        "{a: " * 250000,
        "- " * 500000,
        "? " * 500000,
        "".join(f"k{i}: 1\n" for i in range(100000)),
        "a: " + "9" * 1000000,
        "!" * 1000000,
        "a" * 1000000 + ": 1",
        "a: [" + "1," * 500000 + "]",
        "".join(f"k{i}: 1\n" for i in range(9000)),
    ],
    ids=["brackets", "braces", "dashes", "keys of keys", "fields", "digits", "tag", "long key", "items", "unknown"],
)
def test_hostile_sizes(text: str) -> None:
    """No megabyte of anything takes long, overflows the stack or fills the memory."""
    start = time.process_time()
    accept(text)
    assert time.process_time() - start < 10
