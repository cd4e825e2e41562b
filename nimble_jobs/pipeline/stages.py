"""Stages of a pipeline. Each works ahead of the next on its own threads, in order, until its queue is full.

A stage is a generator over the stage before it. Closing the last stage ends the threads of all stages. Each stage has a
meter, so that a job can name the stage that holds up the others.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nimble_jobs.pipeline.meter import Meter

T = TypeVar("T")
R = TypeVar("R")

_POLL_S = 0.1  # how soon a thread notices that its items are no longer wanted
_END = object()
_MOST = 16  # more threads or processes would only wait for memory or the disk


def usable_cores() -> int:
    """How many threads or processes work at once by default: the cores that this process may use, at most 16."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0))))


def ahead(source: Iterator[T], depth: int, *, meter: Meter | None = None, name: str = "nimble-ahead") -> Generator[T]:
    """The items of `source`; a thread produces up to `depth` of them ahead. Closing the generator ends the thread.

    An error of `source` is raised in place of its item. `meter` counts how many items wait; who does the work times it.
    """
    line = _Line(depth)
    if meter is not None:
        meter.limit = depth
    thread = threading.Thread(target=line.fill, args=(source,), name=name, daemon=True)
    thread.start()
    try:
        while True:
            if meter is not None:
                meter.waiting(line.items.qsize())
            if (item := line.items.get()) is _END:
                return
            if isinstance(item, _Raised):
                raise item.error
            yield item
    finally:
        line.unwanted.set()
        thread.join()


class Sink(Generic[T]):
    """The last stage: threads pass the items to `work`. One thread keeps their order, several do not.

    With a `depth` of 0 there is no thread, and `put` does the work itself.
    """

    def __init__(
        self,
        work: Callable[[T], None],
        *,
        depth: int,
        threads: int = 1,
        meter: Meter | None = None,
        most: int | None = None,
        name: str,
    ) -> None:
        """At most `most` items are handed over and not done yet; None: `depth`, and one for each thread."""
        self._work, self._meter = work, meter
        self._room = threading.Semaphore(most) if most is not None and depth else None
        self._line: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._error: BaseException | None = None
        self._unwanted = threading.Event()
        own = threads if depth else 0
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(own)]
        if meter is not None:
            meter.limit, meter.workers = depth, threads
        for thread in self._threads:
            thread.start()

    def put(self, item: T) -> None:
        """Hand over an item; waits for room in the queue. Raises what `work` raised for an earlier item."""
        if not self._threads:
            self._try(item)
            self._check()
            return
        self._check()
        while self._room is not None and not self._room.acquire(timeout=_POLL_S):
            self._check()
        while True:
            self._check()
            with suppress(queue.Full):
                self._line.put(item, timeout=_POLL_S)
                return

    def finish(self) -> None:
        """Wait until all items are done. Raises what `work` raised."""
        for _ in self._threads:
            self._line.put(_END)
        for thread in self._threads:
            thread.join()
        self._check()
        if self._meter is not None:
            self._meter.over()

    def drop(self) -> None:
        """Drop the items that wait. Items that a thread has begun are finished."""
        self._unwanted.set()
        for thread in self._threads:
            thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._unwanted.is_set():
            try:
                item = self._line.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if item is _END:
                return
            self._try(item)
            del item  # while the next one is waited for
            if self._room is not None:
                self._room.release()

    def _try(self, item: T) -> None:
        if self._error is None:
            try:
                self._do(item)
            except BaseException as e:  # noqa: BLE001 - the next `put` raises it
                self._error = e

    def _do(self, item: T) -> None:
        if self._meter is None:
            self._work(item)
            return
        self._meter.waiting(self._line.qsize())
        with self._meter.busy():
            self._work(item)


@dataclass(frozen=True)
class _Raised:
    error: BaseException


class _Line:
    """A bounded queue that can be abandoned once its items are no longer wanted."""

    def __init__(self, depth: int) -> None:
        self.items: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self.unwanted = threading.Event()

    def fill(self, source: Iterator[Any]) -> None:
        try:
            try:
                for item in source:
                    if not self._put(item):
                        return
            finally:
                _close(source)
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


class _Until(Iterator[T]):
    """The items of a source up to its error, which it keeps."""

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
    timed: bool = True,
    name: str = "nimble-stage",
) -> Generator[R]:
    """Results of `work` in the order of `source`, at most `depth` of them at once. Closing it ends its threads.

    The thread that takes the results also iterates over `source`. An error of `work` is raised in place of its result.
    The meter's time is that of `work`, unless that times itself because it also waits (`timed=False`).
    """
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
    pending: deque[Future[R]] = deque()
    if meter is not None:
        meter.workers, meter.limit = threads, depth

    def metered(item: T) -> R:
        if meter is None or not timed:
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
