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

    A member works on its shards in ascending order, at the rate at which it has finished shards so far.
    """
    known = {member.worker: member for member in members}
    best: tuple[float, int] | None = None
    for worker, shards in groupby(sorted(in_flight, key=lambda s: (s.worker, s.index)), key=lambda s: s.worker):
        holder = known.get(worker)
        if worker == me or holder is None:
            continue
        at_s = 0.0  # from now on until the holder has finished this shard
        for number, shard in enumerate(shards):
            at_s += _shard_s(holder, shard, now, first=number == 0)
            mine_s = _seconds(known.get(me), shard.records, now)
            if not shard.copied and at_s > mine_s + SLACK_S and (best is None or (at_s, shard.index) > best):
                best = at_s, shard.index
    return None if best is None else best[1]


def _shard_s(holder: Member, shard: InFlight, now: float, *, first: bool) -> float:
    """Seconds that the holder still needs for a shard; infinite if it seems to have stopped."""
    expected_s = _seconds(holder, shard.records, now)
    if not first or not holder.records_done:  # as long again as it has taken so far
        return expected_s
    spent_s = now - holder.moved_at
    if spent_s > OVERDUE * expected_s + SLACK_S:
        return math.inf
    return max(0.0, expected_s - spent_s)


def _seconds(member: Member | None, records: int, now: float) -> float:
    """Seconds for so many records, at the member's rate.

    Without a finished shard a member is taken to need as long as it has been there.
    """
    if member is None:
        return 0.0
    if member.records_done:
        return records * (member.moved_at - member.joined_at) / member.records_done
    return now - member.joined_at


def pause_s(members: int, *, leads: bool, chance: float) -> float:
    """Seconds until a member without work looks again. Whoever leads looks often, because it is to publish.

    `chance`, drawn from 0 to 1, keeps members that ran out of work together from choosing the same shard together.
    """
    return LOOK_S if leads else max(LOOK_S, members / LOOKS_PER_S) * (0.5 + chance)
