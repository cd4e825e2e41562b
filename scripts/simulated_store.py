"""The tables of shards and members of one running job as plain values, for a simulation of millions of shards.

Each method does what the method of `nimble_jobs.store.shards.Shards` with the same name does to the rows, in time that
does not grow with the shards. A test runs the same operations over both, and compares all rows.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nimble_jobs.job import InFlight, Member
from nimble_jobs.store.shards import Left, shards_in_claim

OPEN, RUNNING, DONE, FAILED = range(4)
STATES = ("open", "running", "done", "failed")


@dataclass
class Holder:
    """Who works on a shard."""

    worker: str
    second: str | None = None


@dataclass
class Entry:
    """The row of a member."""

    device: str
    joined_at: float
    moved_at: float
    busy_s: float = 0.0
    records_done: int = 0
    shards_done: int = 0
    failures: int = 0
    left_at: float | None = None
    holds: set[int] = field(default_factory=set)  # shards of which it is the holder, or works on a copy


class SimulatedStore:
    """One attempt at one job. Times are seconds of any clock; all shards have the same number of records."""

    def __init__(self, shards: int, records: int, *, max_attempts: int, tolerated: int = 0) -> None:
        self.records, self.max_attempts, self.tolerated = records, max_attempts, tolerated
        self.state = bytearray(shards)  # OPEN
        self.failures: dict[int, int] = {}
        self.running: dict[int, Holder] = {}
        self.entries: dict[str, Entry] = {}
        self.lead: str | None = None
        self.open = shards
        self.done = self.failed = 0
        self._open_suspects = 0  # open shards that have failed before
        self._next = 0  # no shard from here on was ever claimed
        self._again: list[int] = []  # open shards in front of it that never failed, and some that are open no longer
        self._suspects: list[tuple[int, int]] = []  # failures and index, likewise

    def join(self, worker: str, device: str, now: float) -> None:
        """Enter a member, perhaps again. The first one leads."""
        entry = self.entries.setdefault(worker, Entry(device, now, now))
        entry.joined_at = entry.moved_at = now
        entry.left_at = None
        self.lead = self.lead or worker

    def active(self) -> list[str]:
        """The members that work on the job, the first to join first."""
        working = [(entry.joined_at, worker) for worker, entry in self.entries.items() if entry.left_at is None]
        return [worker for _, worker in sorted(working)]

    def claim(self, worker: str, members: int, now: float, *, idle: bool) -> list[int]:
        """The shards that the member takes. `members`: how many are active."""
        left = self.open if idle else self.open - self._open_suspects
        taken = list(self._sound(shards_in_claim(left, max(1, members))))
        if not taken and idle:
            while self._suspects and not taken:
                failures, index = heapq.heappop(self._suspects)
                if self.state[index] == OPEN and self.failures[index] == failures:
                    taken = [index]
        for index in taken:
            self._move(index, RUNNING)
            self.running[index] = Holder(worker)
        self.entries[worker].holds |= set(taken)
        if taken and idle:
            self.entries[worker].moved_at = now
        return taken

    def second(self, worker: str, index: int, now: float, *, idle: bool) -> bool:
        """Take a second copy."""
        holder = self.running.get(index)
        if holder is None or holder.second is not None or holder.worker == worker:
            return False
        holder.second = worker
        self.entries[worker].holds.add(index)
        if idle:
            self.entries[worker].moved_at = now
        return True

    def finish(self, worker: str, index: int, now: float) -> Iterable[str]:
        """The member has written a shard. Returns the other members that worked on it, if this one was first."""
        if self.state[index] not in (OPEN, RUNNING):
            self.entries[worker].holds.discard(index)
            return ()
        self._move(index, DONE)
        holder = self.running.pop(index, None)
        others = {holder.worker, holder.second} if holder else set[str | None]()
        for each in others - {None}:
            self.entries[str(each)].holds.discard(index)
        mine = self.entries[worker]
        mine.busy_s += now - mine.moved_at
        mine.records_done += self.records
        mine.shards_done += 1
        mine.moved_at = now
        return sorted(str(each) for each in others - {None, worker})

    def release(self, worker: str, *, failed: bool = False) -> list[int]:
        """The member no longer works on its shards. Returns those that are open now."""
        opened: list[int] = []
        for index in sorted(self.entries[worker].holds):
            holder = self.running[index]
            if holder.worker == worker:
                if failed:
                    self.failures[index] = self.failures.get(index, 0) + 1
                if holder.second is None:
                    del self.running[index]
                    self._move(index, OPEN)
                    opened.append(index)
                else:
                    holder.worker = holder.second
            holder.second = None
        self.entries[worker].holds.clear()
        return opened

    def leave(self, worker: str, now: float, *, failed: bool) -> Left:
        """The member works no more on the job."""
        opened = self.release(worker, failed=failed)
        entry = self.entries[worker]
        entry.left_at = now
        entry.failures += failed
        given_up = [index for index in opened if failed and self.failures.get(index, 0) >= self.max_attempts]
        for index in given_up:
            self._move(index, FAILED)
        if failed:
            if self.failed > self.tolerated:
                return Left.FAILED
            failures = sum(each.failures for each in self.entries.values())
            done = sum(each.shards_done for each in self.entries.values())
            if not given_up and failures >= self.max_attempts and failures > done:
                return Left.END
        others = self.active()
        if not others:
            return Left.NOTHING if self.lead != worker else Left.AGAIN if given_up else Left.END
        if self.lead == worker:
            self.lead = others[0]
        return Left.NOTHING

    def unfinished(self) -> tuple[bool, bool]:
        """Whether shards are open, and whether some are worked on."""
        return self.open > 0, bool(self.running)

    def in_flight(self) -> list[InFlight]:
        """The shards that members work on."""
        return [
            InFlight(index=index, records=self.records, worker=holder.worker, copied=holder.second is not None)
            for index, holder in sorted(self.running.items())
        ]

    def members(self) -> list[Member]:
        """All members."""
        rows = [
            Member(
                worker=worker,
                device=entry.device,
                joined_at=entry.joined_at,
                left_at=entry.left_at,
                moved_at=entry.moved_at,
                busy_s=entry.busy_s,
                phase=None,
                records_done=entry.records_done,
                failures=entry.failures,
                error=None,
            )
            for worker, entry in self.entries.items()
        ]
        return sorted(rows, key=lambda row: (row.joined_at, row.worker))

    def _sound(self, most: int) -> Iterable[int]:
        for _ in range(most):
            while self._again and (self.state[self._again[0]] != OPEN or self._again[0] in self.failures):
                heapq.heappop(self._again)
            if self._again:
                yield heapq.heappop(self._again)
            else:
                while self._next < len(self.state) and self.state[self._next] != OPEN:
                    self._next += 1
                if self._next == len(self.state):
                    return
                yield self._next
                self._next += 1

    def _move(self, index: int, to: int) -> None:
        """Change a shard's state."""
        before = self.state[index]
        suspect = index in self.failures
        self.open += (to == OPEN) - (before == OPEN)
        self._open_suspects += suspect * ((to == OPEN) - (before == OPEN))
        self.done += to == DONE
        self.failed += to == FAILED
        self.state[index] = to
        if to == OPEN and suspect:
            heapq.heappush(self._suspects, (self.failures[index], index))
        elif to == OPEN:
            heapq.heappush(self._again, index)
