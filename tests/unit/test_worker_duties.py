"""Duties of a worker: when they are due, and what becomes of those that fail."""

from __future__ import annotations

import logging

import pytest

from nimble_jobs.errors import HomeReplaced, StoreTrouble
from nimble_jobs.worker.duties import RETRY_S, Duties, Every


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A duty that is always due and does what its script says next."""

    every_s = 0.0

    def __init__(self, name: str, *script: Exception | None) -> None:
        self.name = name
        self.script = list(script)
        self.runs: list[float] = []

    def run(self, now: float) -> None:
        self.runs.append(now)
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error


def test_every_is_due_at_first_and_after_its_interval() -> None:
    """At once, then not until the seconds are over; a clock that was set back does not make it wait for hours."""
    every = Every(5.0)
    assert every.due(100.0)
    every.done(100.0)
    assert [every.due(at) for at in (100.0, 104.9, 105.0, 9e9, 99.0)] == [False, False, True, True, True]


def test_a_failing_duty_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged with its traceback and recorded, tried again later and later; the duties after it go on."""
    clock, recorded = Clock(), []
    bad, good = Scripted("bad", *[KeyError("row")] * 3), Scripted("good")
    duties = Duties([bad, good], record=lambda name, reason: recorded.append((name, reason)), monotonic=clock)
    with caplog.at_level(logging.INFO):
        for at in range(int(8 * RETRY_S)):
            clock.now = 1000.0 + at
            duties.run(float(at))
            assert ("bad" in duties.failing) == (at < 7 * RETRY_S)
    assert bad.runs[:4] == [0.0, RETRY_S, 3 * RETRY_S, 7 * RETRY_S]
    assert len(good.runs) == 8 * RETRY_S
    assert recorded == [("bad", "KeyError: 'row'")]
    assert [record.exc_info is not None for record in caplog.records] == [True] * 3 + [False]
    assert caplog.records[-1].message == "bad works again"


def test_a_failure_is_recorded_once_the_store_can_be_written() -> None:
    """Where the record fails with its duty, it is written later, once."""
    clock, recorded, locked = Clock(), [], True

    def record(name: str, reason: str) -> None:
        if locked:
            raise StoreTrouble("locked")
        recorded.append((name, reason))

    duties = Duties([Scripted("prune", StoreTrouble("locked"))], record=record, monotonic=clock)
    duties.run(0.0)
    assert recorded == []
    locked = False
    duties.run(1.0)
    duties.run(2.0)
    assert recorded == [("prune", "locked")]


def test_another_folder_ends_the_worker() -> None:
    """That one error is the worker's: it must leave a folder that was replaced."""
    with pytest.raises(HomeReplaced):
        Duties([Scripted("recover", HomeReplaced("another"))], record=lambda *_: None).run(0.0)


def test_a_process_that_leaves_begins_no_further_duty() -> None:
    """The signal came during the first one, which may have waited seconds for a lock."""
    first, second = Scripted("orders"), Scripted("prune")
    duties = Duties([first, second], record=lambda *_: None, leaves=lambda: bool(first.runs))
    duties.run(0.0)
    assert (first.runs, second.runs) == ([0.0], [])


def test_a_server_that_does_not_answer_is_asked_once() -> None:
    """Each duty would wait as long, and the worker handles no signal meanwhile. The others come at the next call."""
    clock = Clock()

    class Slow(Scripted):
        def run(self, now: float) -> None:
            clock.now += 10.0
            super().run(now)

    first, second = Slow("recover", StoreTrouble("no answer")), Scripted("fire")
    duties = Duties([first, second], record=lambda *_: None, monotonic=clock)
    duties.run(0.0)
    assert (first.runs, second.runs) == ([0.0], [])
    duties.run(1.0)
    assert (first.runs, second.runs) == ([0.0], [1.0])
