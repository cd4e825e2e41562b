"""Batches read ahead: several threads each read a part of a batch to where it will lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from nimble_jobs.data.buffers import Buffer, Buffers
from nimble_jobs.data.source import Form, Loaded
from nimble_jobs.pipeline import Meter, usable_cores

Load = Callable[[np.ndarray, np.ndarray], Loaded]  # record indexes, and where their rows go

_COPY_THREADS = 8  # they fill what the memory can take
_COPY_BYTES = 16 << 20  # what one of them copies at a time: enough for Python's part in it not to count


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """How far and by how many threads a source is read ahead."""

    piece: int  # records that one thread loads at a time
    threads: int  # 0: nothing is read ahead, by the caller's own thread
    depth: int  # batches under way
    processes: int = 0  # that work while the threads wait for them; 0: the threads work

    @classmethod
    def away(cls, piece: int, processes: int, batch_size: int) -> Ahead:
        """For records that so many processes decode `piece` at a time; each has one piece more to go on with."""
        threads, piece = 2 * processes, min(piece, batch_size)
        depth = max(2, -(-threads * piece // batch_size) + 1)
        return cls(piece=piece, threads=threads, depth=depth, processes=processes)

    @classmethod
    def of(cls, piece: int | None, batch_size: int, batches: int, form: Form) -> Ahead:
        """For records that are decoded `piece` at a time, or, for None, copied."""
        threads = usable_cores()
        if piece is None:
            whole = -(-batch_size * form.nbytes // _COPY_BYTES)  # pieces in a batch
            if batches <= 1 and whole <= 1:  # a thread costs more than it would save
                return cls(piece=batch_size, threads=0, depth=1)
            threads = min(threads, _COPY_THREADS) if whole * batches > 1 else 1
            piece = -(-batch_size // whole) if whole else batch_size
        piece = min(piece, batch_size)
        return cls(piece=piece, threads=threads, depth=max(2, -(-2 * threads * piece // batch_size)))


Part = tuple[np.ndarray, Loaded]  # record indexes, and what came of them


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """The memory of a batch, whose parts are being read."""

    start: int
    stop: int
    rows: np.ndarray  # [stop - start, *shape], C-contiguous
    buffer: Buffer | None
    parts: list[tuple[np.ndarray, Future[Loaded]]]

    def read(self) -> list[Part]:
        """What came of the parts, whose good rows are then packed from the first one on. Raises what a part raised."""
        done = [(indexes, future.result()) for indexes, future in self.parts]
        first = good = 0
        for indexes, loaded in done:
            if good != first and len(loaded.x):
                self.rows[good : good + len(loaded.x)] = loaded.x
            good += len(loaded.x)
            first += len(indexes)
        return done


class _Reading:
    """The batches under way."""

    def __init__(self, load: Load, form: Form, ahead: Ahead, buffers: Buffers | None, meter: Meter | None) -> None:
        self._load, self._form, self._ahead, self._buffers, self._meter = load, form, ahead, buffers, meter
        self._pool = ThreadPoolExecutor(ahead.threads, thread_name_prefix="nimble-read") if ahead.threads else None
        self._under_way: deque[Room] = deque()
        if meter is not None:
            meter.workers, meter.limit = ahead.processes or max(1, ahead.threads), ahead.depth
            meter.unit = "process" if ahead.processes else "thread"

    def __bool__(self) -> bool:
        return bool(self._under_way)

    @property
    def full(self) -> bool:
        """Whether a batch must be handed out before the next can begin."""
        too_many = len(self._under_way) >= self._ahead.depth
        return bool(self) and (too_many or (self._buffers is not None and not self._buffers.free))

    def begin(self, start: int, stop: int, indexes: Callable[[int, int], np.ndarray]) -> bool:
        """Read a batch. Waits for a buffer; False if there will be none."""
        buffer = None
        if self._buffers is None:
            rows = np.empty((stop - start, *self._form.shape), dtype=self._form.dtype)
        elif (buffer := self._buffers.take()) is None:
            return False
        else:
            rows = buffer.array[: (stop - start) * self._form.nbytes].view(self._form.dtype)
            rows = rows.reshape(stop - start, *self._form.shape)
        room = Room(start=start, stop=stop, rows=rows, buffer=buffer, parts=[])
        self._under_way.append(room)
        for a in range(start, stop, self._ahead.piece):
            b = min(a + self._ahead.piece, stop)
            some = indexes(a, b)
            room.parts.append((some, self._started(some, rows[a - start : b - start])))
        return True

    def first(self) -> tuple[Room, list[Part]]:
        """The batch that was begun first, read."""
        if self._meter is not None:
            self._meter.waiting(sum(all(part.done() for _, part in room.parts) for room in self._under_way))
        parts = self._under_way[0].read()  # if this raises, `close` releases the buffer, when no thread writes to it
        return self._under_way.popleft(), parts

    def close(self) -> None:
        """End the threads and release the buffers of batches that nobody got."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for room in self._under_way:
            if room.buffer is not None:
                room.buffer.release()
        if self._meter is not None:
            self._meter.over()

    def _started(self, indexes: np.ndarray, rows: np.ndarray) -> Future[Loaded]:
        if self._pool is not None:
            return self._pool.submit(self._metered, indexes, rows)
        done: Future[Loaded] = Future()
        try:
            done.set_result(self._metered(indexes, rows))
        except Exception as e:  # noqa: BLE001 - raised where the result is taken
            done.set_exception(e)
        return done

    def _metered(self, indexes: np.ndarray, rows: np.ndarray) -> Loaded:
        if self._meter is None:
            return self._load(indexes, rows)
        if self._ahead.processes:
            loaded = self._load(indexes, rows)
            self._meter.worked(loaded.busy_s or 0.0)
            return loaded
        with self._meter.busy():
            return self._load(indexes, rows)


def read_ahead(
    load: Load,
    bounds: Iterable[tuple[int, int]],
    indexes: Callable[[int, int], np.ndarray],
    form: Form,
    *,
    ahead: Ahead,
    buffers: Buffers | None = None,
    meter: Meter | None = None,
) -> Generator[tuple[Room, list[Part]]]:
    """Batches over these bounds, in order, in memory of their own or in `buffers`, and what came of their parts.

    Closing the generator ends its threads. It ends early once the buffers do. It waits for a buffer only when it has
    nothing to hand out, so one buffer is enough.
    """
    reading = _Reading(load, form, ahead, buffers, meter)
    try:
        for start, stop in bounds:
            while reading.full:
                yield reading.first()
            if not reading.begin(start, stop, indexes):
                return
        while reading:
            yield reading.first()
    finally:
        reading.close()
