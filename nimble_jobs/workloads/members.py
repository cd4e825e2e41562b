"""A member's part of a scoring job on which several devices work: it claims shards, scores them, perhaps publishes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from nimble_jobs.data import AnyStaging, Reader, stage_member
from nimble_jobs.data.shards import Shard
from nimble_jobs.errors import ShardsMissing
from nimble_jobs.job import Member, ShardClaim
from nimble_jobs.plural import count
from nimble_jobs.workloads.bad_records import enforce_threshold
from nimble_jobs.workloads.context import JobContext, Stop, Stopped
from nimble_jobs.workloads.cuts import Bounds, cut_claims, shards_for
from nimble_jobs.workloads.parts import Feed
from nimble_jobs.workloads.scoring import Scoring
from nimble_jobs.workloads.stragglers import pause_s, worth_a_copy
from nimble_jobs.workloads.telling import tell_troubles
from nimble_jobs.workloads.waiting import go_on

T = TypeVar("T")


class Part:
    """What one member does. Its own thread and those of the pipeline use it."""

    def __init__(
        self, context: JobContext, total: int, *, size: int, basis: str, decoded_by: str | None = None
    ) -> None:
        """`total`: records of the input; `size`: records in a batch."""
        assert context.membership is not None
        self._context, self._total, self._size = context, total, size
        self._membership, self._job = context.membership, context.job
        self._first: Sequence[ShardClaim] = ()  # claims with which the next round begins
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

    def open(self, shards: Sequence[tuple[int, int]], staging: AnyStaging) -> None:
        """Let others join. Only for the member that claimed the job. `staging` has the shards that are done already.

        Raises FencedOut.
        """
        done, bad = frozenset(staging.done), len(staging.bad)
        self._patiently(
            lambda now: self._context.store.shards.open(self._job, self._context.device, shards, done, bad=bad, now=now)
        )

    def turns(self) -> Iterator[list[Bounds]]:
        """The batches of one claim after another, until there is nothing more to claim."""
        claims, self._first = self._first, ()
        while claims:
            self._membership.holds([claim.index for claim in claims])
            # What a better schedule would gain, all members gain.
            left = self._patiently(lambda _now: self._context.store.shards.records_left(self._job))
            mine = sum(claim.stop - claim.start for claim in claims)
            yield cut_claims(claims, self._size, beyond=max(0, left - mine))
            if claims[0].suspect:  # nothing else may fail with it
                return
            claims = self._patiently(lambda _now: self._context.store.shards.claim(self._job, suspects=False))
            if not claims and (copied := self._copy(self._members())) is not None:
                claims = [copied]

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
        """Records a second of all members together, since the first of them joined."""
        members = self._context.store.shards.members(self._job.id, self._job.attempt)
        seconds = max(m.moved_at for m in members) - min(m.joined_at for m in members)
        return sum(member.records_done for member in members) / seconds if seconds > 0 else None

    def publishes(self) -> bool:
        """Whether it is up to this member to publish; otherwise it has left the job. Raises FencedOut."""
        tell_troubles(self._context, self.staging.troubles)
        return not self._patiently(lambda now: self._context.store.shards.retire(self._job, now))

    def complete(self, staging: AnyStaging, reader: Reader) -> None:
        """Take over all members' shards for publication. The records of shards that have failed are bad records.

        Raises DataError for too many other bad records, ShardsMissing if shards must be scored again.
        """
        if staging.finished is not None:  # another one published, and died before it could say so
            return
        self._context.patience.through(lambda: staging.adopt(last=True))
        # Whoever finished the shard with the last one may have died before it could end the job.
        enforce_threshold(self._context.spec.run, len(staging.bad), self._total, staging.bad)
        for claim, error in self._patiently(lambda _now: self._context.store.shards.failed(self._job)):
            if claim.index not in staging.done:
                why = f"its shard {claim.index} failed: {error}"
                bad = [reader.bad_record(index, why) for index in range(claim.start, claim.stop)]
                self._context.patience.through(lambda index=claim.index, bad=bad: staging.write_shard(index, {}, bad))  # type: ignore[misc]
        output = self._context.spec.output
        missing = len(shards_for(reader, output.shard_size)) - len(staging.done)
        if missing:
            raise ShardsMissing(
                f"{output.path}: {count(missing, 'shard')} of other devices are missing here, damaged, or made with "
                "another decoder of pictures"
            )

    def _next(self) -> Sequence[ShardClaim]:
        """Claims for another round; none once all shards are done. Waits for other members. Raises Stopped."""
        shards = self._context.store.shards
        while True:
            is_open, is_running = self._patiently(lambda _now: shards.unfinished(self._job))
            if is_open and (claims := self._patiently(lambda _now: shards.claim(self._job, suspects=True))):
                return claims
            if not is_open and not is_running:
                return ()
            members = self._members()
            copied = self._copy(members)
            if copied is not None:
                return [copied]
            go_on(self._context)
            time.sleep(pause_s(len(members), leads=not self._job.joined, chance=random.random()))  # noqa: S311

    def _copy(self, members: Sequence[Member]) -> ShardClaim | None:
        shards = self._context.store.shards
        in_flight = self._patiently(lambda _now: shards.in_flight(self._job))
        index = worth_a_copy(in_flight, members, str(self._job.worker), time.time())
        return None if index is None else self._patiently(lambda now: shards.second(self._job, index, now))

    def _members(self) -> Sequence[Member]:
        return self._patiently(lambda _now: self._context.store.shards.members(self._job.id, self._job.attempt))

    def _finished(self, shard: Shard, digest: str) -> None:
        """A shard is written. Raises DataError if the members together found too many bad records."""
        self._membership.drops([shard.index])  # first, or the member might seem to have been overtaken by itself
        bad = self._context.store.shards.finish(self._job, shard.index, digest, len(shard.bad), time.time())
        if shard.bad:
            enforce_threshold(self._context.spec.run, bad, self._total, shard.bad)

    def _give_up_claims(self) -> None:
        """Whatever this member claimed and did not finish is for others."""
        self._membership.drops()
        self._patiently(lambda _now: self._context.store.shards.release(self._job))

    def _patiently(self, work: Callable[[float], T]) -> T:
        return self._context.patience.through(lambda: work(time.time()))
