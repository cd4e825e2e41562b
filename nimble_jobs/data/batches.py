"""Reads batches ahead: several threads each read a part of a batch straight into its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from nimble_jobs.data.buffers import Buffer, Buffers
from nimble_jobs.data.rows import keep_open
from nimble_jobs.data.source import Form, Loaded
from nimble_jobs.pipeline import Meter, usable_cores

Load = Callable[[np.ndarray, np.ndarray], Loaded]  # record indexes, and the memory for their rows

_COPY_THREADS = 8  # threads beyond this do not raise the memory bandwidth
_COPY_BYTES = 16 << 20  # bytes that a thread copies at a time, enough to hide Python's overhead


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """How far and by how many threads a source is read ahead."""

    piece: int  # records that one thread loads at a time
    threads: int  # 0: nothing is read ahead, by the caller's own thread
    depth: int  # batches in progress
    processes: int = 0  # processes that work while the threads wait for them; 0: the threads work

    @classmethod
    def away(cls, piece: int, processes: int, batch_size: int) -> Ahead:
        """For records that this many processes decode, `piece` at a time; each has one more piece waiting."""
        threads, piece = 2 * processes, min(piece, batch_size)
        depth = max(2, -(-threads * piece // batch_size) + 1)
        return cls(piece=piece, threads=threads, depth=depth, processes=processes)

    @classmethod
    def of(cls, piece: int | None, batch_size: int, form: Form, *, several: bool) -> Ahead:
        """For records that threads decode, `piece` at a time, or, for None, copy. `several`: more than one batch."""
        threads = usable_cores()
        if piece is None:
            whole = -(-batch_size * form.nbytes // _COPY_BYTES)  # pieces in a batch
            if not several and whole <= 1:  # a thread would cost more than it saves
                return cls(piece=batch_size, threads=0, depth=1)
            threads = min(threads, _COPY_THREADS) if several or whole > 1 else 1
            piece = -(-batch_size // whole) if whole else batch_size
        piece = min(piece, batch_size)
        return cls(piece=piece, threads=threads, depth=max(2, -(-2 * threads * piece // batch_size)))


Part = tuple[np.ndarray, Loaded]  # record indexes, and their results


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """The memory of a batch while its parts are being read."""

    start: int
    stop: int
    rows: np.ndarray  # [stop - start, *shape], C-contiguous
    buffer: Buffer | None
    parts: list[tuple[np.ndarray, Future[Loaded]]]

    def read(self) -> list[Part]:
        """Wait for the parts, and pack their good rows to the beginning. Raises what a part raised."""
        done = [(indexes, future.result()) for indexes, future in self.parts]
        first = good = 0
        for indexes, loaded in done:
            if good != first and len(loaded.x):
                self.rows[good : good + len(loaded.x)] = loaded.x
            good += len(loaded.x)
            first += len(indexes)
        return done


class _Reading:
    """The batches in progress."""

    def __init__(self, load: Load, form: Form, ahead: Ahead, buffers: Buffers | None, meter: Meter | None) -> None:
        self._load, self._form, self._ahead, self._buffers, self._meter = load, form, ahead, buffers, meter
        self._pool: ThreadPoolExecutor | None = None
        if ahead.threads:
            self._pool = ThreadPoolExecutor(ahead.threads, thread_name_prefix="nimble-read", initializer=keep_open)
        self._under_way: deque[Room] = deque()
        if meter is not None:
            meter.workers, meter.limit = ahead.processes or max(1, ahead.threads), ahead.depth
            meter.unit = "process" if ahead.processes else "thread"

    def __bool__(self) -> bool:
        return bool(self._under_way)

    @property
    def full(self) -> bool:
        """Whether a batch must be handed out before the next one can begin."""
        too_many = len(self._under_way) >= self._ahead.depth
        return bool(self) and (too_many or (self._buffers is not None and not self._buffers.free))

    def begin(self, start: int, stop: int, indexes: Callable[[int, int], np.ndarray]) -> bool:
        """Begin to read a batch. Waits for a buffer; False if there will be none."""
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
        """Wait for the oldest batch, and return it."""
        if self._meter is not None:
            self._meter.waiting(sum(all(part.done() for _, part in room.parts) for room in self._under_way))
        parts = self._under_way[0].read()  # if this raises, `close` releases the buffer once no thread writes to it
        return self._under_way.popleft(), parts

    def close(self) -> None:
        """End the threads, and release the buffers of batches that were not handed out."""
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
    """Yield batches over these bounds, in order, in their own memory or in `buffers`, with the results of their parts.

    Closing the generator ends its threads. The generator ends early if the buffers end. It waits for a buffer only if
    it has no batch to hand out, so one buffer is enough.
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
