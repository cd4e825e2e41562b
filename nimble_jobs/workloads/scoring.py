"""The stages of a scoring job, all at work at once from the first record to the last.

    read → decode or upload → replay → download → columns → shards

Threads or processes read ahead, and decode what the host decodes. Two threads decode pictures on the device, or one
uploads records. The job's own thread launches the replays, another turns outputs into columns, and a few write shards.
Batches never span two shards, and shards are cut from finished batches, so no stage waits at the end of a shard. A
queue between two stages holds a few batches, so memory is bounded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from nimble_jobs.data import BadRecord, Batch, Reader, Staging, Wanted
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.engine.flight import Landed
from nimble_jobs.pipeline import Meter, Sink, ahead, mapped
from nimble_jobs.planner import Prepared
from nimble_jobs.planner.module.limits import Limits
from nimble_jobs.preprocess import bits
from nimble_jobs.workloads import moving
from nimble_jobs.workloads.columns import Columns
from nimble_jobs.workloads.context import JobContext, Stop, Stopped
from nimble_jobs.workloads.cuts import Bounds, cut
from nimble_jobs.workloads.decoding import THREADS, DeviceDecoding
from nimble_jobs.workloads.heads import heads_of
from nimble_jobs.workloads.stages import Stages
from nimble_jobs.workloads.threshold import enforce_threshold

_READ_AHEAD = 2  # batches that wait to be uploaded
_UPLOADED = 2  # batches that wait for a replay
_LANDED = 1  # batches whose outputs wait to become columns
_SHARDS = 1  # shards that wait to be written
_WRITERS = 4  # threads that write shards; they mostly wait for the disk


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """A batch and its place in the output."""

    at: Bounds
    batch: Batch
    late: int = 0  # bad records that decoding on the device revealed


@dataclass(kw_only=True, eq=False)
class _Shard:
    """A shard that is being collected."""

    index: int
    columns: Columns
    bad: list[BadRecord] = field(default_factory=list)
    carries: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Result:
    """A batch with its outputs."""

    landed: Landed[_Part]
    carries: str | None  # after a shard's last batch: the name of state that the model carries into the next shard


@dataclass(kw_only=True)
class Tally:
    """Records done so far, including those in shards that earlier attempts finished."""

    done: int = 0
    bad: int = 0


class Scoring:
    """Scores all shards that are not finished yet."""

    def __init__(
        self,
        context: JobContext,
        reader: Reader,
        staging: Staging,
        prepared: Prepared,
        *,
        shards: list[tuple[int, int]],
        tally: Tally,
        limits: Limits,
        decode: Callable[[Meter], DeviceDecoding] | None = None,
    ) -> None:
        """`decode` makes what decodes pictures on the device; None: records arrive as they are."""
        self.prepared = prepared
        self.tally = tally
        self._context, self._reader, self._staging, self._limits = context, reader, staging, limits
        self._last_shard = len(shards) - 1
        self._parts = cut(shards, frozenset(staging.done), prepared.loaded.request.batch_size)
        self._alone = len(self._parts) <= 1  # a thread costs more than it would save
        in_flight = max(1, len(prepared.loaded.instances))
        self._stages = Stages(context, alone=self._alone, in_flight=in_flight, decodes=decode is not None)
        self._decoding = decode(self._stages.decode) if decode is not None else None
        self._adopted, self._bad_before = tally.done, tally.bad
        self._began = time.perf_counter()
        self._sent = 0  # batches sent to replays
        self.replays = 0  # batches that a schedule was replayed for; the others ran in eager
        self._heads = heads_of(context.spec)
        self._open: _Shard | None = None  # the shard that collects batches

    @property
    def scored(self) -> int:
        """Records that this attempt has scored so far."""
        return self.tally.done - self._adopted

    def run(self) -> dict[str, Any]:
        """Score and write all records; returns `Stages.summary`. Raises Stopped if the job has to end early."""
        try:
            self._run()
        finally:
            if self._decoding is not None:
                self._decoding.close()
        moving.finish(self._context, self.prepared, self._at())
        return self._stages.summary()

    def _run(self) -> None:
        loaded = self.prepared.loaded
        arrivals, buffers = loaded.arrivals, None if self._alone else loaded.buffers(self._batch_bytes())
        arrivals.begin()
        if buffers is not None:
            buffers.begin()
        source = self._arrived(buffers)
        writer = Sink(
            self._write,
            depth=self._depth(_SHARDS),
            threads=_WRITERS,
            meter=self._stages.shards,
            name="nimble-shards",
        )
        columns = Sink(
            partial(self._columns, writer),
            depth=self._depth(_LANDED),
            meter=self._stages.columns,
            name="nimble-columns",
        )
        try:
            finished = self._replays(source, columns)
            columns.finish()
            writer.finish()
        finally:
            arrivals.end()
            if buffers is not None:
                buffers.end()
            source.close()
            columns.drop()
            writer.drop()
        if not finished:
            raise Stopped

    def _batch_bytes(self) -> int:
        records = self.prepared.loaded.request.batch_size
        if self._decoding is not None:
            return records * self._reader.encoded_bytes
        crossing = self.prepared.loaded.request.preprocess or self._reader.signature
        return records * math.prod(crossing.shape) * np.dtype(crossing.dtype).itemsize

    def _depth(self, items: int) -> int:
        return 0 if self._alone else items

    def _read(self, buffers: Buffers | None) -> Generator[_Part]:
        """Batches of checked records, in order. Raises DataError for too many bad records."""
        bad = list[BadRecord]()
        bounds = [(at.start, at.stop) for at in self._parts]
        batches = self._reader.batches(
            batch_size=self.prepared.loaded.request.batch_size,
            bounds=bounds,
            wanted=Wanted(
                stored=self.prepared.loaded.request.preprocess is not None, encoded=self._decoding is not None
            ),
            buffers=buffers,
            meter=self._stages.read,
        )
        with closing(batches):  # type: ignore[type-var]  # a generator
            for at, read in zip(self._parts, batches, strict=False):
                batch = self._limits.sift(read, self._reader.place)
                bad.extend(batch.bad)
                if batch.bad:
                    known = self._bad_before + len(bad)
                    enforce_threshold(self._context.spec.run, known, self._reader.total, bad)
                yield _Part(at=at, batch=batch)

    def _arrived(self, buffers: Buffers | None) -> Generator[tuple[Arrived | None, _Part]]:
        """The same batches, ready for a replay; None in place of one without a good record."""
        parts: Iterator[_Part] = self._read(buffers)
        if not self._alone:
            parts = ahead(parts, _READ_AHEAD, name="nimble-checks")
        if self._decoding is not None:
            return self._in_slots(parts)
        return self._uploaded(parts) if self._alone else ahead(self._uploaded(parts), _UPLOADED, name="nimble-upload")

    def _in_slots(self, parts: Iterator[_Part]) -> Generator[tuple[Arrived | None, _Part]]:
        if self._alone:
            found: Generator[tuple[Arrived | None, _Part] | None] = (self._decoded(part) for part in parts)
        else:
            found = mapped(self._decoded, parts, threads=THREADS, depth=THREADS + 1, name="nimble-decode")
        with closing(found):
            for item in found:
                if item is None:  # the pipeline is closing
                    return
                yield item

    def _decoded(self, part: _Part) -> tuple[Arrived | None, _Part] | None:
        assert self._decoding is not None
        if not len(part.batch):
            part.batch.release()
            return None, part
        found = self._decoding(part.batch)
        if found is None:
            return None
        arrived, batch = found
        return arrived, replace(part, batch=batch, late=len(batch.bad) - len(part.batch.bad))

    def _uploaded(self, parts: Iterator[_Part]) -> Generator[tuple[Arrived | None, _Part]]:
        arrivals = self.prepared.loaded.arrivals
        before: tuple[Arrived, _Part] | None = None
        with closing(parts):  # type: ignore[type-var]  # a generator
            for part in parts:
                if not len(part.batch):
                    part.batch.release()
                    yield None, part
                    continue
                arrived = arrivals.upload(_tensor(part.batch.x))
                if arrived is None:  # the pipeline is closing
                    return
                if before is not None:
                    _release(*before)
                before = arrived, part
                yield arrived, part

    def _replays(self, source: Iterator[tuple[Arrived | None, _Part]], columns: Sink[_Result]) -> bool:
        """Replay all batches; False if the job ends before its last shard."""
        until: int | None = None  # the last shard to finish before the job drains
        while True:
            with closing(self.prepared.loaded.run(self._until_it_may_move(source), self._heads)) as results:
                for landed in results:
                    at = landed.beside.at
                    columns.put(self._counted(landed))
                    stop = self._context.stop()
                    if stop in (Stop.CANCEL, Stop.TIMEOUT):
                        return False
                    if stop is Stop.DRAIN and until is None:
                        until = at.shard
                    if at.last and at.shard == until:
                        return at.shard == self._parts[-1].shard
            if self._sent == len(self._parts):
                return True
            self.prepared = moving.better(self._context, self.prepared, self._at())

    def _until_it_may_move(
        self, source: Iterator[tuple[Arrived | None, _Part]]
    ) -> Iterator[tuple[Arrived | None, _Part]]:
        """Batches up to the point where the job may move to another schedule."""
        while self._sent < len(self._parts) and not moving.due(self._context, self.prepared, self._at):
            self._sent += 1
            yield next(source)

    def _at(self) -> moving.At:
        part = self._parts[self._sent] if self._sent < len(self._parts) else None
        return moving.At(
            record=part.start if part is not None else self._reader.total,
            done=self.scored,
            left=part.left if part is not None else 0,
            run_s=time.perf_counter() - self._began,
            waits=1 - self._stages.replay.load().busy,
        )

    def _counted(self, landed: Landed[_Part]) -> _Result:
        part = landed.beside
        part.batch.release()  # for the last batch, and if nothing is uploaded
        carries = self.prepared.loaded.altered() if part.at.last else None
        self.tally.done += part.batch.stop - part.batch.start
        self.tally.bad += len(part.batch.bad)
        if part.late:
            enforce_threshold(self._context.spec.run, self.tally.bad, self._reader.total, part.batch.bad)
        self._stages.landed(landed)
        if self.prepared.loaded.instances and len(part.batch):
            self.replays += 1
        self._context.report(done=self.tally.done, bad=self.tally.bad, timings=self._stages.due())
        return _Result(landed=landed, carries=carries)

    def _columns(self, writer: Sink[_Shard], result: _Result) -> None:
        """Add a batch to its shard. Batches come in order, so those of a shard follow each other."""
        landed, part = result.landed, result.landed.beside
        try:
            if self._open is None:
                classes = self._heads.classes
                columns = Columns(self._context.spec.output.fields, () if classes is None else classes.names)
                self._open = _Shard(index=part.at.shard, columns=columns)
            self._open.bad.extend(part.batch.bad)
            if len(part.batch):
                self._open.columns.add(landed.outputs, part.batch.ids, part.batch.labels)
        finally:
            landed.release()
        if part.at.last:
            shard, self._open = self._open, None
            writer.put(replace(shard, carries=result.carries))

    def _write(self, shard: _Shard) -> None:
        columns = shard.columns.finish()
        last = shard.index == self._last_shard
        write = partial(self._staging.write_shard, shard.index, columns, shard.bad, carries=shard.carries, last=last)
        self._context.patience.through(write)


def _release(arrived: Arrived, part: _Part) -> None:
    """Release the host's memory of a batch once the batch is on the device."""
    if arrived.ready is not None:
        arrived.ready.synchronize()
        part.batch.release()


def _tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits(x if x.flags.writeable else x.copy()))
