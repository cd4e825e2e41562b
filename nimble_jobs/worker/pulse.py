"""Writes a job's progress to the store and reads requests to stop, a few times a second, off the computing thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from nimble_jobs.errors import FencedOut, StoreError
from nimble_jobs.job import BadKind, Job
from nimble_jobs.pipeline import Beside
from nimble_jobs.store import Jobs, Membership
from nimble_jobs.workloads.context import Stop

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
_PHASES = 100  # phases whose beginnings are kept; a job that waits for a disk again and again has more


class Pulse:
    """One attempt's link to the store. Between batches it only checks a flag.

    `wish` returns what the process wants from the attempt (GO, DRAIN or CANCEL). `on_report` gets every report at once.
    `on_move` is called whenever the thread that entered this object reports or asks whether to stop, which is progress.
    """

    def __init__(
        self,
        jobs: Jobs | Membership,
        job: Job,
        *,
        wish: Callable[[], Stop] = lambda: Stop.GO,
        on_report: Callable[[dict[str, Any]], None] | None = None,
        on_move: Callable[[], None] = lambda: None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._jobs = jobs
        self._job = job
        self._wish = wish
        self._on_report = on_report
        self._on_move = on_move
        self._computing: int | None = None  # the thread whose progress counts
        self._interval_s = interval_s
        self._deadline = None if job.timeout_s is None else time.monotonic() + job.timeout_s
        self._values: dict[str, Any] = {"done": 0, "total": None, "bad": 0}
        self._bad_kinds: Sequence[BadKind] = ()
        self._phase: str | None = None  # before it began to wait
        self._phases: list[dict[str, Any]] = []  # each phase that began, and when, in Unix seconds
        self._dirty = False
        self._cancel = False
        self._fenced = False
        self._waiting: list[float] = []  # when each waiting thread began to wait, by the monotonic clock
        self._lock = threading.Lock()  # guards _values, _dirty and _waiting
        self._writing = threading.Lock()  # one write at a time, so that no older count overwrites a newer one
        self._over = threading.Event()
        self._beating = threading.Lock()  # held during each beat

    def __enter__(self) -> Self:
        self._computing = threading.get_ident()
        Beside(self._beat, name=f"pulse-{self._job.id}")
        self.moved()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with self._beating:  # the last beat is over
            pass

    def stop(self) -> Stop:
        """What the workload should do now. Raises FencedOut if the attempt no longer owns the job."""
        self.moved()
        self._check_fence()
        if self._cancel:
            return Stop.CANCEL
        if self._deadline is not None and not self._waiting and time.monotonic() > self._deadline:
            return Stop.TIMEOUT
        return self._wish()

    def waits(self, reason: str | None) -> None:
        """Note that a thread of the attempt waits for a disk or the store from now on; None: it goes on.

        The job's phase says so, and its timeout does not run meanwhile.
        """
        with self._lock:
            if reason is not None:
                self._waiting.append(time.monotonic())
                if len(self._waiting) > 1:
                    return
                self._phase, phase = self._values.get("phase"), "wait"
            else:
                since = self._waiting.pop()
                if self._waiting:
                    return
                phase = self._phase or "run"
                if self._deadline is not None:
                    self._deadline += time.monotonic() - since
            self._values["phase"], self._dirty = phase, True
            self._begin(phase)
            values = dict(self._values)
        if self._on_report:
            self._on_report(values)

    def report(
        self,
        *,
        phase: str | None = None,
        done: int | None = None,
        total: int | None = None,
        bad: int | None = None,
        schedule: dict[str, Any] | None = None,
        timings: dict[str, Any] | None = None,
        bad_kinds: Sequence[BadKind] | None = None,
    ) -> None:
        """Take new values; None keeps the old one. The next beat writes them, or the end of the attempt."""
        self.moved()
        self._check_fence()
        given = {"phase": phase, "done": done, "total": total, "bad": bad, "schedule": schedule, "timings": timings}
        with self._lock:
            self._values.update((name, value) for name, value in given.items() if value is not None)
            self._bad_kinds = bad_kinds or self._bad_kinds
            if phase is not None:
                self._begin(phase)
            self._dirty = True
            values = dict(self._values)
        if self._on_report:
            self._on_report(values)

    def timings(self, timings: dict[str, Any]) -> dict[str, Any]:
        """An attempt's timings, with the times at which its phases began."""
        with self._lock:
            return self._with_phases(timings)

    def _written(self) -> dict[str, Any]:
        timings = self._with_phases(self._values.get("timings") or {})
        more = {"timings": timings, "bad_kinds": self._bad_kinds}
        return self._values | {name: value for name, value in more.items() if value}

    def _with_phases(self, timings: dict[str, Any]) -> dict[str, Any]:
        return {**timings, "phases": list(self._phases)} if self._phases else timings

    def _begin(self, phase: str) -> None:
        if len(self._phases) < _PHASES and (not self._phases or self._phases[-1]["phase"] != phase):
            self._phases.append({"phase": phase, "at": round(time.time(), 3)})

    def flush(self, *, always: bool = False) -> None:
        """Write pending values. Raises FencedOut and StoreError."""
        with self._writing:
            with self._lock:
                if not (self._dirty or always):
                    return
                values = self._written()
                self._dirty = False
            try:
                self._fenced = not self._jobs.progress(self._job.id, self._job.attempt, **values)
            except StoreError:
                with self._lock:
                    self._dirty = True
                raise
        self._check_fence()

    def flush_soon(self) -> None:
        """Add pending values to the store's next transaction, which is the end of the attempt."""
        with self._writing, self._lock:
            if self._dirty:
                self._dirty = False
                self._jobs.progress_soon(self._job.id, self._job.attempt, **self._written())

    def moved(self) -> None:
        """Note progress, if the caller is the computing thread."""
        if threading.get_ident() == self._computing:
            self._on_move()

    def _check_fence(self) -> None:
        if self._fenced:
            raise FencedOut

    def _beat(self) -> None:
        troubled = False
        while not self._over.wait(self._interval_s):
            try:
                with self._beating:
                    if self._over.is_set():
                        return
                    self.flush()
                    self._cancel = self._cancel or self._jobs.cancel_wanted(self._job.id, self._job.attempt)
                troubled = False
            except FencedOut:  # the computing thread gets the error at its next report or question
                return
            except StoreError as error:  # progress can wait; a store that stays broken fails the job at its end
                if not troubled:
                    log.warning("writing progress failed: %s", error)
                troubled = True
            except Exception:
                log.exception("progress is no longer written, and a cancellation no longer seen")
                raise
