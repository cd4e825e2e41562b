"""At the end of a job, when no shard is left to claim: which shard of another member deserves a copy, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from nimble_jobs.job import InFlight, Member

OVERDUE = 2.0  # a member that takes this many times as long as its rate says counts as stopped
SLACK_S = 1.0  # so much longer than expected is nothing
LOOK_S = 0.1  # how often a member without work looks for shards, if it is alone
LOOKS_PER_S = 100.0  # of all members together, if none of them has work


def worth_a_copy(in_flight: Sequence[InFlight], members: Sequence[Member], me: str, now: float) -> int | None:
    """The shard that `me` would finish earlier than its holder, and whose holder would finish last; None: no shard.

    A member works on its shards in ascending order, at the pace of those that it has finished. A holder that has
    finished none is taken to need as long again as it has taken so far; if `me` has finished none either, nothing is
    known. No copy is made before the holder has been on its shard for as long as `me` would need.
    """
    known = {member.worker: member for member in members}
    best: tuple[float, int] | None = None
    for worker, shards in groupby(sorted(in_flight, key=lambda s: (s.worker, s.index)), key=lambda s: s.worker):
        holder = known.get(worker)
        if worker == me or holder is None:
            continue
        theirs, mine = _pace_s(holder), _pace_s(known.get(me))
        if theirs is None and mine is None:
            continue
        spent_s = now - holder.moved_at
        at_s = 0.0  # from now on until the holder has finished this shard
        for number, shard in enumerate(shards):
            mine_s = shard.records * float(mine or theirs or 0.0)
            if theirs is None:
                at_s += max(mine_s, spent_s)  # as long again as it has taken so far
            else:
                at_s += shard.records * theirs if number else _left_s(shard.records * theirs, spent_s)
            late = spent_s >= mine_s and at_s > mine_s + SLACK_S
            if late and not shard.copied and (best is None or (at_s, shard.index) > best):
                best = at_s, shard.index
    return None if best is None else best[1]


def _left_s(needs_s: float, spent_s: float) -> float:
    """Seconds that are left of a shard that takes so long; infinite if its holder seems to have stopped."""
    return math.inf if spent_s > OVERDUE * needs_s + SLACK_S else max(0.0, needs_s - spent_s)


def _pace_s(member: Member | None) -> float | None:
    """Seconds for a record; None for a member that has finished no shard."""
    return member.busy_s / member.records_done if member is not None and member.records_done else None


def pause_s(members: int, *, leads: bool, chance: float) -> float:
    """Seconds until a member without work looks again. Whoever leads looks often, because it is to publish.

    `chance`, drawn from 0 to 1, keeps members that ran out of work together from choosing the same shard together.
    """
    return LOOK_S if leads else max(LOOK_S, members / LOOKS_PER_S) * (0.5 + chance)
