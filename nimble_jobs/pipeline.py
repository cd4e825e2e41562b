"""Stages of a pipeline: each works ahead of the next on threads of its own, in order, as far as its queue lets it.

A stage is a generator over the stage before it. Closing the last one ends the threads of all. Each stage has a meter
that says how busy it was, so that the one that holds up the others can be named.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_POLL_S = 0.1  # how soon a thread sees that nobody wants its items any more
_END = object()


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy a stage was."""

    name: str
    busy: float  # share of the time in which its workers worked, 0 to 1
    workers: int
    depth: float  # items that waited for the next stage when that asked, on average
    limit: int  # at most so many wait
    items: int
    unit: str = "thread"  # what a worker is


class Meter:
    """Counts what a stage does. Any thread may write; figures are read while it runs."""

    def __init__(
        self, name: str, *, workers: int = 1, unit: str = "thread", now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.name, self.workers, self.unit, self.limit = name, workers, unit, 0
        self._now = now
        self._lock = threading.Lock()
        self._began: float | None = None
        self._ended: float | None = None
        self._busy_s = 0.0
        self._items = 0
        self._depths = 0
        self._looks = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The time of the block counts as work of one worker."""
        began = self._now()
        self._start(began)
        try:
            yield
        finally:
            self.worked(self._now() - began)

    def worked(self, seconds: float, items: int = 1) -> None:
        """So many seconds of one worker went into so many items."""
        with self._lock:
            self._busy_s += seconds
            self._items += items

    def waiting(self, depth: int) -> None:
        """The next stage asked, and so many items were there."""
        with self._lock:
            self._depths += depth
            self._looks += 1

    def over(self) -> None:
        """Nothing more will come."""
        self._ended = self._ended or self._now()

    def load(self) -> Load:
        """What is known so far."""
        with self._lock:
            until = self._ended if self._ended is not None else self._now()
            elapsed = until - self._began if self._began is not None else 0.0
            busy = self._busy_s / (elapsed * self.workers) if elapsed > 0 else 0.0
            return Load(
                name=self.name,
                busy=min(1.0, busy),
                workers=self.workers,
                depth=self._depths / self._looks if self._looks else 0.0,
                limit=self.limit,
                items=self._items,
                unit=self.unit,
            )

    def _start(self, now: float) -> None:
        if self._began is None:
            self._began = now


def bottleneck(loads: Iterable[Load]) -> Load | None:
    """The busiest stage; None where there is none."""
    return max(loads, key=lambda load: load.busy, default=None)


def ahead(source: Iterator[T], depth: int, meter: Meter | None = None, *, name: str = "nimble-ahead") -> Generator[T]:
    """The items of `source`, up to `depth` made ahead by a thread. Closing the generator ends the thread.

    What `source` raises is raised where its item would have come. With a meter, the time that `source` takes for an
    item counts as work, and so does what it waits for: give the meter to the stage that does the work.
    """
    line = _Line(depth)
    if meter is not None:
        meter.limit = depth
    thread = threading.Thread(target=line.fill, args=(_timed(source, meter),), name=name, daemon=True)
    thread.start()
    try:
        while True:
            if meter is not None:
                meter.waiting(line.items.qsize())
            item = line.items.get()
            if item is _END:
                return
            if isinstance(item, _Raised):
                raise item.error
            yield item
    finally:
        line.unwanted.set()
        thread.join()
        if meter is not None:
            meter.over()


@dataclass(frozen=True)
class _Raised:
    error: BaseException


class _Line:
    """A bounded queue that is given up once nobody wants its items."""

    def __init__(self, depth: int) -> None:
        self.items: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self.unwanted = threading.Event()

    def fill(self, source: Generator[Any]) -> None:
        try:
            with closing(source):
                for item in source:
                    if not self._put(item):
                        return
            self._put(_END)
        except BaseException as e:  # noqa: BLE001 - raised where the items are taken
            self._put(_Raised(e))

    def _put(self, item: object) -> bool:
        while not self.unwanted.is_set():
            try:
                self.items.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False


def _timed(source: Iterator[T], meter: Meter | None) -> Generator[T]:
    """The same items; the time for each counts as work."""
    try:
        while True:
            if meter is None:
                item = next(source, _END)
            else:
                with meter.busy():
                    item = next(source, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]
    finally:
        _close(source)


class _Until(Iterator[T]):
    """The items of a source up to its error, which is kept."""

    def __init__(self, source: Iterable[T]) -> None:
        self._source = iter(source)
        self.error: BaseException | None = None

    def __next__(self) -> T:
        try:
            return next(self._source)
        except StopIteration:
            raise
        except BaseException as e:  # noqa: BLE001 - raised once the items before it are done
            self.error = e
            raise StopIteration from None


def _close(source: object) -> None:
    if isinstance(source, Generator):
        source.close()


def mapped(
    work: Callable[[T], R],
    source: Iterable[T],
    *,
    threads: int,
    depth: int,
    meter: Meter | None = None,
    name: str = "nimble-stage",
) -> Generator[R]:
    """Results of `work` in the order of `source`, at most `depth` of them under way. Closing it ends its threads.

    `source` is asked by the thread that takes the results. What `work` raises is raised where its result would have
    come.
    """
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
    pending: deque[Future[R]] = deque()
    if meter is not None:
        meter.workers, meter.limit = threads, depth

    def metered(item: T) -> R:
        if meter is None:
            return work(item)
        with meter.busy():
            return work(item)

    def first() -> R:
        if meter is not None:
            meter.waiting(sum(f.done() for f in pending))
        return pending.popleft().result()

    items = _Until(source)
    try:
        for item in items:
            if len(pending) >= depth:
                yield first()
            pending.append(pool.submit(metered, item))
        while pending:
            yield first()
        if items.error is not None:
            raise items.error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if meter is not None:
            meter.over()
        _close(source)
