"""Texts that may stand in a label, and how many different ones there may be."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from nimble_jobs.store.figures import OTHER

T = TypeVar("T", int, float)

NAMES = 200  # timers, and groups, that have a label of their own
REASONS = 50  # of misses

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def label(text: str) -> str:
    """`text` as a label: control characters and lone surrogates become escapes such as `\\x0a`.

    The writer of the exposition escapes backslashes, quotes and line feeds itself. Others would end a line for some
    readers.
    """
    encodable = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", encodable)


def bounded(counts: Iterable[tuple[str, T]], most: int) -> dict[str, T]:
    """Counts by label, of which the first `most` by name keep their own; the rest are summed under `other`.

    Choosing by name keeps counters monotone: a new name may push another into `other`, which only grows then.
    """
    together: dict[str, T] = {}
    for index, (name, count) in enumerate(sorted(counts)):
        key = label(name) if index < most and name != OTHER else OTHER
        together[key] = together[key] + count if key in together else count
    return together
