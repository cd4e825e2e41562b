"""Vector clocks over streams: what is known to have finished at each step of a walk through a plan in launch order.

A clock holds, for each stream, how many of its tasks are known to have finished. Source: C. J. Fidge, "Timestamps in
Message-Passing Systems That Preserve the Partial Ordering", 1988; F. Mattern, "Virtual Time and Global States of
Distributed Systems", 1989. O((n + syncs) * streams).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from nimble_jobs.schedule import Plan

TRACKED = 1024  # up to so many streams, each has a column in every clock
FEW = 64  # streams with a column in a plan of more than `TRACKED`: no device runs so many at once

Clock = npt.NDArray[np.int32]
Guard = tuple[tuple[int, int], ...]  # pairs of a stream and how many of its tasks, from the first, must have finished


def tracked(plan: Plan) -> int:
    """How many of a plan's streams, from the first, have columns. Only a stream's own tasks know about the others."""
    return plan.streams if plan.streams <= TRACKED else FEW


def places_on_stream(plan: Plan) -> tuple[int, ...]:
    """The place of each task on its stream, counted from 1 in launch order."""
    count = [0] * plan.streams
    place = [0] * len(plan.order)
    for task in plan.order:
        count[plan.stream_of[task]] += 1
        place[task] = count[plan.stream_of[task]]
    return tuple(place)


def walk(plan: Plan) -> Iterator[tuple[int, Clock]]:
    """Yield each task in launch order with a clock of what is known to have finished before it starts.

    Clocks are int32 [columns] and are reused: read one before asking for the next.
    """
    columns = tracked(plan)
    waits: list[list[int]] = [[] for _ in plan.order]
    waiting = [0] * len(plan.order)
    for sync in plan.syncs:
        waits[sync.after].append(sync.before)
        waiting[sync.before] += 1
    current = list(np.zeros((plan.streams, columns), np.int32))
    recorded: dict[int, Clock] = {}
    for task in plan.order:
        stream = plan.stream_of[task]
        clock = current[stream]
        for before in waits[task]:
            np.maximum(clock, recorded[before], out=clock)
            waiting[before] -= 1
            if not waiting[before]:
                del recorded[before]
        yield task, clock
        if stream < columns:
            clock[stream] += 1
        if waiting[task]:
            recorded[task] = clock.copy()


def knows(clock: Sequence[int], guard: Guard, own: int | None) -> bool:
    """Whether a task with this clock on stream `own` can rely on it that the tasks of `guard` have finished.

    Only a stream's own tasks know about a stream without a column. They all come after what it launched earlier.
    """
    for stream, count in guard:  # noqa: SIM110  # all() takes twice as long, and this is asked most often
        if (clock[stream] < count) if stream < len(clock) else (stream != own):
            return False
    return True
