"""A member's part of a scoring job on which several devices work: it claims shards, scores them, perhaps publishes.

Of texts it claims windows, each of which is several shards. To the store a window is one shard.
"""

from __future__ import annotations

import random
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from nimble_jobs.data import AnyStaging, Reader, stage_member
from nimble_jobs.data.answers import Answers
from nimble_jobs.data.shards import Shard
from nimble_jobs.errors import ShardsMissing
from nimble_jobs.job import Member, ShardClaim
from nimble_jobs.plural import count
from nimble_jobs.workloads.answering import answered
from nimble_jobs.workloads.bad_records import enforce_threshold, of_failed_shard
from nimble_jobs.workloads.collected import Shard as Lost
from nimble_jobs.workloads.context import JobContext, Stop, Stopped
from nimble_jobs.workloads.cuts import Span
from nimble_jobs.workloads.parts import Feed
from nimble_jobs.workloads.scoring import Scoring
from nimble_jobs.workloads.stragglers import pause_s, worth_a_copy
from nimble_jobs.workloads.telling import tell_troubles
from nimble_jobs.workloads.waiting import go_on

T = TypeVar("T")


class Part:
    """What one member does. Its own thread and those of the pipeline use it."""

    def __init__(
        self,
        context: JobContext,
        records: int,
        *,
        answers: Answers | None = None,
        basis: str,
        decoded_by: str | None = None,
    ) -> None:
        """`records`: of the input. With `answers`, of a batch file, all members count requests."""
        assert context.membership is not None
        self._context, self._records, self._answers = context, records, answers
        self._total = records if answers is None else answers.total
        self._what = "records" if answers is None else "requests"
        self._membership, self._job = context.membership, context.job
        self._first: Sequence[ShardClaim] = ()  # claims with which the next round begins
        self._windows: Sequence[Span] | None = None
        self._written: dict[int, dict[int, Shard]] = {}  # by window, until it is whole
        self._writing = threading.Lock()
        self.staging = context.patience.through(
            lambda: stage_member(
                context.spec.output,
                context.job.id,
                context.job.attempt,
                str(context.job.worker),
                through=context.patience.through,
                finish=self._finished,
                basis=basis,
                decoded_by=decoded_by,
            )
        )

    def claims_windows(self, windows: Sequence[Span]) -> None:
        """What is claimed is these windows of shards, not single shards."""
        self._windows = windows

    def open(self, shards: Sequence[tuple[int, int]], staging: AnyStaging) -> None:
        """Let others join. Only for the member that claimed the job. `staging` has the shards that are done already.

        Raises FencedOut.
        """
        done, bad = frozenset(staging.done), len(staging.bad)
        if self._windows is not None:
            shards = [(window.start, window.stop) for window in self._windows]
            done = frozenset(n for n, window in enumerate(self._windows) if done.issuperset(window.shards))
            bad = sum(len(staging.done[shard].bad) for n in done for shard in self._windows[n].shards)
        if self._answers is not None:
            shards = [(self._answers.number(first), self._answers.number(stop)) for first, stop in shards]
        self._patiently(
            lambda now: self._context.store.shards.open(
                self._job, self._context.device, shards, done, bad=bad, now=now, software=self._context.software
            )
        )

    def turns(self) -> Iterator[tuple[Sequence[ShardClaim], int]]:
        """One claim after another, until there is nothing more to claim; each time with how many records are to be
        scored after it, by this member or others.
        """
        claims, self._first = self._first, ()
        while claims:
            self._membership.holds([claim.index for claim in claims])
            # What a better schedule would gain, all members gain.
            left = self._patiently(lambda _now: self._context.store.shards.records_left(self._job))
            mine = sum(claim.stop - claim.start for claim in claims)
            yield claims, max(0, left - mine)
            if claims[0].suspect:  # nothing else may fail with it
                return
            claims = self._patiently(lambda now: self._context.store.shards.claim(self._job, now, idle=False))
            if not claims and (copied := self._copy(self._members(), idle=False)) is not None:
                claims = [copied]

    def spans(self) -> Iterator[tuple[Sequence[Span], int]]:
        """As `turns`, for windows."""
        assert self._windows is not None
        for claims, beyond in self.turns():
            records = beyond * self._records // max(1, self._total)  # a request has several
            yield [self._windows[claim.index] for claim in claims], records

    def run(self, scoring: Scoring, feed: Callable[[], Feed]) -> dict[str, Any]:
        """Score shards until all are done, in rounds: a new one, with a new `feed`, begins if shards are open again or
        worth a copy.

        Returns the figures of the longest round. Raises Stopped if the job has to end early, DataError for too many
        bad records.
        """
        figures: dict[str, Any] = {}
        longest_s = 0.0
        rounds = 0
        while claims := self._next():
            self._first = claims
            began = time.monotonic()
            found: dict[str, Any] = {}
            if rounds:
                scoring.begin_again(feed())
            rounds += 1
            try:
                found = scoring.run()
            except Stopped:
                if self._context.stop() is not Stop.GO:
                    raise
            self._give_up_claims()  # if it was overtaken; after an error its shards have failed with it
            if time.monotonic() - began > longest_s:
                longest_s, figures = time.monotonic() - began, found or figures
        return figures

    def rate(self) -> float | None:
        """Records, or requests, a second of all members together, since the first of them joined."""
        members = self._context.store.shards.members(self._job.id, self._job.attempt)
        seconds = max(m.moved_at for m in members) - min(m.joined_at for m in members)
        return sum(member.records_done for member in members) / seconds if seconds > 0 else None

    def publishes(self) -> bool:
        """Whether it is up to this member to publish; otherwise it has left the job. Raises FencedOut."""
        tell_troubles(self._context, self.staging.troubles)
        return not self._patiently(lambda now: self._context.store.shards.retire(self._job, now))

    def complete(self, staging: AnyStaging, reader: Reader, shards: Sequence[tuple[int, int]]) -> None:
        """Take over all members' shards for publication. The records of shards that have failed are bad records.
        `shards`: where each begins and ends.

        Raises DataError for too many other bad records, ShardsMissing if shards must be scored again.
        """
        if staging.finished is not None:  # another one published, and died before it could say so
            return
        self._context.patience.through(lambda: staging.adopt(last=True))
        # Whoever finished the shard with the last one may have died before it could end the job.
        enforce_threshold(self._context.spec.run, len(staging.bad), self._total, staging.bad, what=self._what)
        failed = self._patiently(lambda _now: self._context.store.shards.failed(self._job))
        for claim, error in failed:
            for index in self._shards_of(claim.index):
                if index not in staging.done:
                    why = of_failed_shard(index, error)
                    bad = [reader.bad_record(record, why) for record in range(*shards[index])]
                    lost = Lost(index=index, columns={}, bad=bad)
                    if self._answers is not None:
                        lost, _ = answered(lost, self._answers, *shards[index])
                    self._context.patience.through(partial(staging.write_shard, index, lost.columns, lost.bad))
        missing = len(shards) - len(staging.done)
        if missing:
            path, them = self._context.spec.output.path, count(missing, "shard")
            problem = (
                f"{path}: {them} of other devices are missing here, damaged, or made with another decoder of pictures"
            )
            raise ShardsMissing(problem)
        if failed:  # a window that failed may have finished shards, which count as what they are
            bad_records = len(staging.bad)
            self._patiently(lambda _now: self._context.store.shards.recount(self._job, bad_records))

    def _next(self) -> Sequence[ShardClaim]:
        """Claims for another round; none once all shards are done. Waits for other members. Raises Stopped."""
        shards = self._context.store.shards
        while True:
            is_open, is_running = self._patiently(lambda _now: shards.unfinished(self._job))
            if is_open and (claims := self._patiently(lambda now: shards.claim(self._job, now, idle=True))):
                return claims
            if not is_open and not is_running:
                return ()
            members = self._members()
            copied = self._copy(members, idle=True)
            if copied is not None:
                return [copied]
            go_on(self._context)
            time.sleep(pause_s(len(members), leads=not self._job.joined, chance=random.random()))  # noqa: S311

    def _copy(self, members: Sequence[Member], *, idle: bool) -> ShardClaim | None:
        shards = self._context.store.shards
        in_flight = self._patiently(lambda _now: shards.in_flight(self._job))
        index = worth_a_copy(in_flight, members, str(self._job.worker), time.time())
        return None if index is None else self._patiently(lambda now: shards.second(self._job, index, now, idle=idle))

    def _members(self) -> Sequence[Member]:
        return self._patiently(lambda _now: self._context.store.shards.members(self._job.id, self._job.attempt))

    def _finished(self, shard: Shard) -> None:
        """A shard is written. Raises DataError if the members together found too many bad records."""
        index, found = shard.index, shard.bad
        if self._windows is not None:
            index = bisect_right(self._windows, shard.index, key=lambda window: window.first) - 1
            with self._writing:  # several threads write shards
                written = self._written.setdefault(index, {})
                written[shard.index] = shard
                if len(written) < len(self._shards_of(index)):
                    return
                whole = [one for _, one in sorted(written.items())]
            found = tuple(record for one in whole for record in one.bad)
        self._membership.drops([index])  # first, or the member might seem to have been overtaken by itself
        bad = self._context.store.shards.finish(self._job, index, len(found), time.time())
        self._written.pop(index, None)  # not before: if the store could not take it, the last shard comes again
        if found:
            enforce_threshold(self._context.spec.run, bad, self._total, found, what=self._what)

    def _shards_of(self, index: int) -> range:
        """The shards of what was claimed under this number."""
        return range(index, index + 1) if self._windows is None else self._windows[index].shards

    def _give_up_claims(self) -> None:
        """Whatever this member claimed and did not finish is for others."""
        self._written.clear()
        self._membership.drops()
        self._patiently(lambda _now: self._context.store.shards.release(self._job))

    def _patiently(self, work: Callable[[float], T]) -> T:
        return self._context.patience.through(lambda: work(time.time()))
