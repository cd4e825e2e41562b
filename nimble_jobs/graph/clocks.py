"""Happens-before while walking through a plan in launch order: vector clocks over streams.

Source: C. J. Fidge, "Timestamps in Message-Passing Systems That Preserve the Partial Ordering", 1988; F. Mattern,
"Virtual Time and Global States of Distributed Systems", 1989. A clock says how many tasks of each stream are known to
have finished. O((n + syncs) * streams).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from nimble_jobs.schedule import Plan

TRACKED = 1024  # streams that have a column of their own in every clock
FEW = 64  # streams that have one in a plan of more streams than that: no device runs so many at once

Clock = npt.NDArray[np.int32]
Guard = tuple[tuple[int, int], ...]  # streams, and how many tasks of each, counted from the first, must have finished


def tracked(plan: Plan) -> int:
    """How many of a plan's streams, from the first, have columns. Of any other, only its own tasks know anything."""
    return plan.streams if plan.streams <= TRACKED else FEW


def places_on_stream(plan: Plan) -> tuple[int, ...]:
    """By task: how many tasks its stream has launched once it is, itself included."""
    count = [0] * plan.streams
    place = [0] * len(plan.order)
    for task in plan.order:
        count[plan.stream_of[task]] += 1
        place[task] = count[plan.stream_of[task]]
    return tuple(place)


def walk(plan: Plan) -> Iterator[tuple[int, Clock]]:
    """Each task in launch order, with what is known to have finished before it starts. Read a clock before asking for
    the next one.
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
    """Whether the tasks that `guard` counts (by stream, the first so many) have finished, to one who has this clock and
    runs on stream `own`.

    A stream without a column is only known to its own tasks, all of which come after what it launched earlier.
    """
    for stream, count in guard:  # noqa: SIM110  # all() takes twice as long, and this is asked most often
        if (clock[stream] < count) if stream < len(clock) else (stream != own):
            return False
    return True
