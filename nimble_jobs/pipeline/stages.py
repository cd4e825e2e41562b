"""Stages of a pipeline: each works ahead of the next on threads of its own, in order, as far as its queue lets it.

A stage is a generator over the stage before it. Closing the last one ends the threads of all. Each stage has a meter
that says how busy it was, so that the one that holds up the others can be named.
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

_POLL_S = 0.1  # how soon a thread sees that nobody wants its items any more
_END = object()
_MOST = 16  # more threads or processes wait for memory or the disk


def usable_cores() -> int:
    """How many threads or processes work at once by default: the cores that this process may use, at most 16."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0))))


def ahead(source: Iterator[T], depth: int, *, name: str = "nimble-ahead") -> Generator[T]:
    """The items of `source`, up to `depth` made ahead by a thread. Closing the generator ends the thread.

    What `source` raises is raised where its item would have come.
    """
    line = _Line(depth)
    thread = threading.Thread(target=line.fill, args=(source,), name=name, daemon=True)
    thread.start()
    try:
        while (item := line.items.get()) is not _END:
            if isinstance(item, _Raised):
                raise item.error
            yield item
    finally:
        line.unwanted.set()
        thread.join()


class Sink(Generic[T]):
    """The last stage: threads give the items to `work`, one in order, several as they come. With a `depth` of 0 there
    is no thread, and no wait.
    """

    def __init__(
        self, work: Callable[[T], None], *, depth: int, threads: int = 1, meter: Meter | None = None, name: str
    ) -> None:
        self._work, self._meter = work, meter
        self._line: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._error: BaseException | None = None
        self._unwanted = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        if not depth:
            self._threads = []
        if meter is not None:
            meter.limit, meter.workers = depth, threads
        for thread in self._threads:
            thread.start()

    def put(self, item: T) -> None:
        """Hand an item over, waiting for room. Raises what `work` raised on an earlier one."""
        if not self._threads:
            self._try(item)
            self._check()
            return
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
        """Forget the items that wait; those at hand are done to their end."""
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

    def _try(self, item: T) -> None:
        if self._error is None:
            try:
                self._do(item)
            except BaseException as e:  # noqa: BLE001 - raised where the next item is handed over
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
    """A bounded queue that is given up once nobody wants its items."""

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
