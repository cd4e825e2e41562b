"""The bad records of an attempt by what was wrong with them, and how many of them a job tolerates."""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from nimble_jobs.data import BadRecord
from nimble_jobs.errors import DataError
from nimble_jobs.job import BadKind
from nimble_jobs.spec import RunSpec

KINDS = 50  # that are told apart
_REST = f"other reasons (only the first {KINDS} kinds are counted separately)"
_LONGEST = 500  # characters of a reason or a place
_OF_FAILED_SHARD = re.compile(r"\bits shard \d+ failed: ")
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|(?:/[^\s:;,]+)+|\d+(?:\.\d+)?")


def of_failed_shard(index: int, error: str) -> str:
    """The reason of records that were left out because their shard failed again and again."""
    return f"its shard {index} failed: {error}"


def in_failed_shard(reason: str) -> bool:
    """Whether this is such a reason, perhaps behind a place."""
    return _OF_FAILED_SHARD.search(reason) is not None


class BadRecords:
    """Counts bad records by kind as they become known, in any thread, and reports them to the job.

    Reasons that differ only in numbers, quoted words and paths are one kind.
    """

    def __init__(
        self,
        run: RunSpec,
        total: int,
        *,
        place: Callable[[int], str],
        report: Callable[..., None],
        before: Sequence[BadRecord] = (),
        counted: Sequence[tuple[int, int]] = (),
        request_of: Callable[[int], int] | None = None,
    ) -> None:
        """`total`: records of the input, or its requests: with `request_of`, which says to which request a record
        belongs, a request with bad records counts once. `place` says where a record is, as `Reader.place` does.
        `report` takes `bad` and `bad_kinds`. `before`: the bad records that earlier attempts found.
        They lie in the positions `counted`, of finished shards, ascending. If those are read again, because others of
        their window are not finished, their bad records are not counted again.
        """
        self.count = 0
        self._run, self._total, self._place, self._report = run, total, place, report
        self._counts: Counter[str] = Counter()  # by kind
        self._firsts: dict[str, tuple[str, str]] = {}  # reason and place of the first record of each kind
        self._lock = threading.Lock()
        self._counted = counted
        self._request_of, self._requests = request_of, set[int]()  # those that were counted
        self.note(before)

    def note(self, bad: Sequence[BadRecord]) -> None:
        """Count these."""
        if not bad:
            return
        with self._lock:
            for record in bad:
                if self._request_of is not None:
                    request = self._request_of(record.index)
                    if request in self._requests:
                        continue
                    self._requests.add(request)
                self._count(record)
            self._report(bad=self.count, bad_kinds=self.kinds())

    def add(self, bad: Sequence[BadRecord]) -> None:
        """Count these. Raises DataError if there are more by now than the job tolerates."""
        fresh = [record for record in bad if not self._is_counted(record.index)]
        self.note(fresh)
        if fresh:
            what = "records" if self._request_of is None else "requests"
            enforce_threshold(self._run, self.count, self._total, fresh, what=what)

    def _is_counted(self, index: int) -> bool:
        at = bisect_right(self._counted, index, key=lambda shard: shard[0]) - 1
        return at >= 0 and index < self._counted[at][1]

    def kinds(self) -> tuple[BadKind, ...]:
        """The most frequent first."""
        return tuple(
            BadKind(reason=self._firsts[kind][0], count=count, first=self._firsts[kind][1])
            for kind, count in self._counts.most_common()
        )

    def _count(self, record: BadRecord) -> None:
        self.count += 1
        kind = _PARTICULAR.sub("…", record.reason[:_LONGEST])
        if kind not in self._firsts and len(self._firsts) >= KINDS:
            kind = _REST
        if kind not in self._firsts:
            place = self._place(record.index)
            reason = kind if kind is _REST else record.reason.removeprefix(f"{place}: ")[:_LONGEST]
            self._firsts[kind] = reason, place[-_LONGEST:]
        self._counts[kind] += 1


def enforce_threshold(run: RunSpec, bad: int, total: int, seen: Sequence[BadRecord], *, what: str = "records") -> None:
    """Raise DataError, naming the last bad record, if more than `run.error_threshold` of all records are bad."""
    if run.error_threshold < 0 or bad <= Fraction(str(run.error_threshold)) * total:  # 0.29 of 100 are 29
        return
    raise DataError(
        f"{bad} of {total} {what} are bad, more than run.error_threshold {run.error_threshold:g} allows "
        f"(raise it to leave out more bad records); the last one is {seen[-1].id}: {seen[-1].reason}"
    )
