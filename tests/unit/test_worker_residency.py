"""What stays on the device between jobs."""

from __future__ import annotations

from dataclasses import dataclass

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
    told: list[tuple[str, ...]] = []
    residents = Residents(10, on_change=told.append)
    residents.put("a", Thing(10))
    residents.get("a")
    residents.make_room(10)
    residents.begin()
    residents.put("b", Thing(10))
    residents.clear()
    residents.clear()
    assert told == [("a",), ("b",), ()]


def test_budget_of_the_cpu() -> None:
    """On the CPU the budget is a part of the memory that there is."""
    assert 1 << 20 < default_budget_bytes("cpu") < 1 << 50
