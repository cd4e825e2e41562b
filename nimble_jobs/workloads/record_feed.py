"""Brings records of one shape to the device: read → decode or upload.

Threads or processes read ahead, and decode what the host decodes. Two threads decode pictures on the device, or one
uploads records. Batches never span two shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import tee

import numpy as np
import torch

from nimble_jobs.data import Reader, Wanted
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.pipeline import Meter, ahead, mapped
from nimble_jobs.planner import Loaded, Request
from nimble_jobs.planner.jobs.loaded import BUFFERS
from nimble_jobs.planner.module.limits import Limits
from nimble_jobs.preprocess import bits
from nimble_jobs.workloads.bad_records import BadRecords
from nimble_jobs.workloads.context import Fetching
from nimble_jobs.workloads.cuts import Bounds
from nimble_jobs.workloads.decoding import THREADS, DeviceDecoding
from nimble_jobs.workloads.parts import Part
from nimble_jobs.workloads.stages import Stages

_READ_AHEAD = 2  # batches that wait to be uploaded
UPLOADED = 2  # batches that wait for a replay
# Batches that have been read and still occupy their memory: with the decoders, in the queue, and with two threads that
# pass them on.
_HELD = THREADS + 1 + _READ_AHEAD + 2


Turn = Sequence[Bounds] | Generator[Bounds]  # batches that are read in a row


class RecordFeed:
    """The batches of records that have one shape."""

    def __init__(
        self,
        reader: Reader,
        loaded: Loaded,
        turns: Iterable[Turn],
        stages: Stages,
        *,
        last: int,
        bad: BadRecords,
        limits: Limits,
        decode: Callable[[Meter], DeviceDecoding] | None = None,
        fetching: Fetching | None = None,
    ) -> None:
        """`turns` are all batches of the job, or those of one claim after another. `last` is the last shard; -1: not
        known. `decode` makes what decodes pictures on the device; None: records arrive as they are.
        `fetching`: what still fetches the records, if `turns` is a list.
        """
        self.total = reader.total
        self.last = last
        self._reader, self._loaded, self._turns, self._stages = reader, loaded, turns, stages
        self.bad, self._limits = bad, limits
        self._alone, self._fetching = stages.alone, fetching
        self._decoding = decode(stages.decode) if decode is not None else None
        self._buffers: Buffers | None = None

    def arrived(self) -> Generator[tuple[Arrived | None, Part]]:
        """As `Feed` says."""
        found = self._arrived()
        return found if self._fetching is None else self._once_fetched(found, self._fetching)

    def _arrived(self) -> Generator[tuple[Arrived | None, Part]]:
        self._loaded.arrivals.begin()
        if not self._alone:
            encoded = self._decoding is not None
            self._buffers = self._loaded.buffers(*memory_of(self._loaded.request, self._reader, encoded=encoded))
            self._buffers.begin()
        parts: Iterator[Part] = self._read()
        if not self._alone and (self._decoding is not None or self._limits.bounded):
            parts = ahead(parts, _READ_AHEAD, name="nimble-checks")
        if self._decoding is not None:
            return self._in_slots(parts)
        uploaded = upload(parts, [self._loaded])
        return uploaded if self._alone else ahead(uploaded, UPLOADED, meter=self._stages.upload, name="nimble-upload")

    def end(self) -> None:
        """As `Feed` says."""
        self._unread()
        self._loaded.arrivals.end()
        if self._buffers is not None:
            self._buffers.end()

    def close(self) -> None:
        """As `Feed` says."""
        if self._decoding is not None:
            self._decoding.close()

    def _once_fetched(
        self, found: Generator[tuple[Arrived | None, Part]], fetching: Fetching
    ) -> Generator[tuple[Arrived | None, Part]]:
        """The same batches. The thread that takes them waits for their records, and not for threads that wait."""
        try:
            for bounds in self._turns:
                for at in bounds:
                    fetching.until(at.start, at.stop)
                    item = next(found, None)
                    if item is None:  # the pipeline is closing
                        return
                    yield item
        finally:
            fetching.unread()
            found.close()

    def _read(self) -> Generator[Part]:
        """Batches of checked records, in order. Raises DataError for too many bad records."""
        for bounds in self._turns:
            asked, places = tee(bounds)
            spans = ((at.start, at.stop) for at in asked)
            batches = self._reader.batches(
                batch_size=self._loaded.request.batch_size,
                bounds=list(spans) if isinstance(bounds, Sequence) else spans,
                wanted=Wanted(stored=self._loaded.request.preprocess is not None, encoded=self._decoding is not None),
                buffers=self._buffers,
                meter=self._stages.read,
            )
            with ExitStack() as opened:
                if not isinstance(bounds, Sequence):
                    opened.callback(bounds.close)
                opened.callback(batches.close)
                try:
                    for read, at in zip(batches, places, strict=False):  # a place is known before its batch is read
                        batch = self._limits.sift(read, self._reader.place)
                        self.bad.add(batch.bad)
                        yield Part(at=at, batch=batch)
                except BaseException:
                    self._unread()
                    raise

    def _in_slots(self, parts: Iterator[Part]) -> Generator[tuple[Arrived | None, Part]]:
        if self._alone:
            found: Generator[tuple[Arrived | None, Part] | None] = (self._decoded(part) for part in parts)
        else:
            found = mapped(
                self._decoded,
                parts,
                threads=THREADS,
                depth=THREADS + 1,
                meter=self._stages.decode,
                timed=False,  # it waits for a slot on the device
                name="nimble-decode",
            )
        with closing(found):
            for item in found:
                if item is None:  # the pipeline is closing
                    return
                yield item

    def _decoded(self, part: Part) -> tuple[Arrived | None, Part] | None:
        assert self._decoding is not None
        if not len(part.batch):
            part.batch.release()
            return None, part
        try:
            found = self._decoding(part.batch)
        except BaseException:
            self._unread()
            raise
        if found is None:
            return None
        arrived, batch = found
        known = {record.index for record in part.batch.bad}
        self.bad.add([record for record in batch.bad if record.index not in known])
        return arrived, replace(part, batch=batch)

    def _unread(self) -> None:
        """Before threads that read ahead are waited for: they may wait for records, which nobody needs any more."""
        if self._fetching is not None:
            self._fetching.unread()


def memory_of(request: Request, reader: Reader, *, encoded: bool) -> tuple[int, int]:
    """The host's memory for a job: bytes of a batch, and how many batches; `encoded`: the device decodes pictures.

    All processes that read can work while later stages hold as many batches as they may.
    """
    size = request.batch_size
    count = max(BUFFERS, min(-(-reader.total // size), reader.at_once(size, encoded=encoded) + _HELD))
    if encoded:
        return size * reader.encoded_bytes, count
    crossing = request.preprocess or reader.signature
    return size * math.prod(crossing.shape) * np.dtype(crossing.dtype).itemsize, count


def upload(parts: Iterator[Part], lanes: list[Loaded], *, pads: bool = True) -> Generator[tuple[Arrived | None, Part]]:
    """The batches on the device of their lanes. Ends early once the pipeline is closing.

    Without `pads`, short batches stay short; then the device must be the host.
    """
    before: tuple[Arrived, Part] | None = None
    try:
        with closing(parts):  # type: ignore[type-var]  # a generator
            for part in parts:
                if not len(part.batch):
                    part.batch.release()
                    yield None, part
                    continue
                x = _tensor(part.batch.x)
                arrived = lanes[part.lane].arrivals.upload(x) if pads else Arrived(x=x)
                if arrived is None:  # the pipeline is closing
                    return
                if before is not None:
                    _release(*before)
                before = arrived, part
                yield arrived, part
    finally:
        if before is not None:  # also if it ends early: the device may still read its memory
            _release(*before)


def _release(arrived: Arrived, part: Part) -> None:
    """Release the host's memory of a batch once the batch is on the device."""
    if arrived.ready is not None:
        arrived.ready.synchronize()
        part.batch.release()


def _tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits(x if x.flags.writeable else x.copy()))
