"""What stays on the device between jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nimble_jobs.worker import residency
from nimble_jobs.worker.residency import Residents, default_budget_bytes


@dataclass
class Thing:
    bytes: int
    closed: int = 0

    def close(self) -> None:
        self.closed += 1


def test_least_recently_used_goes_first() -> None:
    """A value that was asked for again outlives one that was not."""
    residents = Residents(30)
    a, b, c = Thing(10), Thing(10), Thing(20)
    residents.put("a", a)
    residents.put("b", b)
    residents.begin()
    assert residents.get("a") is a
    residents.put("c", c)
    assert (residents.keys, residents.used_bytes) == (("a", "c"), 30)
    assert (a.closed, b.closed, c.closed) == (0, 1, 0)
    assert residents.get("b") is None


def test_what_the_job_uses_stays() -> None:
    """Nothing that the present job touched is closed under it, even over the budget; the next job's room may be."""
    residents = Residents(30)
    a, b = Thing(20), Thing(20)
    residents.put("a", a)
    residents.put("b", b)
    residents.make_room(30)
    assert residents.keys == ("a", "b")
    residents.begin()
    residents.make_room(10)
    assert residents.keys == ("b",)
    assert (a.closed, b.closed) == (1, 0)


def test_replaced_values_are_closed() -> None:
    """A second value under a key closes the first; the same value put again does not."""
    residents = Residents(30)
    a, b = Thing(20), Thing(20)
    residents.put("k", a)
    residents.put("k", b)
    residents.put("k", b)
    assert (residents.used_bytes, a.closed, b.closed) == (20, 1, 0)


def test_changes_are_told() -> None:
    """Whoever lists residents hears of each change, and only of changes."""
    told: list[dict[str, int]] = []
    residents = Residents(10, on_change=told.append)
    residents.put("a", Thing(10))
    residents.get("a")
    residents.make_room(10)
    residents.begin()
    residents.put("b", Thing(10))
    residents.clear()
    residents.clear()
    assert told == [{"a": 10}, {"b": 10}, {}]


def test_values_that_follow_each_other_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the block, also if that fails, and once a second where it takes longer; afterwards each at once."""
    now = [100.0]
    monkeypatch.setattr(residency.time, "monotonic", lambda: now[0])
    told: list[dict[str, int]] = []
    residents = Residents(100, on_change=told.append)

    def put_and_fail() -> None:
        with residents.several():
            residents.put("a", Thing(1))
            residents.put("b", Thing(2))
            assert told == []
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        put_and_fail()
    assert told == [{"a": 1, "b": 2}]
    with residents.several():
        now[0] += 1.5
        residents.put("c", Thing(3))
        assert [*told[-1]] == ["a", "b", "c"]
        residents.put("d", Thing(4))
        assert [*told[-1]] == ["a", "b", "c"]
    assert [*told[-1]] == ["a", "b", "c", "d"]
    with residents.several():
        residents.get("a")
    assert len(told) == 3
    residents.put("e", Thing(5))
    assert len(told) == 4
    with residents.several() as tell:
        residents.put("f", Thing(6))
        tell()  # before something that takes long
        tell()
        assert [*told[-1]] == ["b", "c", "d", "a", "e", "f"]
        with residents.several():
            residents.put("g", Thing(7))
        assert len(told) == 5
    assert len(told) == 6


def test_an_error_of_a_block_is_not_hidden_by_one_of_telling() -> None:
    """The worker must see that memory ran out, whatever is wrong with the store."""

    def fail(_held: dict[str, int]) -> None:
        raise OSError("the disk is full")

    residents = Residents(100, on_change=fail)

    def put(error: Exception | None) -> None:
        with residents.several():
            residents.put("a", Thing(1))
            if error is not None:
                raise error

    with pytest.raises(MemoryError):
        put(MemoryError())
    with pytest.raises(OSError, match="disk is full"):
        put(None)


def test_what_a_job_needed_beyond_the_budget_leaves_when_the_next_one_starts() -> None:
    """All but what was used last, which the next job may need again."""
    changes: list[dict[str, int]] = []
    residents = Residents(100, changes.append)
    things = {key: Thing(nbytes) for key, nbytes in (("a", 60), ("b", 30), ("c", 30))}
    for key, thing in things.items():
        residents.put(key, thing)
    assert residents.keys == ("a", "b", "c")
    residents.begin()
    assert residents.keys == tuple(changes[-1]) == ("b", "c")
    assert [thing.closed for thing in things.values()] == [1, 0, 0]
    large = Residents(100)
    large.put("d", Thing(500))
    large.begin()
    assert large.keys == ("d",)


@example([("put", 0, 21), ("put", 1, 40), ("put", 2, 40), ("begin",)])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 40)),
            st.tuples(st.just("get"), st.integers(0, 5)),
            st.tuples(st.just("room"), st.integers(0, 120)),
            st.just(("begin",)),
        ),
        max_size=40,
    )
)
def test_whatever_happens(steps: list[tuple[Any, ...]]) -> None:
    """Nothing in use is closed, everything else at most once and only for want of room, the longest unused first."""
    residents = Residents(100)
    unused: list[str] = []  # least recently used first
    used: set[str] = set()
    things: dict[str, Thing] = {}
    for step in steps:
        needed = 0
        match step:
            case ("begin",):
                residents.begin()
                used.clear()
            case ("get", number):
                assert (residents.get(str(number)) is not None) == (str(number) in things)
            case ("room", nbytes):
                residents.make_room(nbytes)
                needed = nbytes
            case ("put", number, nbytes):
                old = things.get(str(number))
                residents.put(str(number), Thing(nbytes))
                assert old is None or old.closed == 1
        if step[0] in ("get", "put") and (step[0] == "put" or str(step[1]) in things):
            unused = [*(k for k in unused if k != str(step[1])), str(step[1])]
            used.add(str(step[1]))
        kept = {key: residents._values[key] for key in residents.keys}
        gone = [key for key in unused if key not in kept]
        assert not used & set(gone)
        free = [key for key in unused if key not in used]
        assert gone == free[: len(gone)], "the longest unused first"
        if gone:
            without_the_last = residents.used_bytes + needed + things[gone[-1]].bytes
            assert without_the_last > residents.budget_bytes, "only for want of room"
        if residents.used_bytes + needed > residents.budget_bytes:
            assert set(kept) <= used, "what was over the budget was all in use"
        unused = [key for key in unused if key in kept]
        things = {key: value for key, value in kept.items() if isinstance(value, Thing)}
        assert all(thing.closed == 0 for thing in things.values())


def test_budget_of_the_cpu() -> None:
    """On the CPU the budget is a part of the memory that there is."""
    assert 1 << 20 < default_budget_bytes(None) < 1 << 50


def test_budget_of_a_device_with_memory_of_its_own() -> None:
    """A fifth is left for what lies beside the graphs."""
    assert default_budget_bytes(10 << 30) == 8 << 30
