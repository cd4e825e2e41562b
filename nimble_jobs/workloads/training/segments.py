"""Epochs and validations one after the other, each begun while the one before is read to its end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from nimble_jobs.workloads.training.reading import Lot

_NEAR = 2  # lots before its end a segment has asked for all that it will read


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """An epoch, or the rest of one, or a validation."""

    lots: Generator[Lot]
    batches: int  # of its reading order, from the order's beginning


def in_turn(segments: Iterable[Segment]) -> Generator[Lot | None]:
    """The lots of all segments; None after each.

    Readers work ahead of need, but only within their segment. So the next one is begun by a thread of its own as soon
    as this one has asked for its last records: those who read and decode go on without a pause. Closing the generator
    closes both.
    """
    waiting = iter(segments)
    opened = deque[_Begun]()  # the one that is read, and perhaps the one after it

    def begin() -> None:
        segment = next(waiting, None)
        if segment is not None:
            opened.append(_Begun(segment))

    try:
        begin()
        while opened:
            now = opened[0]
            for lot in now:
                if len(opened) == 1 and now.batches - lot.batches[-1].taken <= _NEAR * len(lot.batches):
                    begin()
                yield lot
            yield None
            opened.popleft().close()
            if not opened:
                begin()
    finally:
        for segment in opened:
            segment.close()


class _Begun:
    """A segment whose first lot is being read."""

    def __init__(self, segment: Segment) -> None:
        self.batches = segment.batches
        self._lots = segment.lots
        self._first: Future[list[Lot]] = Future()
        self._thread = threading.Thread(target=self._begin, name="nimble-begin", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Lot]:
        yield from self._first.result()
        yield from self._lots

    def close(self) -> None:
        """End what the segment's reader has begun."""
        self._thread.join()
        self._lots.close()

    def _begin(self) -> None:
        try:
            self._first.set_result([lot for lot in (next(self._lots, None),) if lot is not None])
        except BaseException as e:  # noqa: BLE001 - raised where the first lot is taken
            self._first.set_exception(e)
