"""Bad records are counted by what was wrong with them, and enough of them end the job."""

from __future__ import annotations

from typing import Any

import pytest

from nimble_jobs.data import BadRecord
from nimble_jobs.errors import DataError
from nimble_jobs.job import BadKind
from nimble_jobs.spec import RunSpec
from nimble_jobs.workloads.bad_records import KINDS, BadRecords, enforce_threshold


class Told:
    """Takes reports."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __call__(self, **values: Any) -> None:
        self.values |= values


def bad_records(told: Told, threshold: float = -1.0, before: tuple[BadRecord, ...] = ()) -> BadRecords:
    run = RunSpec(error_threshold=threshold)
    return BadRecords(run, 10, place=lambda index: f"/in/x.npy: record {index}", report=told, before=before)


def record(index: int, reason: str) -> BadRecord:
    return BadRecord(index=index, id=f"id-{index}", reason=reason)


def test_kinds() -> None:
    """Numbers, paths and quoted words do not make kinds. The most frequent comes first, with its first place."""
    told = Told()
    bad = bad_records(told)
    bad.add([record(9, "is empty")])
    bad.add([record(i, f"cannot decode '{i}' of /a/{i}.png at byte {i * 7}") for i in range(1, 6)])
    assert told.values == {"bad": 6, "bad_kinds": bad.kinds()}
    assert bad.kinds() == (
        BadKind(reason="cannot decode '1' of /a/1.png at byte 7", count=5, first="/in/x.npy: record 1"),
        BadKind(reason="is empty", count=1, first="/in/x.npy: record 9"),
    )


def test_a_reason_does_not_repeat_its_place() -> None:
    """Readers put the place before some reasons."""
    bad = bad_records(Told())
    bad.add([record(3, "/in/x.npy: record 3: holds NaN")])
    assert bad.kinds() == (BadKind(reason="holds NaN", count=1, first="/in/x.npy: record 3"),)


def test_kinds_are_bounded() -> None:
    """However many reasons there are, all records are counted, and texts are cut."""
    bad = bad_records(Told())
    words = [f"{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}" for i in range(3000)]
    bad.add([record(i, f"{word} {'x' * 9000}") for i, word in enumerate(words)])
    kinds = bad.kinds()
    assert len(kinds) == KINDS + 1
    assert sum(kind.count for kind in kinds) == 3000
    assert (kinds[0].count, kinds[0].first) == (3000 - KINDS, f"/in/x.npy: record {KINDS}")
    assert "only the first 50 kinds" in kinds[0].reason
    assert max(len(kind.reason) for kind in kinds) <= 500


def test_a_request_counts_once() -> None:
    """However many of its texts are bad, and whichever attempt found that."""
    told, run = Told(), RunSpec(error_threshold=0.5)
    first = record(0, "is empty")
    bad = BadRecords(
        run, 4, place=lambda index: f"line {index}", report=told, before=(first,), request_of=lambda index: index // 3
    )
    bad.add([record(1, "is null"), record(2, "is empty")])
    assert bad.count == 1
    bad.add([record(3, "is null"), record(4, "is null"), record(5, "is empty")])
    assert told.values["bad"] == 2
    with pytest.raises(DataError, match=r"^3 of 4 requests are bad, .*; the last one is id-8: is null"):
        bad.add([record(8, "is null")])


@pytest.mark.parametrize(("share", "bad", "total"), [(0.29, 29, 100), (0.57, 57, 100), (0.1, 3, 30), (1e-3, 1, 1000)])
def test_a_share_allows_what_it_says(share: float, bad: int, total: int) -> None:
    """Not one less because it is no binary fraction."""
    run = RunSpec(error_threshold=share)
    enforce_threshold(run, bad, total, [record(0, "is empty")])
    with pytest.raises(DataError, match=rf"^{bad + 1} of {total} records are bad, more than run\.error_threshold"):
        enforce_threshold(run, bad + 1, total, [record(0, "is empty")])


def test_the_threshold_counts_earlier_attempts() -> None:
    """What is one too many has been reported when the error is raised."""
    told = Told()
    bad = bad_records(told, 0.2, before=(record(0, "is empty"),))
    assert told.values["bad"] == 1
    bad.add([record(4, "is empty")])
    with pytest.raises(DataError, match=r"^3 of 10 records are bad, .*; the last one is id-7: is null"):
        bad.add([record(7, "is null")])
    assert told.values["bad"] == 3
    assert [(kind.reason, kind.count) for kind in told.values["bad_kinds"]] == [("is empty", 2), ("is null", 1)]
