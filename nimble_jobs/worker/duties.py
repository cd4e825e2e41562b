"""Work that a worker does from time to time beside its jobs, as small objects that the supervisor's loop calls.

To add one, write a class with `name`, `every_s` and `run` in a file of its own and list it in `worker.serve.duties_of`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from nimble_jobs.errors import HomeReplaced, LeaseLost, StoreError, StoreTrouble
from nimble_jobs.patience import passes
from nimble_jobs.worker.owed import Owed

log = logging.getLogger(__name__)

RETRY_S = 5.0  # wait before a failed duty is retried; it doubles with each failure in a row
LONGEST_S = 600.0
SLOW_S = 1.0  # a duty that fails after such a wait for the store is the last one for now

Record = Callable[[str, str], object]  # takes a duty's name and its error, and records both for users to see


class Duty(Protocol):
    """Work that is repeated."""

    @property
    def name(self) -> str:
        """Its name in logs and events: `recover`, `prune`, `fire`."""

    @property
    def every_s(self) -> float:
        """Seconds between two runs."""

    def run(self, now: float) -> bool | None:
        """Run it at `now`, in Unix seconds. True if more is left to do, so that it is due again at once. May raise
        anything.

        The worker handles no signal meanwhile, so work of more than about a second must be split into parts.
        """


class Together:
    """The same duty for each of several devices, as one duty."""

    def __init__(self, duties: Sequence[Duty]) -> None:
        self.name = duties[0].name
        self.every_s = duties[0].every_s
        self._duties = duties

    def run(self, now: float) -> None:
        for duty in self._duties:
            duty.run(now)


class Every:
    """Tells when repeated work is due. A clock that was set back makes it due at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._done_at: float | None = None

    def due(self, now: float) -> bool:
        """True at first, and `seconds` after the last `done`."""
        return self._done_at is None or not self._done_at <= now < self._done_at + self._seconds

    def done(self, now: float) -> None:
        """Note that it was done at `now`."""
        self._done_at = now


class Duties:
    """Runs the due duties. A failed duty is logged, recorded and retried later, and never ends the worker."""

    def __init__(
        self,
        duties: Iterable[Duty],
        *,
        record: Record,
        leaves: Callable[[], bool] = lambda: False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`leaves` says whether the process is about to end. Then no further duty begins, since each may wait seconds
        for a locked store.
        """
        self._duties = tuple((duty, Every(duty.every_s)) for duty in duties)
        self._record = record
        self._leaves = leaves
        self._monotonic = monotonic
        self._unrecorded = Owed()
        self._again_at: dict[str, float] = {}  # by the monotonic clock
        self._in_a_row: dict[str, int] = {}
        self.failing: dict[str, str] = {}  # error of a duty's last run, by its name

    def run(self, now: float) -> None:
        """Run the duties that are due at `now`. Raises HomeReplaced and LeaseLost only; the worker must leave then."""
        for duty, every in self._duties:
            if self._leaves():
                return
            if self._monotonic() < self._again_at.get(duty.name, 0.0) or not every.due(now):
                continue
            began = self._monotonic()
            try:
                more = duty.run(now)
            except (HomeReplaced, LeaseLost):
                raise
            except Exception as error:  # noqa: BLE001  # whatever a duty meets, the worker's jobs go on
                self._failed(duty.name, error)
                if isinstance(error, StoreTrouble) and self._monotonic() - began >= SLOW_S:
                    return  # a server that does not answer: each of the others would wait as long
            else:
                if not more:
                    every.done(now)
                self._went_well(duty.name)
        try:
            self._unrecorded.pay()
        except (HomeReplaced, LeaseLost):
            raise
        except StoreError as error:  # it stays in the list, and the loop will meet the same error
            log.debug("recording a failure failed: %s", error)

    def _failed(self, name: str, error: Exception) -> None:
        row = 1 if passes(error) else self._in_a_row.get(name, 0) + 1  # the error may pass soon, so retry soon
        self._in_a_row[name] = row
        pause_s = min(RETRY_S * 2.0 ** min(row - 1, 30), LONGEST_S)
        self._again_at[name] = self._monotonic() + pause_s
        reason = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        foreseen = isinstance(error, StoreError)
        log.error(
            "%s failed and will be retried in %.0f s: %s", name, pause_s, reason, exc_info=None if foreseen else error
        )
        if self.failing.get(name) != reason:
            self.failing[name] = reason
            self._unrecorded.add(lambda: self._record(name, reason))

    def _went_well(self, name: str) -> None:
        self._again_at.pop(name, None)
        self._in_a_row.pop(name, None)
        if self.failing.pop(name, None) is not None:
            log.warning("%s works again", name)
