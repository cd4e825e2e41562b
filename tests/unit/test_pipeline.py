"""Stages on threads: order, bounds, errors, ends, meters."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.pipeline import Beside, Load, Meter, Pool, Sink, ahead, bottleneck, mapped
from tests.waiting import PATIENCE_S, until


@given(st.lists(st.integers(), max_size=40), st.integers(1, 4), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_stages_keep_the_order(items: list[int], threads: int, depth: int) -> None:
    """Two stages after each other give what a plain loop gives."""
    doubled = mapped(lambda x: 2 * x, ahead(iter(items), depth), threads=threads, depth=depth)
    assert list(ahead(doubled, depth)) == [2 * x for x in items]


def test_an_error_comes_where_its_item_would_have_come() -> None:
    """Items before it arrive first."""

    def source() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    stage = ahead(mapped(lambda x: x, source(), threads=2, depth=2), 2)
    assert next(stage) == 1
    with pytest.raises(ValueError, match="broken"):
        next(stage)


def test_a_meter_sees_what_waits_for_the_next_stage() -> None:
    """Of a stage that times its own work, too."""
    queued, worked = Meter("ahead"), Meter("mapped")
    made = ahead(iter(range(3)), 3, meter=queued)
    time.sleep(0.05)
    assert list(made) == [0, 1, 2]
    assert list(mapped(lambda x: x, range(3), threads=1, depth=2, meter=worked, timed=False)) == [0, 1, 2]
    assert (queued.load().limit, queued.load().items) == (3, 0)
    assert queued.load().depth > 0
    assert (worked.load().limit, worked.load().items, worked.load().busy) == (2, 0, 0.0)


def test_no_more_than_the_queue_holds_is_made_ahead() -> None:
    """One item in hand, `depth` in the queue."""
    made = []

    def source() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    stage = ahead(source(), 3)
    assert next(stage) == 0
    until(lambda: len(made) >= 5)
    assert len(made) == 5  # one taken, three in the queue, one in the thread's hand
    stage.close()


def test_closing_ends_every_thread_and_every_source() -> None:
    """Also of the stages before the last one."""
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.set()

    before = set(threading.enumerate())
    stage = ahead(mapped(lambda x: x, source(), threads=2, depth=4), 2)
    assert [next(stage) for _ in range(3)] == [0, 1, 2]
    stage.close()
    assert closed.is_set()
    assert set(threading.enumerate()) <= before


def test_a_meter_says_how_busy_a_stage_was() -> None:
    """Two workers, three seconds of work within two seconds: 75 percent."""
    clock = iter([0.0, 0.0, 1.0, 2.0]).__next__
    meter = Meter("decode", workers=2, now=clock)
    with meter.busy():
        pass
    meter.worked(2.0, 7)
    meter.waiting(2)
    meter.waiting(1)
    load = meter.load()
    assert load == Load(name="decode", busy=0.75, workers=2, depth=1.5, limit=0, items=8)


def test_the_busiest_stage_is_the_bottleneck() -> None:
    """Whatever its place."""
    loads = [
        Load(name=n, busy=b, workers=1, depth=0, limit=1, items=1) for n, b in (("a", 0.2), ("b", 0.9), ("c", 0.5))
    ]
    found = bottleneck(loads)
    assert found is not None
    assert found.name == "b"
    assert bottleneck([]) is None


@pytest.mark.parametrize("depth", [0, 3])
def test_a_sink_takes_items_in_order_and_tells_of_errors(depth: int) -> None:
    """`finish` waits for the last item; an error is raised where the next item is handed over, or at the end."""
    found: list[int] = []
    sink = Sink(found.append, depth=depth, name="test")
    for i in range(20):
        sink.put(i)
    sink.finish()
    assert found == list(range(20))

    def fail(item: int) -> None:
        raise ValueError(f"item {item}")

    broken = Sink(fail, depth=depth, name="test")
    with suppress(ValueError):  # without a queue it comes at once, and again at the end
        broken.put(0)
    with pytest.raises(ValueError, match="item 0"):
        broken.finish()


def test_a_sink_that_is_dropped_forgets_what_waits() -> None:
    """The item at hand is done; its thread ends."""
    begun, go_on, found = threading.Event(), threading.Event(), list[int]()

    def work(item: int) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        found.append(item)

    sink = Sink(work, depth=4, name="test")
    for i in range(3):
        sink.put(i)
    begun.wait(PATIENCE_S)
    dropping = threading.Thread(target=sink.drop)
    dropping.start()
    while not sink._unwanted.is_set():
        time.sleep(0.001)
    go_on.set()
    dropping.join(PATIENCE_S)
    assert found == [0]


def test_a_sink_takes_no_more_than_it_may_hold() -> None:
    """With `most`, an item counts until it is done; an error of it is raised where the next one waits for room."""
    begun, go_on = threading.Event(), threading.Event()

    def work(item: int) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        raise ValueError(f"item {item}")

    sink = Sink(work, depth=1, most=1, name="test")
    sink.put(0)
    begun.wait(PATIENCE_S)
    raised: list[ValueError] = []

    def second() -> None:
        try:
            sink.put(1)
        except ValueError as e:
            raised.append(e)

    waiting = threading.Thread(target=second)
    waiting.start()
    waiting.join(0.05)
    assert sink._line.empty()  # the queue has room, but the first item is not done
    assert waiting.is_alive()
    go_on.set()
    waiting.join(PATIENCE_S)
    assert [str(e) for e in raised] == ["item 0"]
    sink.drop()


def test_a_thread_is_kept_for_the_next_piece_of_work() -> None:
    """Pieces after each other share a thread, which has the piece's name; two at once have two."""
    names, threads, go_on = list[str](), set[int](), threading.Event()

    def work() -> None:
        names.append(threading.current_thread().name)
        threads.add(threading.get_ident())

    for name in ("a", "b", "c"):
        Beside(work, name=name).wait()
    assert names == ["a", "b", "c"]
    assert len(threads) == 1
    waits = Beside(lambda: go_on.wait(PATIENCE_S), name="waits")
    Beside(work, name="d").wait()
    go_on.set()
    waits.wait()
    assert len(threads) == 2


def test_a_kept_thread_survives_an_error_and_holds_nothing() -> None:
    """The error comes where the end is awaited, each time; what the work held is free then."""

    class Held:
        def fail(self) -> None:
            raise ValueError("broken")

    held = Held()
    free = weakref.ref(held)
    broken = Beside(held.fail, name="test")
    del held
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            broken.wait()
    del broken
    gc.collect()
    assert free() is None
    Beside(lambda: None, name="test").wait()


def test_a_forked_process_starts_threads_of_its_own() -> None:
    """It has none of those that its parent kept."""
    code = """
import os
from nimble_jobs.pipeline import Beside

Beside(lambda: None, name="test").wait()
child = os.fork()
Beside(lambda: None, name="test").wait()
if child:
    assert os.waitpid(child, 0) == (child, 0)
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    subprocess.run(command, check=True, timeout=PATIENCE_S)


def test_things_of_a_pool_go_round() -> None:
    """Giving back twice counts once; what an earlier round took counts no more; `end` wakes those who wait."""
    pool = Pool(["a"])
    taken = pool.take()
    assert taken is not None
    thing, give_back = taken
    assert (thing, pool.free) == ("a", 0)
    give_back()
    give_back()
    assert pool.free == 1
    taken = pool.take()
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(pool.take()))
    thread.start()
    pool.end()
    thread.join(PATIENCE_S)
    assert found == [None]
    pool.begin()
    assert pool.free == 1
    assert taken is not None
    taken[1]()
    assert pool.free == 1
