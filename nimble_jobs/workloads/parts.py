"""What flows through the stages of a scoring job."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from nimble_jobs.data import Batch
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.planner import Prepared
from nimble_jobs.workloads.bad_records import BadRecords
from nimble_jobs.workloads.cuts import Bounds
from nimble_jobs.workloads.deciding import At


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A batch and its place in the output."""

    at: Bounds
    batch: Batch
    lane: int = 0  # which model runs it

    @property
    def records(self) -> int:
        """Good and bad ones."""
        return len(self.batch) + len(self.batch.bad)


@dataclass(kw_only=True)
class Lane:
    """A model that is ready for batches of one shape, and what it has done so far."""

    prepared: Prepared
    share: float = 1.0  # of the records that are left, as far as is known
    done: int = 0  # records
    run_s: float = 0.0  # seconds of earlier turns
    entered: float | None = None  # when its turn began; None: it is not its turn

    def enter(self) -> None:
        """Its turn begins."""
        self.entered = time.perf_counter()

    def leave(self) -> None:
        """Its turn ends."""
        self.run_s, self.entered = self._seconds(), None

    def _seconds(self) -> float:
        """Seconds of all turns so far."""
        return self.run_s + (time.perf_counter() - self.entered if self.entered is not None else 0.0)

    def at(self, *, record: int, left: int, waits: float, idle: float) -> At:
        """Where the job stands, from this lane's view."""
        return At(
            record=record,
            done=self.done,
            left=round(left * self.share),
            run_s=self._seconds(),
            waits=waits,
            idle=idle,
        )


class Feed(Protocol):
    """Brings batches to the device."""

    @property
    def total(self) -> int:
        """Records of the input."""

    @property
    def bad(self) -> BadRecords:
        """The bad records that are known so far, also those that are still on their way."""

    @property
    def last(self) -> int:
        """The last shard that is to be written; -1: none is."""

    def arrived(self) -> Generator[tuple[Arrived | None, Part]]:
        """All batches, ready for a replay; None in place of one without a good record. Closing it ends its threads.

        Raises DataError for too many bad records.
        """
        ...

    def end(self) -> None:
        """Wake the threads that wait for memory, so that the generator can be closed."""

    def close(self) -> None:
        """Release what decodes."""
