"""The stages of a scoring job, all at work at once from the first record to the last.

    read → decode or upload → replay → download → columns → cuts → shards

A `Feed` brings batches to the device. The job's own thread launches the replays, another turns outputs into columns,
a third cuts whole columns into shards, and a few write these. So no stage waits at the end of a shard, or of a window
of shards whose records have to be put back in order. A queue between two stages holds a few batches, or one window, so
memory is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nimble_jobs.data import AnyMember, AnyStaging
from nimble_jobs.data.answers import Answers
from nimble_jobs.data.shards import forms_of
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.engine.flight import Landed
from nimble_jobs.engine.landings import Landings
from nimble_jobs.pipeline import Sink
from nimble_jobs.planner import Prepared
from nimble_jobs.workloads import moving
from nimble_jobs.workloads.answering import FIELDS, answered
from nimble_jobs.workloads.collected import Collected, Shard, Wanted
from nimble_jobs.workloads.context import JobContext, Stop, Stopped
from nimble_jobs.workloads.deciding import At
from nimble_jobs.workloads.heads import heads_of
from nimble_jobs.workloads.parts import Feed, Lane, Part
from nimble_jobs.workloads.stages import Stages

_LANDED = 1  # batches whose outputs wait to become columns
_WHOLE = 1  # shards, or windows of shards, that are complete and are being cut
_SHARDS = 1  # shards that wait to be written
_WRITERS = 4  # threads that write shards; they mostly wait for the disk


@dataclass(frozen=True, kw_only=True, eq=False)
class _Result:
    """A batch with its outputs."""

    landed: Landed[Part]
    carries: str | None  # after a shard's last batch: the name of state that the model carries into the next shard
    batch_size: int  # of a full batch


@dataclass(frozen=True, kw_only=True, eq=False)
class _Whole:
    """Shards whose last batch has been added."""

    collected: Collected
    shards: range
    carries: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Ends:
    """What becomes of the outputs of texts."""

    per_token: frozenset[str] = frozenset()  # outputs with a value for each token
    answers: Answers | None = None  # what makes the lines of a batch file


DEFAULT_ENDS = Ends()


@dataclass(kw_only=True)
class Tally:
    """Records done so far, including those in shards that earlier attempts finished."""

    done: int = 0
    shards: frozenset[int] = frozenset()  # those that earlier attempts finished

    def counted(self, answers: Answers | None) -> int:
        """What the job reports: records; of a batch file requests, as if texts were done in the order of the input."""
        return self.done if answers is None else answers.number(self.done)

    @classmethod
    def of(cls, staging: AnyStaging, shards: list[tuple[int, int]]) -> Tally:
        """The records in shards that earlier attempts finished."""
        done = frozenset(staging.done)
        return cls(done=sum(shards[shard][1] - shards[shard][0] for shard in done), shards=done)


class Scoring:
    """Scores all shards that are not finished yet."""

    def __init__(
        self,
        context: JobContext,
        staging: AnyStaging | AnyMember,
        feed: Feed,
        lanes: Sequence[Lane],
        *,
        shards: list[tuple[int, int]],
        tally: Tally,
        stages: Stages,
        ends: Ends = DEFAULT_ENDS,
    ) -> None:
        """`lanes` are the models that the batches of `feed` are for."""
        self.lanes = lanes
        self.tally = tally
        self._context, self._staging, self._feed, self._stages = context, staging, feed, stages
        self.shards, self._done = shards, frozenset(staging.done)
        self._adopted = tally.done
        self.ready_s = 0.0  # seconds that `run` took to capture what makes results of the outputs
        self.began = time.perf_counter()  # when `run` asked for its first batch
        self._next: tuple[Arrived | None, Part] | None = None  # the batch that comes next, if it is known
        self.replays = 0  # batches that a schedule was replayed for; the others ran in eager
        self._heads, self._ends = heads_of(context.spec), ends
        names = () if self._heads.classes is None else self._heads.classes.names
        fields = context.spec.output.fields if ends.answers is None else FIELDS
        self._wanted = Wanted(fields=fields, classes=names, per_token=ends.per_token)
        self._forms = forms_of(staging.done)  # of values, by field, also in all shards of this attempt
        self._open: Collected | None = None  # the shards that collect batches
        self._landings = Landings()  # of the results of all lanes

    @property
    def prepared(self) -> Prepared:
        """The first lane's model."""
        return self.lanes[0].prepared

    @property
    def scored(self) -> int:
        """Records that this attempt has scored so far."""
        return self.tally.done - self._adopted

    @property
    def _overtaken(self) -> bool:
        """Whether the remaining batches have become pointless, because other members have scored them."""
        membership = self._context.membership
        return membership is not None and membership.overtaken

    def begin_again(self, feed: Feed) -> None:
        """Score the batches of another feed with the next `run`."""
        self._feed, self._next, self._open = feed, None, None

    def run(self) -> dict[str, Any]:
        """Score and write all records; returns `Stages.summary`. Raises Stopped if the job has to end early."""
        start = time.perf_counter()
        try:
            if len(self.lanes) == 1:  # buckets of texts wait for their first batch, which may never come
                self.prepared.loaded.make_ready(self._heads)
            self.began = time.perf_counter()
            self.ready_s = self.began - start
            self._run()
        finally:
            self._feed.close()
        moving.finish(self._context, [(lane.prepared, self._at(lane)) for lane in self.lanes])
        return self._stages.summary()

    def _run(self) -> None:
        source = self._feed.arrived()
        writer = Sink(
            self._write,
            depth=self._depth(_SHARDS),
            threads=_WRITERS,
            meter=self._stages.shards,
            name="nimble-shards",
        )
        cuts = Sink(partial(self._cut, writer), depth=self._depth(_WHOLE), most=_WHOLE, name="nimble-cuts")
        columns = Sink(
            partial(self._columns, cuts),
            depth=self._depth(_LANDED),
            meter=self._stages.columns,
            name="nimble-columns",
        )
        try:
            finished = self._replays(source, columns)
            columns.finish()
            cuts.finish()
            writer.finish()
        finally:
            self._feed.end()
            source.close()
            columns.drop()
            cuts.drop()
            writer.drop()
        if not finished:
            raise Stopped

    def _depth(self, items: int) -> int:
        return 0 if self._stages.alone else items

    def _replays(self, source: Iterator[tuple[Arrived | None, Part]], columns: Sink[_Result]) -> bool:
        """Replay all batches; False if the job ends before its last shard."""
        until: int | None = None  # the last shard to finish before the job drains
        self._next = next(source, None)
        while self._next is not None:
            lane = self.lanes[self._next[1].lane]
            lane.enter()
            with closing(lane.prepared.loaded.run(self._turn(lane, source), self._heads, self._landings)) as results:
                for landed in results:
                    at = landed.beside.at
                    result = self._counted(landed, lane)
                    with self._stages.waits.busy():
                        columns.put(result)
                    stop = self._context.stop()
                    if stop in (Stop.CANCEL, Stop.TIMEOUT) or self._overtaken:
                        return False
                    if stop is Stop.DRAIN and until is None:
                        until = at.shard
                    if at.last and at.shard == until:
                        return at.shard == self._feed.last
            if self._next is not None and moving.due(self._context, lane.prepared, partial(self._at, lane)):
                lane.prepared = moving.better(self._context, lane.prepared, self._at(lane))
            lane.leave()
        return True

    def _turn(self, lane: Lane, source: Iterator[tuple[Arrived | None, Part]]) -> Iterator[tuple[Arrived | None, Part]]:
        """The next batches of a lane, up to the point where it may move to another schedule."""
        while self._next is not None and self.lanes[self._next[1].lane] is lane:
            if moving.due(self._context, lane.prepared, partial(self._at, lane)):
                return
            part, in_eager = self._next[1], not lane.prepared.loaded.instances
            yield self._next
            with self._stages.waits.busy():
                self._next = next(source, None)
            if in_eager and part.at.last:  # `altered` is asked before the model is called again
                return

    def _at(self, lane: Lane) -> At:
        part = self._next[1] if self._next is not None else None
        return lane.at(
            record=part.at.start if part is not None else self._feed.total,
            left=part.at.left if part is not None else 0,
            waits=self._stages.waits.load().busy,
            idle=1 - self._stages.replay.load().busy,
        )

    def _counted(self, landed: Landed[Part], lane: Lane) -> _Result:
        part = landed.beside
        part.batch.release()  # for the last batch, and if nothing is uploaded
        carries = lane.prepared.loaded.altered() if part.at.last else None
        lane.done += part.records
        self.tally.done += part.records - self._counted_before(part)
        self._stages.landed(landed)
        if lane.prepared.loaded.instances and len(part.batch):
            self.replays += 1
        self._context.report(done=self.tally.counted(self._ends.answers), timings=self._stages.due())
        return _Result(landed=landed, carries=carries, batch_size=lane.prepared.loaded.request.batch_size)

    def _counted_before(self, part: Part) -> int:
        """Records of a batch whose shards earlier attempts finished: a window is scored again if any shard is left."""
        known = self.tally.shards.intersection(part.at.shards)
        if not known:
            return 0
        indexes = np.concatenate([part.batch.indexes, [record.index for record in part.batch.bad]])
        within = [self.shards[shard] for shard in known]
        return sum(int(((first <= indexes) & (indexes < stop)).sum()) for first, stop in within)

    def _columns(self, cuts: Sink[_Whole], result: _Result) -> None:
        """Add a batch to its shards. The batches of a shard follow each other, or those of a window of shards."""
        landed, part = result.landed, result.landed.beside
        try:
            if self._open is None:
                self._open = Collected(self._wanted, self._forms)
            self._open.add(landed.outputs, part.batch, result.batch_size)
        finally:
            landed.release()
        if part.at.last:
            whole, self._open = self._open, None
            cuts.put(_Whole(collected=whole, shards=part.at.shards, carries=result.carries))

    def _cut(self, writer: Sink[Shard], whole: _Whole) -> None:
        shards = whole.collected.cut(self.shards, whole.shards, self._done, carries=whole.carries)
        while True:
            with self._stages.cuts.busy():  # not while it waits for the writers
                shard = next(shards, None)
            if shard is None:
                return
            writer.put(shard)

    def _write(self, shard: Shard) -> None:
        if self._ends.answers is not None:
            shard, late = answered(shard, self._ends.answers, *self.shards[shard.index])
            self._feed.bad.add(late)
        last = shard.index == len(self.shards) - 1
        write = partial(
            self._staging.write_shard,
            shard.index,
            shard.columns,
            shard.bad,
            carries=shard.carries,
            counts=shard.counts,
            last=last,
        )
        self._context.patience.through(write)
