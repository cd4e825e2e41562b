"""Second copies at the end of a job, with members as functions of a fake clock."""

from __future__ import annotations

import heapq
import math

import pytest

from nimble_jobs.job import InFlight, Member
from nimble_jobs.workloads.stragglers import worth_a_copy

RECORDS = 10


def member(
    worker: str, *, rate: float = 10.0, moved_at: float = 100.0, done: int = 1000, loaded_s: float = 0.0
) -> Member:
    """A member that has had this rate, in records a second, until `moved_at`, after it had loaded for so long."""
    return Member(
        worker=worker,
        device="cpu",
        joined_at=moved_at - done / rate - loaded_s,
        left_at=None,
        moved_at=moved_at,
        busy_s=done / rate,
        phase="run",
        records_done=done,
        failures=0,
        error=None,
    )


def flight(index: int, worker: str, *, copied: bool = False) -> InFlight:
    return InFlight(index=index, records=RECORDS, worker=worker, copied=copied)


def test_the_last_shard_of_the_slowest_member_comes_first() -> None:
    """It would be finished last, so it is the one to copy; shards with a copy, and one's own, are left alone."""
    members = [member("me"), member("slow", rate=1.0), member("slower", rate=0.5)]
    in_flight = [flight(1, "slow"), flight(2, "slow"), flight(3, "slower"), flight(4, "slower"), flight(5, "me")]
    assert worth_a_copy(in_flight, members, "me", 101.0) == 4
    in_flight[3] = flight(4, "slower", copied=True)
    assert worth_a_copy(in_flight, members, "me", 101.0) in (2, 3)
    assert worth_a_copy([flight(5, "me")], members, "me", 101.0) is None


def test_equals_are_not_copied() -> None:
    """A member as fast as this one is about to finish its last shard."""
    members = [member("me"), member("other")]
    assert worth_a_copy([flight(1, "other")], members, "me", 100.5) is None


def test_a_shard_that_was_just_begun_is_not_copied() -> None:
    """Not before its holder has had it for as long as this member would need, however slow the holder has been."""
    members = [member("me", rate=2.0), member("slow", rate=0.5)]
    assert worth_a_copy([flight(1, "slow")], members, "me", 104.9) is None
    assert worth_a_copy([flight(1, "slow")], members, "me", 105.0) == 1


def test_loading_is_no_slowness() -> None:
    """A member that loaded for a minute before it worked as fast as this one is as fast as this one."""
    members = [member("me"), member("late", done=10, loaded_s=60.0)]
    assert worth_a_copy([flight(1, "late"), flight(2, "late")], members, "me", 100.5) is None
    members = [member("me", done=10, loaded_s=60.0), member("slow", rate=1.0)]
    assert worth_a_copy([flight(1, "slow")], members, "me", 101.0) == 1


def test_a_stopped_member_counts_as_infinitely_slow() -> None:
    """However fast it was, once it takes far longer than its rate says."""
    members = [member("me"), member("stopped", rate=100.0)]
    assert worth_a_copy([flight(1, "stopped")], members, "me", 100.2) is None
    assert worth_a_copy([flight(1, "stopped")], members, "me", 103.0) == 1


def test_a_member_without_a_finished_shard() -> None:
    """What it holds is copied once it has held it for longer than this member needs; never if this member has finished
    none either, and so knows of no pace. It may then copy from those that have one, and seem to have stopped.
    """
    new = member("new", done=0, moved_at=99.0)
    assert worth_a_copy([flight(1, "new")], [member("me"), new], "me", 99.5) is None
    assert worth_a_copy([flight(1, "new")], [member("me"), new], "me", 110.0) == 1
    fresh = member("me", done=0, moved_at=90.0)
    assert worth_a_copy([flight(1, "new")], [fresh, new], "me", 1000.0) is None
    assert worth_a_copy([flight(1, "new")], [new], "me", 1000.0) is None
    assert worth_a_copy([flight(1, "slow")], [fresh, member("slow")], "me", 101.9) is None
    assert worth_a_copy([flight(1, "slow")], [fresh, member("slow")], "me", 103.1) == 1


@pytest.mark.parametrize("members", [2, 4, 8])
@pytest.mark.parametrize("slowness", [10.0, math.inf])
def test_a_straggler_does_not_hold_up_the_job(members: int, slowness: float) -> None:
    """One member is ten times slower, or stops after its second shard: with copies the job's time stays near the ideal,
    that of all members' rates together. Without them it does not.
    """
    with_copies, without = (simulated(members, 200, slowness, copies=copies) for copies in (True, False))
    ideal_s = 200 / (members - 1 + (0.0 if math.isinf(slowness) else 1 / slowness))
    assert with_copies < 1.2 * ideal_s
    assert without > with_copies


def simulated(count: int, shards: int, slowness: float, *, copies: bool) -> float:
    """Seconds until all shards are done. A shard takes a second; member 0 is slower, and knows no better."""
    names = [f"w{i}" for i in range(count)]
    open_, done = list(range(shards)), set[int]()
    holds: dict[str, list[int]] = {name: [] for name in names}
    copied: dict[str, int | None] = dict.fromkeys(names)
    finished, moved, busy = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    events = [(0.0, i) for i in range(count)]
    working: dict[str, int | None] = dict.fromkeys(names)
    now = 0.0
    while len(done) < shards and events:
        now, i = heapq.heappop(events)
        me = names[i]
        at = working[me]
        if at is not None:  # it has finished a shard
            if at not in done:
                done.add(at)
                finished[me] += 1
                busy[me] += now - moved[me]
            moved[me] = now
            holds[me] = [s for s in holds[me] if s != at]
            copied[me] = None
        holds[me] = [s for s in holds[me] if s not in done]
        if not holds[me] and open_:
            most = min(32, math.ceil(len(open_) / (4 * count)))
            holds[me], open_ = open_[:most], open_[most:]
        working[me] = holds[me][0] if holds[me] else None
        if working[me] is None and copies:
            known = [
                Member(
                    worker=n,
                    device="cpu",
                    joined_at=0.0,
                    left_at=None,
                    moved_at=moved[n],
                    busy_s=busy[n],
                    phase="run",
                    records_done=finished[n] * RECORDS,
                    failures=0,
                    error=None,
                )
                for n in names
            ]
            flying = [
                InFlight(index=s, records=RECORDS, worker=n, copied=s in copied.values())
                for n in names
                for s in holds[n]
                if s not in done
            ]
            working[me] = copied[me] = worth_a_copy(flying, known, me, now)
        if working[me] is None:
            heapq.heappush(events, (now + 0.1, i)) if copies or holds[me] else None
            continue
        takes_s = 1.0 if i else slowness if math.isfinite(slowness) or finished[me] >= 2 else 1.0
        if math.isfinite(takes_s):
            heapq.heappush(events, (now + takes_s, i))
    return now if len(done) == shards else math.inf
