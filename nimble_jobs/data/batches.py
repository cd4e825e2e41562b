"""Work done ahead by a few threads, handed out in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def default_threads() -> int:
    """Threads that decode at once: the cores that this process may use, at most 16."""
    return max(1, min(16, len(os.sched_getaffinity(0))))


def read_ahead(work: Callable[[T], R], tasks: Iterable[T], *, threads: int, depth: int) -> Iterator[R]:
    """Results of `work` in the order of `tasks`, at most `depth` of them under way.

    Closing the generator ends its threads.

    An exception of `work` is raised where its result would have come.
    """
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="nimble-read")
    pending: deque[Future[R]] = deque()
    try:
        for task in tasks:
            if len(pending) >= depth:
                yield pending.popleft().result()
            pending.append(pool.submit(work, task))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
