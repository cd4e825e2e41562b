"""A piece of work on its way to a process, and what happens to it if the process dies."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from nimble_jobs.decoding.work import BAD, Answer, Row, Work

DIED = "cannot be decoded: the process that decoded it died twice"


@dataclass(eq=False)
class Shared:
    """Memory that processes may write to."""

    number: int
    memory: np.ndarray  # uint8 [*]
    descriptor: int  # of the file that the memory is, from its beginning on


@dataclass(eq=False)
class Task:
    """A piece of work, the memory for its results, and the future that gets its answer."""

    work: Work
    blobs: tuple[bytes | memoryview, ...]
    shared: Shared
    future: Future[Answer]
    died: int = 0  # processes that died over it while it was alone


def blamed(task: Task) -> list[Task]:
    """The tasks to retry after a process died over a task: its pictures one by one.

    A picture over which a process has died twice while it was alone is not retried.
    """
    if len(task.work) == 1:
        if task.died:
            task.future.set_result(Answer.of([Row(status=BAD, reason=DIED)], 0.0))
            return []
        task.died = 1
        return [task]
    alone = []
    for i in range(len(task.work)):
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        mine = task.blobs[i : i + 1]
        alone.append(Task(work=task.work.part(i, i + 1), blobs=mine, shared=task.shared, future=future))
    _together([t.future for t in alone], task.future)
    return alone


def _together(parts: Sequence[Future[Answer]], whole: Future[Answer]) -> None:
    """Answer `whole` once all of its parts are."""
    left = len(parts)

    def one_more(_: Future[Answer]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            if (error := next((e for p in parts if (e := p.exception()) is not None), None)) is not None:
                whole.set_exception(error)
                return
            whole.set_result(Answer.joined([p.result() for p in parts]))

    for part in parts:
        part.add_done_callback(one_more)


def do_here(task: Task) -> None:
    """Do a task on this thread."""
    from nimble_jobs.decoding.do import do  # loads Pillow, which others who own a pool may never need

    try:
        task.future.set_result(do(task.work, task.shared.memory, task.blobs))
    except BaseException as e:  # noqa: BLE001 - raised where the answer is asked for
        task.future.set_exception(e)
